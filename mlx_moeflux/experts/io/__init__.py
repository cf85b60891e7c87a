"""Read experts from disk into the slots of a bank."""
