"""Events, statistics, traces and the simulator. No MLX."""
