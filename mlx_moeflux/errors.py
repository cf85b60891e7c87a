"""Errors that a user or a file can cause: one tree, one sentence each.

A message names the thing, the place (file, key, offset or limit) and the mend. The command line
prints it on one line and exits with 1. ``assert`` checks only what the package itself guarantees.
"""

MOST_CHARACTERS = 300


class MoefluxError(Exception):
    """Base of all errors that this package raises. A long message, which repeats a long value of a
    file, is cut in its middle."""

    def __init__(self, message: object = ""):
        text = str(message)
        if len(text) > MOST_CHARACTERS:
            text = f"{text[: MOST_CHARACTERS - 105]} ... {text[-100:]}"
        super().__init__(text)


class ConfigError(MoefluxError, ValueError):
    """config.json lacks a key, has an unknown one, or contradicts itself."""


class CheckpointError(MoefluxError, ValueError):
    """A checkpoint's files, tensor names, shapes or dtypes are wrong."""


class ExpertFileError(MoefluxError, ValueError):
    """Reading or writing expert blocks failed: missing, truncated, corrupt, or an I/O error."""


class ShapeError(MoefluxError, ValueError):
    """An array or a component of the caller has the wrong shape or dtype."""


class MemoryBudgetError(MoefluxError, ValueError):
    """A memory or disk budget is too small; the message has the smallest that works."""


class CacheError(MoefluxError, ValueError):
    """A sequence's state does not fit the call: position, kind, or context limit."""


class InputError(MoefluxError, ValueError):
    """A prompt, a token id or an option is invalid."""


class UnsupportedError(MoefluxError, RuntimeError):
    """The back end, the platform or the checkpoint's format is not supported."""


class ExactnessError(MoefluxError, ArithmeticError):
    """Numbers are wrong: they differ from a reference, or are not finite."""


class KernelError(MoefluxError, RuntimeError):
    """A kernel does not compile or run on this GPU; the process does not launch it again."""
