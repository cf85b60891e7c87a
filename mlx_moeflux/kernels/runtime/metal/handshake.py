"""The kernel of the handshake on Apple's GPUs; see ``docs/handshake.md``.

It never ran on one; ``docs/notes/streaming.md`` lists what is unknown.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_moeflux.kernels.runtime import source
from mlx_moeflux.kernels.runtime.cuda.upload import address_of, bytes_of

FILE = "handshake.metal"
# The scope of the system is no public part of Metal's language; MLX's kernels/fence.metal (0.32.2)
# opens it so. Needs Metal 3.2, which is macOS 15.
INTERNALS = "#pragma METAL internals : enable\n"
INPUTS, OUTPUTS = ("ids", "words", "control"), ("slots",)
# Words of `control`: where those of all layers and of this one begin in `words`, and how often a
# thread looks.
BODY = """
const uint lane = thread_position_in_grid.x;
volatile coherent(system) device uint* shared = (volatile coherent(system) device uint*)words;
slots[lane] = pull(ids[lane], lane, shared + control[0], shared + control[1], control[2]);
"""
# Of handshake.c.
MOST_CHOSEN = 31
# Metal has no clock. A look is taken for a microsecond, which is not measured.
LOOKS_PER_SECOND = 1 << 20
_WORD = 4


def text() -> tuple[str, str]:
    """Return header and body as ``mx.fast.metal_kernel`` takes them."""
    header, body = source.metal_text(FILE, BODY)
    return INTERNALS + header, body


class Pull:
    """Launches the kernel for calls of `k` experts.

    It is no :class:`~mlx_moeflux.kernels.runtime.launcher.MetalKernel`, because it writes into an
    input and waits for the host.
    """

    copies = False

    def __init__(self, k: int):
        self.k = k
        header, body = text()
        self._launch = mx.fast.metal_kernel(
            name="moeflux_handshake",
            input_names=list(INPUTS),
            output_names=list(OUTPUTS),
            source=body,
            header=header,
        )
        self._words = mx.zeros((1,), mx.uint32)
        self._begin = 0

    def locked(self, nbytes: int) -> memoryview:
        """Allocate the memory of :meth:`control` and :meth:`slots`, once."""
        self._words = mx.zeros((-(-nbytes // _WORD),), mx.uint32)
        mx.eval(self._words)
        view = bytes_of(self._words)
        self._begin = address_of(view)
        return view

    def control(self, common: int, box: int, limit: int) -> mx.array:
        """Return the control words of a layer, evaluated.

        common, box: Addresses of the words of all layers, and of this one, in memory of
        :meth:`locked`. limit: Nanoseconds that the kernel waits at most, about.
        """
        starts = [(address - self._begin) // _WORD for address in (common, box)]
        looks = limit * LOOKS_PER_SECOND // 10**9
        control = mx.array(np.array([*starts, looks], np.uint32))
        mx.eval(control)
        return control

    def slots(self, ids: mx.array, control: mx.array) -> mx.array:
        """Return the slots ``[1, K]`` uint32 of the experts `ids`, which hold their blocks once it
        is evaluated."""
        return self._launch(  # pyright: ignore[reportCallIssue]  # stubs say: object
            inputs=[ids, self._words, control],
            grid=(self.k, 1, 1),
            threadgroup=(self.k, 1, 1),
            output_shapes=[ids.shape],
            output_dtypes=[mx.uint32],
        )[0]

    @staticmethod
    def finish() -> None:
        """Wait until no kernel runs."""
        mx.synchronize()


def pull_for(k: int) -> Pull | None:
    """Return the kernel for calls of `k` experts; None for more than 31."""
    return None if k > MOST_CHOSEN else Pull(k)
