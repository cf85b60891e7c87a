"""From a prompt to text: prefill, decode, sampling, batches."""
