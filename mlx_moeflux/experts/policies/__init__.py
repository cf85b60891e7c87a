"""Eviction, prefetch and rebalance policies. Pure Python, no MLX."""
