"""Training drafters: data written by the target itself, features, losses, the trainer."""
