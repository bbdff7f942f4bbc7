"""Shared by trained heads: the module, its checkpoint, its rows over pages."""
