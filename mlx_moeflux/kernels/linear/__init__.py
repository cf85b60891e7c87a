"""Products of rows with matrices."""
