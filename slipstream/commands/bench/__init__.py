"""`slipstream bench`."""
