"""What each rank of a test runs: ``program.py FOLDER JOB ARGUMENTS``; see launch.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moeflux.loading import load_model

PROMPT, STEPS = 40, 5


def tokens_of(batch: int, vocabulary: int) -> mx.array:
    return mx.array(np.random.default_rng(1).integers(0, vocabulary, (batch, PROMPT + STEPS)))


def logits_of(model: Any, batch: int = 1) -> np.ndarray:
    """A prompt, then steps: ``[batch, PROMPT + STEPS, V]``."""
    tokens, cache = tokens_of(batch, model.config.vocab_size), model.make_cache()
    parts = [model(tokens[:, :PROMPT], cache)]
    parts += [model(tokens[:, t : t + 1], cache) for t in range(PROMPT, PROMPT + STEPS)]
    return np.array(mx.concatenate(parts, axis=1))


def logits(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Logits of several models, and the bytes read in each."""
    found = {}
    for i, case in enumerate(cases):
        batch = case.pop("batch", 1)
        with load_model(case.pop("path"), distributed=True, **case) as model:
            found[f"logits{i}"] = logits_of(model, batch)
            found[f"read{i}"] = model.store.stats().total.bytes_read
    return found


JOBS = {job.__name__: job for job in (logits,)}


def main() -> None:
    folder, job, arguments = sys.argv[1:]
    rank = mx.distributed.init(strict=True, backend="ring").rank()
    np.savez(Path(folder) / f"rank{rank}.npz", **JOBS[job](**json.loads(arguments)))


if __name__ == "__main__":
    main()
