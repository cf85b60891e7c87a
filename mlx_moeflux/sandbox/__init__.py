"""A bounded child process, in which templates are rendered and unknown tokenizers tried."""
