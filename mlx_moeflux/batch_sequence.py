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

    def resume(self, model: Any, cache: PromptCache | None) -> None:
        """Begin with what `cache` knows."""
        if cache is not None and self.fresh:
            self.resumed = cache.resume(model, self.prompt)
            self.state = self.resumed.state


class Prefill:
    """Prompts that are read together: every expert once for all, the rest prompt by prompt, so
    that none is padded.

    cache: Learns them.
    """

    def __init__(self, model: Any, sequences: list[Request], cache: PromptCache | None = None):
        self._model, self.sequences, self._cache = model, sequences, cache
        self._done = {s.uid: s.known for s in sequences}
        self._stops: dict[int, list[int]] = {}
        self._logits: dict[int, mx.array] = {}
        for sequence in sequences:
            resumed = sequence.resumed
            if resumed is not None:
                self._logits[sequence.uid] = resumed.logits
                self._stops[sequence.uid] = resumed.stops[-STOPS_PER_CALL:]
                sequence.state.watch(self._stops[sequence.uid])

    @property
    def entries(self) -> list[Any]:
        """One state of all sequences."""
        return merged([sequence.state for sequence in self.sequences])

    def drop(self, uids: set[int]) -> None:
        """Go on without these sequences."""
        self.sequences = [s for s in self.sequences if s.uid not in uids]

    def advance(self, size: int) -> mx.array | None:
        """Read at most `size` tokens of each prompt; the logits behind all of them ``[B, V]``, or
        None while there is more to read."""
        unread = self._unread()
        if unread:
            parts = [s.prompt[self._done[s.uid] :][:size] for s in unread]
            logits = self._read(parts, [s.state for s in unread])
            for i, sequence in enumerate(unread):
                self._done[sequence.uid] += len(parts[i])
                self._logits[sequence.uid] = logits[i]
        if self._unread():
            return None
        return mx.stack([self._logits[s.uid] for s in self.sequences])

    def keep(self) -> None:
        """Tell the prompt cache what was read; call it once the logits are there."""
        for sequence in self.sequences if self._cache is not None else ():
            if sequence.fresh:
                uid, prompt, state = sequence.uid, sequence.prompt, sequence.state
                for stop in self._stops[uid]:
                    self._cache.store(self._model, prompt[:stop], state)
                self._cache.store(self._model, prompt, state, self._logits[uid])

    def _unread(self) -> list[Request]:
        return [s for s in self.sequences if self._done[s.uid] < len(s.prompt)]

    def _read(self, parts: list[list[int]], states: list[Any]) -> mx.array:
        tokens = [mx.array(part, mx.int32) for part in parts]
        entries = [entry for state in states for entry in state]
        with transaction(entries):
            if len(parts) == 1:
                logits = self._model(tokens[0][None], cache=states[0], last_only=True)[:, -1]
            else:
                logits = self._model.read_together(tokens, states)
            mx.eval(logits, [entry.state for entry in entries])
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
