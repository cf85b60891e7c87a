"""Calls of a streamed layer: slots, reads, waves."""
