"""Other devices than the one at hand, as one module of the package sees them."""

from __future__ import annotations

from types import SimpleNamespace

from mlx_moeflux.kernels.runtime import device


def seen_as(kind: str) -> SimpleNamespace:
    """The functions of :mod:`~mlx_moeflux.kernels.runtime.device` where the kind is `kind`."""
    return SimpleNamespace(**{**vars(device), "kind": lambda: kind})
