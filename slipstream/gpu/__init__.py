"""Triton kernels, captured CUDA graphs, batches as lanes, trees as forests."""
