"""A prompt on its way through a batch: how it is read, and how its tokens are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_moeflux.batch import merged
from mlx_moeflux.cache import transaction
from mlx_moeflux.sampling import LogitsProcessor, Sampler


@dataclass
class Request:
    """A prompt, its reply so far, and what it was asked with.

    limit: Tokens of the reply. state: Where it goes on from, until it is read. tokens: Of its
    state at the end, at most.
    """

    uid: int
    prompt: list[int]
    limit: int
    state: Any
    sampler: Sampler
    processors: list[LogitsProcessor]
    tokens: int
    reply: list[int] = field(default_factory=list)


class Prefill:
    """Prompts that are read together, right-padded to the longest; one alone has no padding."""

    def __init__(self, model: Any, sequences: list[Request]):
        self._model, self.sequences = model, sequences
        self._logits: mx.array | None = None
        self.uids = {sequence.uid for sequence in sequences}
        self.entries: list[Any] = merged([sequence.state for sequence in sequences])
        # Of several prompts the last tokens take a step of their own, at which all end alike.
        ends = [len(s.prompt) - (len(sequences) > 1) for s in sequences]
        self._width, self._done = max(ends), 0
        self._rows = mx.array([s.prompt[:n] + [0] * (self._width - n) for s, n in
                               zip(sequences, ends, strict=True)], mx.int32)  # fmt: skip
        if len(sequences) > 1:
            for entry in self.entries:
                entry.prepare(lengths=ends, right_padding=[self._width - n for n in ends])

    def advance(self, size: int) -> mx.array | None:
        """Read at most `size` tokens of each prompt; the logits behind all of them ``[B, V]``, or
        None while there is more to read."""
        if self._done < self._width:
            part = self._rows[:, self._done : self._done + size]
            logits = self._call(part)
            self._done += part.shape[1]
            if len(self.sequences) == 1:
                self._logits = logits
            if self._done < self._width:
                return None
        if len(self.sequences) > 1 and self._logits is None:
            for entry in self.entries:
                entry.finalize()
            ends = mx.array([s.prompt[-1:] for s in self.sequences], mx.int32)
            self._logits = self._call(ends)
        return self._logits

    def _call(self, tokens: mx.array) -> mx.array:
        with transaction(self.entries):
            logits = self._model(tokens, cache=self.entries, last_only=True)[:, -1]
            mx.eval(logits, [entry.state for entry in self.entries])
        self._model.hand_over()
        return logits


def sampled(
    logits: mx.array, sequences: list[Request], *, pending: Sequence[mx.array] = ()
) -> tuple[mx.array, mx.array]:
    """logits ``[B, V]`` -> tokens ``[B]`` and logprobs ``[B, V]`` float32, each row by its own
    sequence's processors and sampler. pending: ``[B]`` tokens that are not in the replies yet."""
    if any(sequence.processors for sequence in sequences):
        rows = []
        for i, sequence in enumerate(sequences):
            row = logits[i : i + 1]
            if sequence.processors:
                seen = mx.array([*sequence.prompt, *sequence.reply], mx.int32)
                for tokens in pending:
                    seen = mx.concatenate([seen, tokens[i : i + 1].astype(mx.int32)])
                for processor in sequence.processors:
                    row = processor(seen, row)
            rows.append(row)
        logits = mx.concatenate(rows)
    logits = logits.astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    samplers = [sequence.sampler for sequence in sequences]
    if all(sampler is samplers[0] for sampler in samplers):
        return samplers[0](logprobs), logprobs
    drawn = [sampler(logprobs[i : i + 1]) for i, sampler in enumerate(samplers)]
    return mx.concatenate(drawn), logprobs
