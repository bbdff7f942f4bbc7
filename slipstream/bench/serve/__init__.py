"""Measuring a server from outside."""
