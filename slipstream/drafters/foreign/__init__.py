"""Draft models of another vocabulary."""
