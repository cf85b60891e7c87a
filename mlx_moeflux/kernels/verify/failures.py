"""Kernels that fail when MLX evaluates what they are part of.

MLX compiles a kernel, and learns how many threads it may have, when the graph is evaluated: long
after the call that launched it. So no call can catch such an error and compute otherwise. Instead
the reply ends with one line, the kernel is marked for the rest of the process, and the next reply
takes other implementations. Want of memory is no failure of a kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from mlx_moeflux.errors import KernelError, MoefluxError
from mlx_moeflux.kernels.operation import Implementation
from mlx_moeflux.kernels.runtime.launcher import KERNELS

# What MLX says of a kernel that does not compile, or has too many threads for its registers.
_FAILED = (
    "Unable to build metal library",
    "Unable to load kernel",
    "maximum allowed threads per threadgroup",
    "Maximum threads per threadgroup",
)
# MLX's own kernels are compiled at first use on NVIDIA as well: ours must be named.
_FAILED_IF_NAMED = "Failed to compile kernel"
_NO_MEMORY = (
    "out of memory",
    "outofmemory",
    "insufficient memory",
    "unable to allocate",
    "attempting to allocate",
    "bad_alloc",
)


class Failed:
    """The kernels that failed, by name; ``everything``: one failed that MLX did not name.

    generation: How often something was marked; what was traced before holds failed kernels.
    """

    names: frozenset[str] = frozenset()
    everything = False
    generation = 0


def generation() -> int:
    """Return how often kernels were marked: older traces must be made again."""
    return Failed.generation


def failed(implementation: Implementation) -> bool:
    """Return True if an implementation launches a kernel that failed in this process."""
    launched = implementation.kernels
    return any(Failed.everything or kernel.name in Failed.names for kernel in launched)


def forget() -> None:
    """Trust every kernel again."""
    Failed.names, Failed.everything = frozenset(), False
    Failed.generation += 1


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Around everything that evaluates: a kernel's failure is marked.

    Raises:
        KernelError: In place of MLX's error, with the kernel's name where MLX gives it.
    """
    try:
        yield
    except MoefluxError:
        raise
    except (RuntimeError, ValueError) as error:
        names = None if lacks_memory(error) else _kernels_of(str(error))
        if names is None:
            raise
        _mark(names)
        called = f"kernel '{', '.join(sorted(names))}'" if names else "a kernel"
        raise KernelError(
            f"{called} failed on this GPU ({' '.join(str(error).split())[:200]}); the next reply "
            "uses stock MLX in its place, and 'mlx_moeflux check' tries every kernel."
        ) from error


def lacks_memory(error: Exception) -> bool:
    """Return True if an error of MLX means that memory is exhausted."""
    message = str(error).lower()
    return isinstance(error, MemoryError) or any(words in message for words in _NO_MEMORY)


def _mark(names: frozenset[str]) -> None:
    Failed.names |= names
    Failed.everything |= not names
    Failed.generation += 1


def _kernels_of(message: str) -> frozenset[str] | None:
    """The kernels that an error of MLX is about, none if it names none; None: it is about
    something else."""
    named = [name for name in KERNELS if f"moeflux_{name}" in message]
    # Names may begin with others.
    longest = frozenset(n for n in named if not any(o != n and o.startswith(n) for o in named))
    ours = longest and _FAILED_IF_NAMED in message
    return longest if ours or any(words in message for words in _FAILED) else None
