"""The stored twins and how far an answer is from them."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_moeflux.models import model_class

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(p.parent.name for p in GOLDEN.glob("*/golden.safetensors"))
LIMIT = 1e-5  # of the largest logit
# One rounding of the embeddings alone moves logits of these by up to 1.3e-5.
WIDER = {"qwen4_exp_rows": 1e-4, "qwen4_exp_vision": 1e-4}


def limit(case: str) -> float:
    """How far logits of a twin may be from transformers', of the largest one."""
    return WIDER.get(case, LIMIT)


def relative_error(actual: mx.array, expected: mx.array) -> float:
    actual, expected = np.array(actual), np.array(expected)
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all()
    assert np.isfinite(expected).all()
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


# Threads that put rows in order have a buffer each, which counts.
STAGED = {"gpt_oss_sinks": "80%"}


def smallest_memory(directory: Path) -> str:
    """A budget of K + 1 experts a layer where that is fewer than all."""
    if directory.name in STAGED:
        return STAGED[directory.name]
    file = directory / "config.json"
    raw = json.loads(file.read_text())
    config = model_class(raw["model_type"]).Config.from_dict(raw, file=file)
    k, e = config.num_experts_per_tok, config.num_experts
    return f"{min(100, 100 * min(k + 1, e) / e + 0.01):.2f}%"
