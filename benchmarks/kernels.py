"""Every implementation of an operation on this GPU: microseconds of a call, and of its kernels.

    python -m benchmarks.kernels [--only sdpa] [--tokens 1 2048]

Calls are those of ``mlx_moeflux tune --kernels``. "call" is the slope over the number of calls in
one `mx.eval`, the median of five. It is no less than what the host takes for a launch (4 to 12 us
on CUDA), so with PyTorch installed "kernels" is what CUPTI saw the call's kernels take.
"""

from __future__ import annotations

import argparse
from itertools import cycle, islice

import mlx.core as mx

from benchmarks.timing import call_time
from mlx_moeflux.backend import set_device_variables
from mlx_moeflux.kernels.examples import LARGE
from mlx_moeflux.kernels.operation import row_name
from mlx_moeflux.kernels.registry import OPERATIONS

DIFFERENT = 4
"""Calls with arguments of their own, so that a cache does not hold them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="part of an operation's name")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 2048])
    args = parser.parse_args()
    set_device_variables()
    if not (mx.metal.is_available() or mx.cuda.is_available()):
        print("kernels: MLX drives no GPU here")
        return
    print(f"{mx.device_info().get('device_name', '?')}, MLX {mx.__version__}")
    print(f"{'operation':20} {'tokens':>6} {'implementation':16} {'call':>10} {'kernels':>10}")
    kinds = [(record, kind) for record in OPERATIONS.values() for kind in record.proof.workloads]
    for record, kind in kinds:
        if args.only not in (called := row_name(record.name, kind)):
            continue
        for tokens in args.tokens:
            build = record.proof.workload
            rotated = [build(kind, LARGE, tokens, mx.bfloat16) for _ in range(DIFFERENT)]
            for name, implementation in record.implementations.items():
                times = measured(implementation, rotated)
                print(f"{called:20} {tokens:6} {name:16} {times}", flush=True)


def measured(implementation, rotated) -> str:
    """Return the two times of an implementation, or why it does not run."""

    def calls(count: int) -> list:
        return [implementation(*args, **kwargs) for args, kwargs in islice(cycle(rotated), count)]

    try:
        mx.eval(calls(DIFFERENT))
        time = call_time(calls, 10, 50)
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    kernels = "-" if time.kernels is None else f"{1e6 * time.kernels:.1f}"
    return f"{1e6 * time.wall:10.1f} {kernels:>10}"


if __name__ == "__main__":
    main()
