"""Readers of model files: Hugging Face directories, GGUF, the hub, built-in models."""
