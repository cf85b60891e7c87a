"""Bounded child processes, in which templates are rendered and tokenizers tried; those that no text
bounds stay there."""
