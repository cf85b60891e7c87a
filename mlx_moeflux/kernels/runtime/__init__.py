"""Launch Metal texts on any GPU that MLX drives."""
