"""The Triton kernels; importing a module of this folder imports Triton."""
