"""Measuring a model: what bounds it, what it reaches, and whether it is right meanwhile."""
