"""The stored heads of multi-token prediction, and checkpoints that have one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx

from tests.models.twins import GOLDEN

HEADS = GOLDEN / "heads"
CASES = sorted(file.stem for file in HEADS.glob("*.safetensors"))


def head_file(case: str) -> Path:
    return HEADS / f"{case}.safetensors"


def golden(case: str) -> dict[str, mx.array]:
    """tokens [1, T], first [T - 1, V], second [V]; see golden/make_heads.py."""
    start = "golden."
    stored = mx.load(str(head_file(case)))
    return {k.removeprefix(start): v for k, v in stored.items() if k.startswith(start)}


def head_tensors(case: str) -> dict[str, mx.array]:
    """Tensors of the head under published names."""
    stored = mx.load(str(head_file(case)))
    return {k: v for k, v in stored.items() if not k.startswith("golden.")}


def with_tensors(case: str, out: Path, tensors: dict[str, mx.array]) -> Path:
    """A copy of a twin in one file, with `tensors` in place of a head."""
    directory = Path(shutil.copytree(GOLDEN / case, out))
    config, kept = json.loads((directory / "config.json").read_text()), {}
    layers = config.get("text_config", config)["num_hidden_layers"]
    for file in sorted(directory.glob("model*.safetensors*")):
        if file.suffix == ".safetensors":
            kept |= mx.load(str(file))
        file.unlink()
    of_head = (f"model.layers.{layers}.", "mtp.")
    kept = {name: tensor for name, tensor in kept.items() if not name.startswith(of_head)}
    mx.save_safetensors(str(directory / "model.safetensors"), kept | tensors)
    return directory
