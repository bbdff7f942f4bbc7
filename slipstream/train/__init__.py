"""Training drafters: data that the target wrote itself, features, losses, the trainer."""
