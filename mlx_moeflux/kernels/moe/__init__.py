"""Routers and routed experts."""
