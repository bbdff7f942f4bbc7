"""`slipstream check`."""
