"""Attention over keys and values."""
