"""``python -m mlx_moeflux``."""

import sys

from mlx_moeflux.cli import main

if __name__ == "__main__":
    sys.exit(main())
