"""`slipstream tune`."""
