"""Keywords of a kernel's call: template, grid, outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_moeflux.kernels.runtime.launcher import MetalKernel

# A kernel and how it is launched.
Launch = tuple[MetalKernel, dict[str, Any]]


def launch_of(
    template: dict[str, Any],
    groups: tuple[int, int],
    threads: int,
    shapes: Sequence[tuple[int, ...]],
    *dtypes: mx.Dtype,
) -> dict[str, Any]:
    """Return keywords for a :class:`~mlx_moeflux.kernels.runtime.launcher.MetalKernel`: so many
    threadgroups along two axes, each a row of `threads`; shapes, dtypes: Of its outputs."""
    along, across = groups
    return {
        "template": template,
        "grid": (along * threads, across, 1),
        "threadgroup": (threads, 1, 1),
        "output_shapes": shapes,
        "output_dtypes": dtypes,
    }
