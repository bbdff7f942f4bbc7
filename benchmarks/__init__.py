"""Measurements. Ratios within one run, never absolute figures in a test: machines are noisy."""
