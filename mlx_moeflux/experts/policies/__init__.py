"""Eviction and prefetch policies. Pure Python, no MLX."""
