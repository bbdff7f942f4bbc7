"""`slipstream batch`."""
