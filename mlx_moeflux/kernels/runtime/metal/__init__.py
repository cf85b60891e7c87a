"""What runs on Apple's GPUs alone."""
