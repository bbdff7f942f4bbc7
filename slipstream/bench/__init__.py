"""Measuring: bodies, which give a small model the cost of a large one."""
