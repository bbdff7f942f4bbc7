"""What the verbs share: options, opening a model, what goes to the terminal."""
