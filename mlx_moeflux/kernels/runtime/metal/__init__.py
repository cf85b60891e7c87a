"""Kernels that run on Apple's GPUs alone."""
