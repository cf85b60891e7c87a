"""A few tokens with kernels that wait for experts, and without."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from mlx_moeflux.models.decoder import DecoderModel

EXPERT_MEMORY, TOKENS, ROUNDS = "50%", 24, 5


class Comparison(NamedTuple):
    """wrong: Whether bits differ. text: The result in a line."""

    wrong: bool
    text: str


def compare(
    path: Path = BUNDLED_MODEL, *, tokens: int = TOKENS, rounds: int = ROUNDS
) -> Comparison:
    """Decode `tokens` of a text in turns with the handshake and without it, `rounds` times after a
    first that compiles kernels; or say why there is none."""
    with (
        load_model(path, expert_memory=EXPERT_MEMORY, handshake=True) as waiting,
        load_model(path, expert_memory=EXPERT_MEMORY, handshake=False) as returning,
    ):
        streaming = waiting.store.streaming
        if streaming is None or waiting.store.handshake is None:
            why = None if streaming is None else streaming.ways
            return Comparison(False, why or "handshake: none, all experts are in memory")
        times: list[tuple[float, float]] = []
        differ = 0
        for _ in range(rounds + 1):
            one, other = _decode(waiting, tokens), _decode(returning, tokens)
            pairs = zip(one.logits, other.logits, strict=True)
            differ += sum(not np.array_equal(*pair) for pair in pairs)
            times.append((one.seconds, other.seconds))
        if waiting.store.handshake is None:
            return Comparison(bool(differ), streaming.ways or "handshake: none")
    if differ:
        steps = (rounds + 1) * tokens
        return Comparison(True, f"handshake: wrong bits in {differ} of {steps} steps")
    with_it, without = (1e3 * median(each) / tokens for each in zip(*times[1:], strict=True))
    return Comparison(
        False,
        f"handshake: right; {with_it:.2f} ms a token, {without:.2f} without it (medians of "
        f"{rounds} rounds of {tokens} tokens in turns, {EXPERT_MEMORY} of the experts in memory)",
    )


class _Decoded(NamedTuple):
    """logits: Of each step. seconds: Of all steps."""

    logits: list[np.ndarray]
    seconds: float


def _decode(model: DecoderModel, tokens: int) -> _Decoded:
    """Decode a fixed text."""
    cache = model.make_cache()
    mx.eval(model(mx.array([[1, 2, 3]]), cache))
    found, start = [], time.perf_counter()
    for token in range(4, 4 + tokens):
        logits = model(mx.array([[token]]), cache)
        mx.eval(logits)
        found.append(logits)
    seconds = time.perf_counter() - start
    return _Decoded([np.array(logits.astype(mx.float32)) for logits in found], seconds)
