"""Drafts from text: automaton, corpus on disk."""
