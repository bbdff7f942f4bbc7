"""Drafters made of drafters."""
