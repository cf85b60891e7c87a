"""Mutated files, templates and flags: what each does in a bounded process, see test_fuzz.py."""
