"""The measurements and searches of `slipstream tune`."""
