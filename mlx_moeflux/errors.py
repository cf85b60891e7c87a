"""Errors that a user or a file can cause: one tree, one sentence each.

A message names the thing, the place (file, key, offset or limit) and the mend. The command line
prints it on one line and exits with 1. ``assert`` checks only what the package itself guarantees.
"""

import re

MOST_CHARACTERS = 300  # of a message, besides the paths in it
_VALUE = re.compile(r"""(?<!\w)'[^']{81,}'|"[^"]{81,}"|[\[{(][^\]})]{81,}|\S{81,}""")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]+")
_PATH = re.compile(r"(?<![^\s'\"(])/[^\s'\"]{1,255}(?![^\s'\"])")


class MoefluxError(Exception):
    """Base of all errors that this package raises. A message is one line. A long one is shortened:
    the values that it repeats from a file first, then its middle. Paths stay whole."""

    most_characters = MOST_CHARACTERS

    def __init__(self, message: object = ""):
        text = _CONTROL.sub(" ", str(message))
        super().__init__(text if len(text) <= self.most_characters else _shortened(text))


def _shortened(text: str) -> str:
    def value(match: re.Match) -> str:
        found = match[0]
        if _PATH.fullmatch(found.strip("'\"")):
            return found
        return f"{whole_words(found[:50])} ... {whole_words(found[-10:], end=True)}"

    text = _VALUE.sub(value, text)
    most = MOST_CHARACTERS + sum(len(path) for path in _PATH.findall(text)[:2])
    if len(text) <= most:
        return text
    return f"{whole_words(text[: most - 105])} ... {whole_words(text[-100:], end=True)}"


def whole_words(part: str, *, end: bool = False) -> str:
    """Return a part of a text, its beginning or its `end`, without the word that the cut may have
    broken; all of it if it is one word."""
    kept = part.partition(" ")[2] if end else part.rpartition(" ")[0]
    return kept or part


class ConfigError(MoefluxError, ValueError):
    """config.json lacks a key, has an unknown one, or contradicts itself."""


class CheckpointError(MoefluxError, ValueError):
    """A checkpoint's files, tensor names, shapes or dtypes are wrong."""


class ChoiceError(CheckpointError):
    """A folder or repository holds several models, which the message lists, and no single one was
    chosen."""

    most_characters = 5000


class ExpertFileError(MoefluxError, ValueError):
    """Reading or writing expert blocks failed: missing, truncated, corrupt, or an I/O error."""


class ShapeError(MoefluxError, ValueError):
    """An array or a component of the caller has the wrong shape or dtype."""


class MemoryBudgetError(MoefluxError, ValueError):
    """A memory or disk budget is too small; the message has the smallest that works."""


class CacheError(MoefluxError, ValueError):
    """A sequence's state does not fit the call: position, kind, or context limit.

    tokens: Estimated number of those of a text that is much longer than the context, else 0.
    """

    def __init__(self, message: object = "", *, tokens: int = 0):
        super().__init__(message)
        self.tokens = tokens


class InputError(MoefluxError, ValueError):
    """A prompt, a token id or an option is invalid."""


class UnsupportedError(MoefluxError, RuntimeError):
    """The back end, the platform or the checkpoint's format is not supported."""


class ExactnessError(MoefluxError, ArithmeticError):
    """Numbers are wrong: they differ from a reference, or are not finite."""


class DistributedError(MoefluxError, RuntimeError):
    """The ranks of one run differ, or one of them is lost."""


class KernelError(MoefluxError, RuntimeError):
    """A kernel does not compile or run on this GPU; the process does not launch it again."""
