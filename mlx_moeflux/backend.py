"""Whether MLX can run here, and on what."""

from __future__ import annotations

import os
import sys

from mlx_moeflux.errors import UnsupportedError

DEVICE_VARIABLES = {
    # Metal then finishes long command buffers although the screen waits.
    "darwin": {"AGX_RELAX_CDM_CTXSTORE_TIMEOUT": "1"},
    # MLX ends a CUDA graph when the inputs of its launches have so many million numbers, and counts
    # whole arrays: by default at each launch that reads a large layer's experts, some 15 us of the
    # host. No limit at all is worse for prompts.
    "linux": {"MLX_MAX_MB_PER_BUFFER": "3000", "MLX_MAX_OPS_PER_BUFFER": "40"},
}


def set_device_variables() -> None:
    """Set :data:`DEVICE_VARIABLES` of this platform in ``os.environ``, but for those that are set.

    Metal and MLX read them when a process first uses its GPU. Loading a model and each command
    call this before; a program that computes with MLX on the GPU earlier calls it first.
    """
    for name, value in DEVICE_VARIABLES.get(sys.platform, {}).items():
        os.environ.setdefault(name, value)


def require_mlx() -> None:
    """Import MLX.

    Raises:
        UnsupportedError: MLX has no back end here (plain ``mlx`` on Linux is only a front end).
    """
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f"MLX has no back end on this machine ({error}); install one of the extras: pip "
            "install 'mlx_moeflux[cpu]', 'mlx_moeflux[cuda12]' or 'mlx_moeflux[cuda13]'."
        ) from error


def describe_backend() -> str:
    """Back end and device in words: ``mlx 0.32.4, cpu``."""
    require_mlx()
    import mlx.core as mx

    if mx.default_device() == mx.cpu:
        return f"mlx {mx.__version__}, cpu"
    kind = "metal" if mx.metal.is_available() else "cuda"
    name = mx.device_info(mx.gpu).get("device_name", "unknown device")
    return f"mlx {mx.__version__}, {kind}, {name}"
