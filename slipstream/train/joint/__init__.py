"""Joint training: a copy of the target tuned together with a head."""
