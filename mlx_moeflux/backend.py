"""Whether MLX can run here, and on what."""

from __future__ import annotations

from mlx_moeflux.errors import UnsupportedError


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
