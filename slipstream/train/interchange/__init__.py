"""Writes drafters in the layouts of other projects."""
