"""Products that are rounded before they are added to something, in a trace as outside of one.

``mx.compile`` makes one kernel of a product and the sum behind it, and GPUs compute that in one
rounding. A step that calls the store is not traced: it must have the bits of one that is.
"""

from __future__ import annotations

import mlx.core as mx


def rounded(product: mx.array) -> mx.array:
    """Return `product`, which no sum behind it is fused with. Copies nothing if it is contiguous,
    as results of arithmetic are."""
    return mx.contiguous(product)
