"""Generation: prefill, decode, sampling, batches, text."""
