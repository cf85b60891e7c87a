"""The parts of a conversion: one weight, all of them, the writing, the directory."""
