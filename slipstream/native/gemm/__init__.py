"""GEMM kernels for a CPU: float32, 8-bit, 4-bit, the matrix unit."""
