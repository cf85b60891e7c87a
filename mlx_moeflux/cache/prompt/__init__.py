"""States of prompts, kept in memory and on disk."""
