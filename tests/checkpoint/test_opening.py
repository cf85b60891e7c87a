"""Oracle: the kernel's account of a fresh process. Opening a checkpoint of more than 20 GB, as it
is published, reads its headers and its trunk, and no byte of an expert.

The files are sparse: all of their bytes are zeros, and next to none are on the disk.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from math import prod
from pathlib import Path

import pytest

from mlx_moeflux.loading import BUNDLED_MODEL

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

PUBLISHED = Path(__file__).parents[1] / "published"
ITEM_BYTES = {"U32": 4, "BF16": 2, "F32": 4}
# As published but for these: a layer of each kind, a small trunk, many experts of published size.
LAYERS, K, V = 2, 2, 4096
EXPERTS = {"qwen3.5-35b-a3b-4bit": 6144, "qwen3.5-35b-a3b": 2048}
BLOCK = {"qwen3.5-35b-a3b-4bit": 1_769_472, "qwen3.5-35b-a3b": 3 * 512 * 2048 * 2}

CHILD = """
    import json, sys
    def rchar():
        with open("/proc/self/io") as file:
            return int(file.readline().split()[1])
    import mlx.core as mx
    import mlx_moeflux
    from mlx_moeflux import load
    mx.eval(mx.ones(8) + 1)
    before = rchar()
    model, tokenizer = load(sys.argv[1], expert_memory=int(sys.argv[2]))
    read = rchar() - before
    with open("/proc/self/maps") as file:
        mapped = sum(".safetensors" in line for line in file)
    opened = model.store.stats().total.bytes_read
    logits = model(mx.array([[1]]))
    result = {
        "read": read,
        "mapped": mapped,
        "slots": list(model.store.slots.values()),
        "experts_read": opened,
        "read_by_a_token": model.store.stats().total.bytes_read,
        "finite": mx.isfinite(logits).all().item(),
    }
    model.close()
    print(json.dumps(result))
"""


@dataclass
class Sparse:
    directory: Path
    trunk_bytes: int
    expert_bytes: int


def shapes(name: str, kinds: list[str]):
    """(tensor, dtype, shape) of a published layout with fewer layers, more experts and V."""
    published = json.loads((PUBLISHED / f"{name}.json").read_text())["tensors"]
    for pattern, (kind, dtype, shape) in published.items():
        shape = list(shape)
        if pattern.startswith("mtp."):
            continue
        if ".mlp.gate." in pattern or ".switch_mlp." in pattern or ".mlp.experts." in pattern:
            shape[0] = EXPERTS[name]
        elif "embed_tokens" in pattern or "lm_head" in pattern:
            shape[0] = V
        if "{l}" not in pattern:
            yield pattern, dtype, shape
            continue
        for layer, own in enumerate(kinds):
            if kind == "all" or own.startswith(kind):
                yield pattern.replace("{l}", str(layer)), dtype, shape


def write_sparse(name: str, directory: Path) -> Sparse:
    """The checkpoint, in two shards; nothing but the headers is written, and a number of each norm
    and of the trunk's scales, which no model has as zeros."""
    config = json.loads((PUBLISHED / f"{name}.json").read_text())["config"]
    text = config["text_config"]
    text |= {"num_hidden_layers": LAYERS, "num_experts": EXPERTS[name], "vocab_size": V}
    text |= {"num_experts_per_tok": K, "layer_types": text["layer_types"][2:4]}
    tensors = list(shapes(name, text["layer_types"]))
    result, weight_map = Sparse(directory, 0, 0), {}
    for shard, part in enumerate((tensors[::2], tensors[1::2])):
        file = directory / f"model-{shard + 1:05d}-of-00002.safetensors"
        header, end, written = {"__metadata__": {"format": "mlx"}}, 0, []
        for tensor, dtype, shape in part:
            size = prod(shape) * ITEM_BYTES[dtype]
            header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            if tensor.endswith(("norm.weight", ".scales")) and ".switch_mlp." not in tensor:
                written.append(end + size)
            end += size
            weight_map[tensor] = file.name
            if ".switch_mlp." in tensor or ".mlp.experts." in tensor:
                result.expert_bytes += size
            elif "vis" not in tensor:
                result.trunk_bytes += size
        text_header = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text_header)) + text_header)
        os.truncate(file, file.stat().st_size + end)
        with file.open("r+b") as stream:
            for last in written:
                stream.seek(8 + len(text_header) + last - 2)
                stream.write(b"\x80\x3f")  # the upper half of 1.0: bfloat16, or a float32
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(config))
    for tokenizer in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL / tokenizer, directory)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERTS)
def test_opening_twenty_gigabytes_reads_no_expert(tmp_path, name):
    made = write_sparse(name, tmp_path)
    assert made.expert_bytes == LAYERS * EXPERTS[name] * BLOCK[name] > 20_000_000_000
    on_disk = sum(f.stat().st_blocks * 512 for f in tmp_path.iterdir())
    assert on_disk < 10_000_000, "this file system knows no sparse files"
    budget = LAYERS * K * BLOCK[name]
    child = [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path), str(budget)]
    done = subprocess.run(child, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    print(f"{made.expert_bytes / 1e9:.1f} GB of experts: {measured}")  # noqa: T201
    assert measured["slots"] == [K] * LAYERS
    assert measured["experts_read"] == 0
    assert measured["mapped"] == 0
    # Headers, index, config and tokenizer, and what the libraries read of themselves.
    headers = on_disk + sum(f.stat().st_size for f in tmp_path.glob("*.json"))
    assert made.trunk_bytes <= measured["read"] <= 1.05 * (made.trunk_bytes + headers)
    # It is the checkpoint that was opened: a token reads its experts, and only those.
    assert measured["read_by_a_token"] == budget
    assert measured["finite"]
