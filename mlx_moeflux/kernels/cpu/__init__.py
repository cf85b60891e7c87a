"""Implementations for the CPU, through BLAS."""
