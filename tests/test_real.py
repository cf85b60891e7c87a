"""Oracle: mlx-lm's logits of Qwen3.5-35B-A3B in 4 bits after "The quick brown fox", as moeflux
recorded them: the likeliest tokens and their logits."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.loading import load_model

PROMPT = [760, 3841, 13477, 37550]
GOLDEN = {33075: 18.0, 25174: 15.375, 198: 14.1875}


@pytest.mark.real
def test_the_quick_brown_fox_jumps(real_model):
    with load_model(real_model, expert_memory="25%") as model:
        logits = np.array(model(mx.array([PROMPT]), last_only=True)[0, -1].astype(mx.float32))
    order = np.argsort(-logits)
    assert order[:3].tolist() == list(GOLDEN)
    for token, expected in GOLDEN.items():
        assert abs(logits[token] - expected) <= 0.5
