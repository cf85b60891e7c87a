"""The calls of operations that a model makes, to measure implementations at its own sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_moeflux.kernels.examples import Arguments
from mlx_moeflux.models.decoder import DecoderModel

TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024)
# Calls of an operation at one size, of different layers: one alone would be read from caches.
MOST = 8


def calls_of(
    model: DecoderModel, tokens: Sequence[int] = TOKENS
) -> dict[str, dict[int, list[Arguments]]]:
    """Run prompts of so many tokens and a step behind the last, and return operation, or operation
    and kind -> tokens -> calls, by ascending tokens. Evaluates; no call is traced.

    Raises what the model does: a prompt may be longer than its context.
    """
    found: dict[str, dict[int, list[Arguments]]] = {}

    def note(operation: str, args: tuple, kwargs: dict[str, Any]) -> None:
        asked = model.kernels[operation]
        kept = found.setdefault(asked.row_name(args), {}).setdefault(asked.size(args), [])
        if len(kept) < MOST:
            kept.append((args, kwargs))

    before, model.compile_steps = model.compile_steps, False
    limit = model.config.max_position_embeddings
    try:
        with model.kernels.observed(note):
            for count in (n for n in tokens if n < limit):
                cache = model.make_cache()
                for step in (count, 1):
                    logits = model(mx.arange(step)[None] % model.config.vocab_size, cache)
                    mx.eval(logits, [entry.state for entry in cache])
    finally:
        model.compile_steps = before
    return {name: dict(sorted(by_size.items())) for name, by_size in sorted(found.items())}
