"""Run every kernel's cases on this GPU: ``python tools/pipeline_limits.py``, on a Mac.

Prints for each kernel the most threads that its cases launch in a threadgroup, and what MLX says
where a pipeline allows fewer: MLX compares the two when it evaluates a launch, and names the limit
in its error. Exits with 1 if a launch is refused.
"""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).parents[1]))

from mlx_moeflux.kernels.runtime.launcher import NoBackend, backend
from tests.kernels.cases import all_cases, variants


def main() -> int:
    """A line for each kernel."""
    if isinstance(backend(), NoBackend):
        print("MLX drives no GPU here.")
        return 1
    failed = 0
    for name, cases in sorted(all_cases().items()):
        threads = max(variant.threads for variant in variants(name))
        outcome = "allowed"
        for case in cases:
            try:
                with case.within():
                    mx.eval(case.call())
            except (RuntimeError, ValueError) as error:
                outcome = f"{case.name}: {' '.join(str(error).split())[:300]}"
                failed += 1
        print(f"{name:<40} {threads:>5} threads  {outcome}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
