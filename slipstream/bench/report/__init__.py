"""The report: one self-contained HTML page with hand-made SVG."""
