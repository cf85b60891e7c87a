"""The same texts on NVIDIA: dialect, modules, files."""
