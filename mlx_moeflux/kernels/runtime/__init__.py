"""How a Metal text becomes a launch."""
