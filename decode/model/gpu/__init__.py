"""A layer in few kernels on a GPU; no GPU has run any of it (docs/gpu_checks.md)."""
