"""A prompt on its way through a batch: how it is read, and how its tokens are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_moeflux.batch import merged
from mlx_moeflux.cache import transaction
from mlx_moeflux.cache.prompt import PromptCache, Resumed
from mlx_moeflux.sampling import LogitsProcessor, Sampler
from mlx_moeflux.steps import STOPS_PER_CALL


@dataclass
class Request:
    """A prompt, its reply so far, and what it was asked with.

    limit: Tokens of the reply. state: Where it goes on from, until it is read. tokens: Of its
    state at the end, at most. fresh: The prompt begins the sequence. resumed: What a prompt cache
    knows of it.
    """

    uid: int
    prompt: list[int]
    limit: int
    state: Any
    sampler: Sampler
    processors: list[LogitsProcessor]
    tokens: int
    fresh: bool = True
    resumed: Resumed | None = None
    reply: list[int] = field(default_factory=list)

    @property
    def known(self) -> int:
        """First tokens of the prompt that need not be read."""
        return 0 if self.resumed is None else self.resumed.position

    def resume(self, model: Any, cache: PromptCache | None) -> bool:
        """Begin with what `cache` knows; whether that is all."""
        if cache is None or not self.fresh:
            return False
        self.resumed = cache.resume(model, self.prompt)
        self.state = self.resumed.state
        return self.known == len(self.prompt)


class Prefill:
    """Prompts that are read together, right-padded to the longest; one alone has no padding.

    cache: Learns them. One that is known as a whole must be alone.
    """

    def __init__(self, model: Any, sequences: list[Request], cache: PromptCache | None = None):
        self._model, self.sequences, self._cache = model, sequences, cache
        self._logits: mx.array | None = None
        self.uids = {sequence.uid for sequence in sequences}
        self.entries: list[Any] = merged([sequence.state for sequence in sequences])
        # Of several prompts the last tokens take a step of their own, at which all end alike.
        unread = [s.prompt[s.known :] for s in sequences]
        ends = [len(ids) - (len(sequences) > 1) for ids in unread]
        self._width, self._done = max(ends), 0
        rows = [ids[:n] + [0] * (self._width - n) for ids, n in zip(unread, ends, strict=True)]
        self._rows = mx.array(rows, mx.int32)
        # Alone a prompt has its own columns, at which states can be kept.
        resumed = sequences[0].resumed if len(sequences) == 1 else None
        self._stops = resumed.stops[-STOPS_PER_CALL:] if resumed else []
        if resumed is not None and resumed.logits is not None:
            self._logits = resumed.logits[None]
        for entry in self.entries if self._stops else ():
            if entry.token_axis is None:
                entry.watch(self._stops)
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

    def keep(self) -> None:
        """Tell the prompt cache what was read; call it once the logits are there."""
        for i, sequence in enumerate(self.sequences if self._cache is not None else ()):
            if sequence.fresh:
                alone = len(self.sequences) == 1
                state = self.entries if alone else [entry.extract(i) for entry in self.entries]
                for stop in self._stops:
                    self._cache.store(self._model, sequence.prompt[:stop], state)
                self._cache.store(self._model, sequence.prompt, state, self._logits[i])

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
