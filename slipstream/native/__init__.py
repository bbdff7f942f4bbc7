"""CPU kernels, written as LLVM IR and compiled for the present CPU on first use."""
