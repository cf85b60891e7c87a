"""Prefill of several prompts together: what a batch reads before their first tokens."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_moeflux.cache import transaction
from mlx_moeflux.cache.prompt.cache import PromptCache
from mlx_moeflux.generation.loop import STOPS_PER_CALL
from mlx_moeflux.generation.sampling import LogitsProcessor, Sampler
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.models.protocol import LoadedModel


def merged(states: Sequence[Sequence[Any]]) -> list[Any]:
    """Return one state for the sequences of several, which do not change."""
    return [type(row[0]).merge(list(row)) for row in zip(*states, strict=True)]


@dataclass(eq=False)
class Request:
    """A prompt, its options, and its reply so far; the name of its sequence in a :class:`Batch`.

    limit: Most tokens of the reply.
    state: The state to continue from, until the prompt is read.
    begin: Tokens of the state before the reply.
    reserved: Tokens of the reply that memory is kept for.
    fresh: True if the prompt begins the sequence.
    read: Tokens of the prompt in `state`; logits: Those after the last of them, ``[V]``.
    cached: Tokens that a prompt cache supplied.
    breakpoints: Positions in the prompt that a prompt cache stores besides its own; stops: All that
        it stores.
    left: The reply is not wanted any more: its client left.
    """

    uid: int
    prompt: list[int]
    limit: int
    state: Any
    sampler: Sampler
    processors: list[LogitsProcessor]
    begin: int
    reserved: int
    fresh: bool = True
    breakpoints: Iterable[int] = ()
    read: int = 0
    cached: int = 0
    logits: Any = None
    stops: Sequence[int] = ()
    left: bool = False
    reply: list[int] = field(default_factory=list)
    _prompt: mx.array | None = field(default=None, init=False)

    @property
    def tokens(self) -> int:
        """Return the tokens of the state that memory is kept for, or has after the next step."""
        if self.left:
            return self.begin
        return self.begin + max(self.reserved, min(len(self.reply) + 2, self.limit))

    @property
    def grown(self) -> bool:
        """Return True if the reply goes on beyond what memory is kept for."""
        return self.reserved < len(self.reply) + 2 <= self.limit

    def seen(self, pending: Sequence[mx.array]) -> mx.array:
        """Return the ids ``[T]`` of prompt and reply, then those of `pending` arrays ``[1]``."""
        if self._prompt is None:
            self._prompt = mx.array(self.prompt, mx.int32)
        parts = [self._prompt, mx.array(self.reply, mx.int32)] if self.reply else [self._prompt]
        parts += [tokens.astype(mx.int32) for tokens in pending]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def resume(self, model: LoadedModel, cache: PromptCache | None) -> None:
        """Begin with the longest prefix in `cache`."""
        if cache is not None and self.fresh:
            known = cache.resume(model, self.prompt, breakpoints=self.breakpoints)
            self.state, self.read, self.logits = known.state, known.position, known.logits
            self.cached = known.position
            self.stops = known.stops[-STOPS_PER_CALL:]
            self.state.watch(self.stops)


def make_prefill(
    model: LoadedModel, sequences: list[Request], cache: PromptCache | None = None
) -> Prefill:
    """Return the prefill of several prompts: padded on a GPU, unpadded on a CPU.

    On a GPU padding costs less than a launch per prompt; on a CPU it costs as much as tokens.
    Prompts with states to store within them are never padded. cache: Stores the states.
    """
    padded = (
        len(sequences) > 1
        and device.kind() != "cpu"
        and all(s.read < len(s.prompt) and not s.stops for s in sequences)
    )
    return (PaddedPrefill if padded else Prefill)(model, sequences, cache)


class PausedCall:
    """One call of the model on tokens ``[B, T]`` of several states, which can pause between layers
    and between parts of their mixers.

    Experts are read once however often it pauses. A call that is dropped before its end leaves
    all states as they were.

    columns: Sum of T. layers: Number of layers that are done.
    """

    def __init__(self, model: LoadedModel, tokens: Sequence[mx.array], states: Sequence[Any]):
        self._layers = model.read_in_pauses(tokens, states)
        self.columns, self.layers = sum(rows.shape[1] for rows in tokens), 0

    def advance(self, until: float) -> mx.array | None:
        """Go on, at least to the next pause, until ``time.monotonic()`` is `until`.

        Return the last logits ``[B, V]`` after the last layer, else None.
        """
        while True:
            try:
                layers = next(self._layers)
            except StopIteration as end:
                return end.value
            if layers is not None:
                self.layers = layers
            if time.monotonic() >= until:
                return None


class Prefill:
    """Prefill of several prompts without padding, with the bits that each prompt gets alone.

    Experts are read once for all prompts; mixers take the prompts one by one. A prompt whose client
    left takes part in the call that it began, and in later ones only if all clients left.
    """

    def __init__(
        self, model: LoadedModel, sequences: list[Request], cache: PromptCache | None = None
    ):
        self._model, self.sequences, self._cache = model, sequences, cache
        self._paused: PausedCall | None = None
        self._unread: list[Request] = []

    @property
    def live(self) -> list[Request]:
        """Return the sequences whose clients have not left."""
        return [sequence for sequence in self.sequences if not sequence.left]

    @property
    def entries(self) -> list[Any]:
        """Return one merged state of the live sequences."""
        return merged([sequence.state for sequence in self.live])

    @property
    def layers(self) -> int:
        """Return the number of layers that the present call has done."""
        return 0 if self._paused is None else self._paused.layers

    def share(self) -> float:
        """Return how much of the prompts is read, 0 to 1: a call of 1,000 tokens counts 250 when a
        quarter of its layers is done. What a prompt cache supplied does not count."""
        going = self._going()
        read = sum(s.read - s.cached for s in going)
        return self._share(read, sum(len(s.prompt) - s.cached for s in going))

    def _share(self, read: float, total: int) -> float:
        if self._paused is not None:
            read += self._paused.columns * self._paused.layers / len(self._model.layers)
        return min(read / total, 1.0) if total else 1.0

    def _going(self) -> list[Request]:
        return self.live or self.sequences

    def advance(self, size: int | None, until: float | None = None) -> mx.array | None:
        """Read at most `size` tokens of each prompt, None for all.

        With `until`, pause between layers at that ``time.monotonic()``; the next call goes on.
        Return the logits after the live prompts ``[B, V]``, or after all if none is live, or None
        while tokens are unread.
        """
        if self._paused is None:
            self._unread = [s for s in self._going() if s.read < len(s.prompt)]
        if self._unread:
            parts = [s.prompt[s.read :][:size] for s in self._unread]
            logits = self._read(parts, [s.state for s in self._unread], until)
            if logits is None:
                return None
            for i, sequence in enumerate(self._unread):
                sequence.read += len(parts[i])
                sequence.logits = logits[i]
        if any(s.read < len(s.prompt) for s in self._going()):
            return None
        return mx.stack([s.logits for s in self._going()])

    def keep(self) -> None:
        """Store the states in the prompt cache, as far as the prompts are read; call it after
        :meth:`advance` returned logits."""
        if self._cache is None:
            return
        for sequence in self.sequences:
            if sequence.fresh and sequence.read > 0:
                prompt, state = sequence.prompt[: sequence.read], sequence.state
                for stop in sequence.stops:
                    if stop < sequence.read:
                        self._cache.store(self._model, prompt[:stop], state)
                self._cache.store(self._model, prompt, state, sequence.logits)

    def _read(
        self, parts: list[list[int]], states: list[Any], until: float | None
    ) -> mx.array | None:
        """Append a part of a prompt to each state; return the last logits ``[B, V]``, or None after
        a pause."""
        if len(parts) == 1:
            return self._call(mx.array(parts, mx.int32), states[0], until)
        tokens = [mx.array(part, mx.int32) for part in parts]
        if until is not None:
            return self._until([one[None] for one in tokens], states, until)
        entries = [entry for state in states for entry in state]
        with transaction(entries):
            logits = self._model.read_together(tokens, states)
            mx.eval(logits, [entry.state for entry in entries])
        self._model.runtime.start_eval()
        return logits

    def _call(self, tokens: mx.array, state: Any, until: float | None) -> mx.array | None:
        """Append tokens ``[B, T]`` to a state; return the last logits ``[B, V]``, or None after a
        pause."""
        if until is not None and tokens.shape[1] > 1:
            return self._until([tokens], [state], until)
        with transaction(state):
            logits = self._model(tokens, cache=state, last_only=True)[:, -1]
            mx.eval(logits, [entry.state for entry in state])
        self._model.runtime.start_eval()
        return logits

    def _until(
        self, tokens: Sequence[mx.array], states: Sequence[Any], until: float
    ) -> mx.array | None:
        """Begin or go on with a call that pauses at `until`, see :meth:`advance`."""
        call = self._paused or PausedCall(self._model, tokens, states)
        self._paused = None  # a call that raises rolled back, and begins again
        logits = call.advance(until)
        if logits is None:
            self._paused = call
        return logits


class PaddedPrefill(Prefill):
    """Prefill of several prompts as one batch, right-padded to the longest.

    The last tokens take a step of their own, so that all prompts end at the same column. Only the
    states at the ends go to the prompt cache.
    """

    def __init__(
        self, model: LoadedModel, sequences: list[Request], cache: PromptCache | None = None
    ):
        super().__init__(model, sequences, cache)
        self._merged = merged([sequence.state for sequence in self.sequences])
        unread = [s.prompt[s.read : -1] for s in self.sequences]
        ends = [len(ids) for ids in unread]
        self._read_columns, width = 0, max(ends)
        self._ends: Any = None
        self._rows = mx.array([ids + [0] * (width - len(ids)) for ids in unread], mx.int32)
        for entry in self._merged:
            entry.prepare(lengths=ends, right_padding=[width - n for n in ends])

    @property
    def entries(self) -> list[Any]:
        """Return the merged state, see :attr:`Prefill.entries`."""
        rows = self._live_rows()
        if len(rows) == len(self.sequences):
            return self._merged
        return merged([[entry.extract(i) for entry in self._merged] for i in rows])

    def share(self) -> float:
        """Return how much of the columns is read, see :meth:`Prefill.share`."""
        return self._share(self._read_columns, self._rows.shape[1])

    def advance(self, size: int | None, until: float | None = None) -> mx.array | None:
        """Read at most `size` columns, see :meth:`Prefill.advance`."""
        width = self._rows.shape[1]
        if self._read_columns < width:
            end = width if size is None else self._read_columns + size
            part = self._rows[:, self._read_columns : end]
            if self._call(part, self._merged, until) is None:
                return None
            self._read_columns += part.shape[1]
            if self._read_columns < width:
                return None
        for entry in self._merged:
            entry.finalize()
        if self._ends is None:
            last = mx.array([s.prompt[-1:] for s in self.sequences], mx.int32)
            self._ends = self._call(last, self._merged, None)
        rows = self._live_rows()
        return self._ends if len(rows) in (0, len(self.sequences)) else self._ends[mx.array(rows)]

    def keep(self) -> None:
        """Store the states at the ends, see :meth:`Prefill.keep`."""
        if self._cache is None:
            return
        for i, sequence in enumerate(self.sequences):
            if sequence.fresh:
                state = [entry.extract(i) for entry in self._merged]
                self._cache.store(self._model, sequence.prompt, state, self._ends[i])

    def _live_rows(self) -> list[int]:
        return [i for i, sequence in enumerate(self.sequences) if not sequence.left]
