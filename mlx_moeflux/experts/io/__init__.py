"""From bytes on disk to the slots of a bank."""
