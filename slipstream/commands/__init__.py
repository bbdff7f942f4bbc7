"""The verbs of the command line: one file and one plain function each. No file here needs typer, or insists on rich."""
