"""Oracle: xz on the same held-out text, and the model's own routing in random order."""

from __future__ import annotations

import hashlib
import lzma
import math
import sysconfig
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_moeflux.conversion.synthesize import lru_hit_rate
from mlx_moeflux.experts.telemetry.events import Chosen
from mlx_moeflux.generation.text import generate
from mlx_moeflux.loading import BUNDLED_MODEL, load

WINDOW = 2048
PROMPT = '"""Return the number of'


def held_out() -> list[str]:
    """Files of the standard library that examples/train_tiny.py sets aside."""
    root = Path(sysconfig.get_path("stdlib"))
    texts = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")
        if number % 25 == 0 and "-packages" not in name and not name.startswith("test/"):
            texts.append(path.read_text(encoding="utf-8", errors="ignore"))
    return texts


def bits_per_byte(texts: list[str]) -> float:
    model, tokenizer = load(BUNDLED_MODEL)
    end, bits = tokenizer.eos_token_id, 0.0
    with model:
        for text in texts:
            ids = mx.array([end, *tokenizer.encode(text)])
            for start in range(0, ids.size - 1, WINDOW):
                window = ids[start : start + WINDOW + 1][None]
                logits = model(window[:, :-1])
                loss = nn.losses.cross_entropy(logits, window[:, 1:], reduction="sum")
                bits += loss.item() / math.log(2)
    return bits / sum(len(text.encode()) for text in texts)


def xz(texts: list[str]) -> float:
    raw = "".join(texts).encode()
    return 8 * len(lzma.compress(raw, preset=9)) / len(raw)


def test_it_is_small():
    assert sum(f.stat().st_size for f in BUNDLED_MODEL.iterdir()) <= 8_600_000


@pytest.mark.slow
def test_its_head_accepts_half_of_the_drafts_and_changes_no_text():
    texts, counts = [], []
    for drafts in ("off", 1):
        model, tokenizer = load(BUNDLED_MODEL, drafts=drafts)
        with model:
            texts.append(generate(model, tokenizer, PROMPT, max_tokens=40))
            counts.append(model.store.stats().drafts)
    assert texts[0] == texts[1]
    assert counts[0].proposed == 0
    assert counts[1].proposed >= 15
    assert counts[1].accepted >= 0.5 * counts[1].proposed


@pytest.mark.slow
def test_a_held_out_file_takes_fewer_bits_than_xz_needs():
    texts = sorted(held_out(), key=len)
    middle = [texts[len(texts) // 2][:4000]]
    assert bits_per_byte(middle) < xz(middle)


@pytest.mark.slow
def test_held_out_files_take_at_most_one_and_a_half_bits_a_byte():
    texts = held_out()[::6]
    measured = bits_per_byte(texts)
    print(f"{measured:.4f} bits per byte, xz -9 {xz(texts):.4f}")  # noqa: T201
    assert measured <= 1.5
    assert measured < xz(texts)


@pytest.mark.slow
def test_routing_has_a_natural_skew():
    """At half the experts, an LRU hits more often on the real order than on a shuffled one."""
    traces: dict[int, list[np.ndarray]] = {}

    def listen(event: object) -> None:
        if isinstance(event, Chosen):
            traces.setdefault(event.layer, []).append(event.ids)

    model, tokenizer = load(BUNDLED_MODEL, expert_memory="50%", events=listen)
    with model:
        ids = mx.array(tokenizer.encode("".join(held_out())[:6000]))
        mx.eval(model(ids[None], last_only=True))
    random = np.random.default_rng(0)
    real, shuffled = [], []
    for parts in traces.values():
        trace = np.concatenate(parts)
        real.append(lru_hit_rate(trace, 16))
        shuffled.append(lru_hit_rate(random.permutation(trace), 16))
    assert len(real) == 6
    assert np.mean(real) > np.mean(shuffled) + 0.01
    # Uniform choices would hit at slots / experts.
    assert np.mean(real) > 0.55
