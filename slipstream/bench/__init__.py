"""Measurements on the user's own prompts."""
