"""Finding out what a method should do for one target: measurements and searches behind `slipstream tune`."""
