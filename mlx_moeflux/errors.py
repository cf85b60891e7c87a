"""Every error that a user or a file can cause: one tree, one sentence each.

A message names the thing, the place (file, key, offset or limit) and how to mend it. The
command line prints it on one line and exits with 1. ``assert`` is kept for what the
package itself guarantees.
"""


class MoefluxError(Exception):
    """Base of everything that this package raises on purpose."""


class ConfigError(MoefluxError, ValueError):
    """config.json is missing a key, has one nobody knows, or contradicts itself."""


class CheckpointError(MoefluxError, ValueError):
    """A checkpoint's files, tensor names, shapes or dtypes are not what they must be."""


class ExpertFileError(MoefluxError, ValueError):
    """Reading or writing expert blocks failed: missing, truncated, corrupt, or an I/O error."""


class ShapeError(MoefluxError, ValueError):
    """An array or a component given by the caller has the wrong shape or dtype."""


class MemoryBudgetError(MoefluxError, ValueError):
    """The asked memory or disk budget cannot work; the message says the smallest that does."""


class CacheError(MoefluxError, ValueError):
    """A sequence's state does not fit the call: position, kind, or context limit."""


class InputError(MoefluxError, ValueError):
    """A prompt, a token id or an option given by the caller cannot be used."""


class UnsupportedError(MoefluxError, RuntimeError):
    """Not possible here: the back end, the platform or the checkpoint's format is not supported."""


class ExactnessError(MoefluxError, ArithmeticError):
    """A check of results against a reference failed; what was measured means nothing."""


class KernelError(MoefluxError, RuntimeError):
    """A kernel does not compile or run on this GPU; the process does not launch it again."""
