"""One module for each layout of a checkpoint."""
