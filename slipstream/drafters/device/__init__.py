"""Drafting in device rounds."""
