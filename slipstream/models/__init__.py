"""Models: configurations, checkpoints of several formats, and one decoder that runs them."""
