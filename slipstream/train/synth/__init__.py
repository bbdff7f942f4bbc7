"""Conversations written by the target itself."""
