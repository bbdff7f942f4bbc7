"""Bodies: large models that compute what a small one does."""
