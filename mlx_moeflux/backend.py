"""MLX's back end: availability, description, environment variables; its one process and cores."""

from __future__ import annotations

import os
import sys
import threading

from mlx_moeflux.errors import UnsupportedError
from mlx_moeflux.installation import install_command

DEVICE_VARIABLES = {
    # Lets Metal finish long command buffers while the display needs the GPU.
    "darwin": {"AGX_RELAX_CDM_CTXSTORE_TIMEOUT": "1"},
    # MLX ends a CUDA graph once the inputs of its launches reach this size, and counts whole
    # arrays: the default ends it at each launch that reads a large layer's experts. No limit at
    # all slows prompts down.
    "linux": {"MLX_MAX_MB_PER_BUFFER": "3000", "MLX_MAX_OPS_PER_BUFFER": "40"},
}
RANK_VARIABLES = {
    # In a CUDA graph, in which MLX captures each sum anew, a sum takes three times as long.
    "MLX_USE_CUDA_GRAPHS": "0",
    # A process has graphs if it used its GPU before: there NCCL would register the buffers of sums
    # each time, for which other ranks' processes have to answer, although their GPUs may wait for
    # this graph.
    "NCCL_GRAPH_REGISTER": "0",
}


# How long a stream that runs nothing may take to say so.
_ANSWER_SECONDS = 2.0
_forked = _used = _lost = False


def use_mlx() -> None:
    """Note that this process computes with MLX. Each entrance of the package calls it.

    Raises:
        UnsupportedError: The process was forked from one that had computed. MLX's threads and
            streams, and those of models, stayed there: what the child starts would never end.
    """
    global _used, _lost
    if not _used:
        # The parent may have computed without this package.
        _lost = _forked and not _stream_answers()
        _used = True
    if _lost:
        raise UnsupportedError(
            "MLX was used before this process was forked, and computes in the parent alone; start "
            'processes with multiprocessing.set_start_method("spawn"), or load in the child before '
            "the parent loads or computes."
        )


def is_lost() -> bool:
    """Return True in a process that was forked from one that had computed: threads, files and
    pending work are the parent's."""
    return _lost


def _after_fork() -> None:
    global _forked, _lost
    _forked, _lost = "mlx.core" in sys.modules, _used


os.register_at_fork(after_in_child=_after_fork)


def _stream_answers() -> bool:
    """Return True if the thread behind this thread's default stream lives."""
    import mlx.core as mx

    stream = mx.default_stream(mx.default_device())
    waiting = threading.Thread(target=mx.synchronize, args=(stream,), daemon=True)
    waiting.start()
    waiting.join(_ANSWER_SECONDS)
    return not waiting.is_alive()


def set_device_variables(*, ranks: bool = False) -> None:
    """Set the :data:`DEVICE_VARIABLES` of this platform in ``os.environ``, unless set already.

    Metal and MLX read them at a process's first use of the GPU. Loading a model and each command
    call this function; a program that uses the GPU earlier calls it first. ranks: Set the
    :data:`RANK_VARIABLES`, too; the process is one of a group.
    """
    variables = DEVICE_VARIABLES.get(sys.platform, {}) | (RANK_VARIABLES if ranks else {})
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def require_mlx() -> None:
    """Import MLX.

    Raises:
        UnsupportedError: MLX has no back end (plain ``mlx`` on Linux is only a front end).
    """
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f"MLX has no back end on this machine ({error}); install the extra 'cpu', 'cuda12' or "
            f"'cuda13', such as with {install_command('mlx_moeflux[cpu]')}."
        ) from error


def describe_backend() -> str:
    """Describe back end and device: ``mlx 0.32.4, cpu``."""
    require_mlx()
    import mlx.core as mx

    version = mx.__version__  # pyright: ignore[reportAttributeAccessIssue]  # not in the stubs
    if mx.default_device() == mx.cpu:
        return f"mlx {version}, cpu"
    kind = "metal" if mx.metal.is_available() else "cuda"
    name = mx.device_info(mx.gpu).get("device_name", "unknown device")
    return f"mlx {version}, {kind}, {name}"


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use, as far as the system says."""
    allowed = getattr(os, "sched_getaffinity", None)  # macOS has none
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def clear_at_thread_end() -> None:
    """Let MLX drop what it keeps for the calling thread when the thread ends.

    MLX's traces hold Python objects and go with the system's thread, after Python has forgotten the
    thread. If the interpreter ends meanwhile, the process aborts.
    """
    if threading.current_thread() is not threading.main_thread() and not hasattr(_thread, "held"):
        _thread.held = _Held()


_thread = threading.local()


class _Held:
    """Lives as long as the thread that made it."""

    def __init__(self):
        import mlx.core as mx

        self._clear, self._thread_now = mx.clear_streams, threading.get_ident
        self._thread = threading.get_ident()

    def __del__(self):
        # What threads still hold when the interpreter ends goes in the main thread, after the names
        # of modules.
        if self._thread_now() == self._thread:
            self._clear()
