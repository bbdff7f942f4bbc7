"""The verbs of the command line: one file and one plain function each. typer is not needed here, rich is optional."""
