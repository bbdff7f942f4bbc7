"""Trees from any model's logits."""
