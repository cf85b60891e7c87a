"""Oracle: sizes counted from the checkpoint's headers, and limits worked out by hand."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from mlx_moeflux.checkpoint.source import open_checkpoint
from mlx_moeflux.loading import load_model
from mlx_moeflux.measure.benchmark.card import (
    Card,
    make_card,
    memory_bandwidth,
)
from mlx_moeflux.measure.disk import disk_bandwidth, expert_files
from mlx_moeflux.models import map_checkpoint


def header(file: Path) -> dict:
    with file.open("rb") as opened:
        return json.loads(opened.read(struct.unpack("<Q", opened.read(8))[0]))


def nbytes(shape: list[int]) -> int:
    """In memory on the CPU: packed words have four bytes, and so have floats."""
    count = 4
    for size in shape:
        count *= size
    return count


@pytest.mark.parametrize("memory", ["100%", "25%"])
def test_bytes_of_a_token(checkpoint, memory):
    tensors = header(checkpoint / "model.safetensors")
    tensors.pop("__metadata__", None)
    shapes = {name: t["shape"] for name, t in tensors.items()}
    trunk = sum(
        nbytes(s) for n, s in shapes.items() if "switch_mlp" not in n and "embed_tokens" not in n
    )
    row = sum(nbytes(s[1:]) for n, s in shapes.items() if "embed_tokens" in n)
    expert = sum(
        (t["data_offsets"][1] - t["data_offsets"][0]) / t["shape"][0]
        for n, t in tensors.items()
        if "layers.0.mlp.switch_mlp" in n
    )
    with load_model(checkpoint, expert_memory=memory) as model:
        card = make_card(model, memory=1e9, disk=1e8)
        state = model.state_bytes(300)
        assert (card.trunk, card.expert) == (trunk + row, expert)
        assert (card.layers, card.k, card.experts) == (4, 4, 32)
        assert card.step_bytes(300) == trunk + row + 4 * 4 * expert + state
        assert card.as_dict(300)["step_bytes"] == card.step_bytes(300)


def test_limits_by_hand():
    card = Card(
        trunk=600,
        expert=10.0,
        layers=5,
        k=2,
        experts=7,
        state=lambda positions: 3 * positions,
        memory=2000.0,
        disk=50.0,
    )
    assert card.step_bytes(100) == 600 + 100 + 300
    assert card.memory_limit(100) == 2.0
    # Four sequences that ask for 6 of 7 experts: one pass over the trunk for all.
    assert card.step_bytes(100, batch=4, distinct=6) == 600 + 300 + 1200
    assert card.memory_limit(100, batch=4, distinct=6) == pytest.approx(4 * 2000 / 2100)
    assert card.disk_limit(0.0) == 0.5
    assert card.disk_limit(0.75) == pytest.approx(2.0)
    assert card.disk_limit(0.5, batch=4, distinct=6) == pytest.approx(4 * 50 / 150)
    assert card.disk_limit(1.0) == float("inf")
    text = "\n".join(card.lines(100))
    assert "at most 2.0 tok/s" in text
    assert "0% 0.5, 50% 1.0, 80% 2.5, 90% 5.0, 95% 10.0" in text


def test_bandwidths_are_measured(checkpoint):
    assert 1e8 < memory_bandwidth(16 << 20, rounds=2) < 1e13
    mapped = map_checkpoint(open_checkpoint(checkpoint))
    assert expert_files(mapped.experts) == (checkpoint / "model.safetensors",)
    disk = disk_bandwidth(mapped.experts, threads=2)
    assert disk is None or 1e5 < disk < 1e12
