"""What a launch costs the host: through MetalKernel, and a bare call of MLX's own object.

    python benchmarks/host_cost.py

Prints microseconds for building one launch into MLX's graph (nothing is evaluated inside the
clock), the median of several rounds, and their ratio.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import mlx.core as mx

from mlx_moeflux.kernels import metal

BODY = """
    uint i = thread_position_in_grid.x;
    y[i] = T(silu(float(x[i])) * float(w[i]) + float(n[0]) * float(N));
"""
CALLS, ROUNDS = 400, 9


def per_call(call: Callable[[], mx.array]) -> float:
    """Median microseconds."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        outputs = [call() for _ in range(CALLS)]
        times.append((time.perf_counter() - start) / CALLS * 1e6)
        mx.eval(outputs)
    return statistics.median(times[1:])


def main() -> None:
    if not (mx.metal.is_available() or mx.cuda.is_available()):
        print("host_cost: MLX drives no GPU here")
        return
    kernel = metal.MetalKernel(
        "host_cost", file="common.metal", inputs=("x", "w", "n"), outputs=("y",), body=BODY
    )
    bare = metal.backend().build(kernel)
    x, w = mx.random.normal((1024,)), mx.random.normal((1024,))
    n = mx.zeros((8,), dtype=mx.int32)
    mx.eval(x, w, n)
    inputs, template = [x, w, n], [("T", mx.float32), ("N", 3)]
    shapes, dtypes, grid, group = [(1024,)], [mx.float32], (1024, 1, 1), (256, 1, 1)

    named = dict(template)

    def ours():
        return kernel(
            x, w, n, template=named, grid=grid, threadgroup=group,
            output_shapes=shapes, output_dtypes=dtypes,
        )[0]  # fmt: skip

    def theirs():
        return bare(
            inputs=inputs, template=template, grid=grid, threadgroup=group,
            output_shapes=shapes, output_dtypes=dtypes,
        )[0]  # fmt: skip

    mx.eval(ours(), theirs())
    cost, least = per_call(ours), per_call(theirs)
    print(
        f"host cost of a launch: {cost:.2f} us through MetalKernel, {least:.2f} us bare: "
        f"{cost / least:.2f} x"
    )


if __name__ == "__main__":
    main()
