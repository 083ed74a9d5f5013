"""Device copies and CUDA kernels, installed as kvtier.kernels."""
