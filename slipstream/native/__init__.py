"""Kernels for a CPU, written as LLVM code and compiled for the very processor when they are first needed."""
