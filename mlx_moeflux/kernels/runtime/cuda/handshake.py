"""The kernel of the handshake, which waits for the host; see ``docs/handshake.md``."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_moeflux.kernels.runtime.cuda import upload
from mlx_moeflux.kernels.runtime.cuda.module import Kernel

SOURCES = tuple(Path(__file__).with_name(name) for name in ("copy.cuh", "handshake.cuh"))
# Where all threads wait for the same host, more of them fill no bus.
BLOCKS, THREADS = 32, 256
# Of handshake.cuh: a thread of the first warp takes one word of the answer.
MOST_CHOSEN = 31
# The host writes while the kernel runs: no word may come from a cache of the GPU.
_LOAD = "#define LOAD(at) __ldcv(at)\n"
BODY = "own::pull<K>(ids, const_cast<own::u64*>((const own::u64*)control), slots);"
# Of handshake.cuh: words before the relay, and of it.
_CONTROL, _RELAY = 3, 32
# MLX reuses memory by size: no other array has this one.
_ALONE = 5003


def header() -> str:
    """Return the text before the kernel, in a namespace: MLX's own names stand around it."""
    text = "".join(file.read_text("ascii") for file in SOURCES)
    return f"{_LOAD}namespace own {{\n{text}}} // namespace own\n"


class Pull:
    """Launches the kernel for calls of `k` experts."""

    copies = True

    def __init__(self, driver: upload.Driver, k: int):
        self.k, self.locked = k, driver.locked
        kernel = Kernel("moeflux_handshake", header(), BODY, ("ids", "control"), ("slots",))
        self._launch = kernel.with_constants({"K": k}).build()

    def control(self, common: int, box: int, limit: int) -> mx.array:
        """Return the control words of a layer, evaluated.

        common, box: Addresses of the words of all layers, and of this one, in memory of
        :meth:`locked`. limit: Nanoseconds that the kernel waits at most.
        """
        words = np.zeros(_CONTROL + _RELAY, np.uint64)
        words[:_CONTROL] = common, box, limit
        # The result of an operation is in the GPU's memory, where an array of the host's is not.
        control = mx.concatenate([mx.array(words), mx.zeros((_ALONE,), mx.uint64)])
        mx.eval(control)
        return control

    def slots(self, ids: mx.array, control: mx.array) -> mx.array:
        """Return the slots ``[1, K]`` uint32 of the experts `ids`, which hold their blocks once it
        is evaluated."""
        return self._launch(
            inputs=[ids, control],
            grid=(BLOCKS * THREADS, 1, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[ids.shape],
            output_dtypes=[mx.uint32],
        )[0]

    @staticmethod
    def finish() -> None:
        """Wait until no kernel runs."""
        mx.synchronize()


def pull_for(k: int) -> Pull | None:
    """Return the kernel for calls of `k` experts; None where the host cannot lock memory for it,
    and for more than 31."""
    driver = upload.driver()
    return None if driver is None or k > MOST_CHOSEN else Pull(driver, k)
