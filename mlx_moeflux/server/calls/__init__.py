"""Syntaxes of tool calls, one a file, and what they share; needs the extra 'server'."""
