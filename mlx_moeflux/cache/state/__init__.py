"""The whole state of a sequence: snapshots, checkpoints, files."""
