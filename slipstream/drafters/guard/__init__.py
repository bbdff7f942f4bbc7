"""Guards between drafters and the engine: plug-ins in their own thread, slow calls."""
