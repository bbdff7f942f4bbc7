"""Other engines and ours on the same model, prompts and cores: `python -m benchmarks.peers`."""
