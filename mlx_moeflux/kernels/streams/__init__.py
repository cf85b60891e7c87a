"""Several residual streams instead of one."""
