"""Sources of drafts: guesses of the next tokens, which the model reads as rows of one step.

A wrong guess costs time alone: the model gives the text that it gives without drafts. A source is
any object with ``begin``; what it returns serves one sequence and keeps what it likes.
Pure Python, no MLX, but for the hidden states that a source may ask for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.policies.named import label


class SequenceDrafts(Protocol):
    """Drafts for one sequence.

    It may have ``observe(position: int, hidden: mx.array) -> None`` too; see :func:`observes`.
    """

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Return at most `most` ids that may follow `tokens`; none is a usual answer.

        tokens: All ids of prompt and reply so far, which only grow from call to call. Do not keep
        or change the sequence itself. The ids that were proposed before and are not in it were
        rejected, and the object forgets them.
        """
        ...


class Drafts(Protocol):
    """Source of drafts. It serves several sequences, whose proposals may alternate."""

    def begin(self, prompt: Sequence[int]) -> SequenceDrafts:
        """Return what proposes drafts for the sequence that begins with the ids `prompt`."""
        ...


def observes(drafts: SequenceDrafts) -> bool:
    """Return True if `drafts` has ``observe(position, hidden)``, which is called with the hidden
    states of the tokens that the model has read.

    hidden: ``[1, n, C]`` in the model's dtype, lazy: the output of the last layer before the final
    norm, after each of ``tokens[position : position + n]`` of the next ``propose``. It has no rows
    of rejected drafts. Positions only grow, and leave out what a prompt cache supplied. The call
    is made for the prompt and for every token after it, also while nothing is proposed: keep the
    array, and compute when ``propose`` asks.
    """
    return callable(getattr(drafts, "observe", None))


class Lookup:
    """Source ``lookup``: what followed the last earlier occurrence of the newest tokens.

    It needs no weights, and guesses well where a reply repeats its prompt or itself, such as edits
    of a file. longest, shortest: Numbers of newest tokens that an occurrence has to have in
    common; the longest one that occurs decides.

    Source: prompt lookup decoding, as in transformers' ``prompt_lookup_num_tokens``, with an index
    in place of a search.
    """

    name = "lookup"

    def __init__(self, *, longest: int = 4, shortest: int = 2):
        if not 1 <= shortest <= longest:
            raise InputError(
                f"lookup of {shortest} to {longest} tokens; give 1 <= shortest <= longest."
            )
        self._sizes = range(longest, shortest - 1, -1)

    def begin(self, prompt: Sequence[int]) -> NgramIndex:
        """Return an index of one sequence, which reads the prompt with the first proposal."""
        return NgramIndex(self._sizes)


class NgramIndex:
    """Index of the n-grams of one sequence, which grows by a constant time for each token.

    sizes: Lengths of the n-grams, the preferred one first.
    """

    def __init__(self, sizes: Sequence[int]):
        self._sizes = sizes
        # N-gram -> position behind its last occurrence that something follows.
        self._follow: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Return the tokens behind the last earlier occurrence of the newest n-gram."""
        count = len(tokens)
        for end in range(self._indexed, count):
            for size in self._sizes:
                if size <= end:
                    self._follow[tuple(tokens[end - size : end])] = end
        self._indexed = max(self._indexed, count)
        for size in self._sizes:
            if size <= count and (start := self._follow.get(tuple(tokens[count - size :]))):
                return tokens[start : start + most]
        return ()


def begun(source: Drafts, prompt: Sequence[int]) -> SequenceDrafts:
    """Return what `source` begins for `prompt`.

    Raises:
        InputError: It has no ``propose``.
    """
    found = source.begin(prompt)
    if not callable(getattr(found, "propose", None)):
        raise InputError(
            f"begin() of the drafts {label(source)} returned {found!r}; return an object with "
            "propose(tokens, most)."
        )
    return found


def proposed(
    source: Drafts, drafts: SequenceDrafts, tokens: Sequence[int], most: int, vocabulary: int
) -> list[int]:
    """Return what `drafts` of `source` proposes after `tokens`.

    Raises:
        InputError: It proposed more than `most` tokens, or something else than ids of the
            vocabulary.
    """
    answer: Any = drafts.propose(tokens, most)
    try:
        ids = [token.__index__() for token in answer]
    except (TypeError, AttributeError):
        ids = None
    if ids is None or len(ids) > most or any(not 0 <= token < vocabulary for token in ids):
        raise InputError(
            f"the drafts {label(source)} proposed {answer!r}; expected at most {most} ids from 0 "
            f"to {vocabulary - 1}."
        )
    return ids
