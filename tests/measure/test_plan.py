"""Oracle: sizes that others published (moeflux's tables of blocks, layer files and totals), the
models' own account of their state, and arithmetic by hand."""

from __future__ import annotations

import functools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import mlx.core as mx
import pytest
from huggingface_hub import errors
from huggingface_hub.hf_api import ModelInfo

from mlx_moeflux.checkpoint.quantization import Quantization
from mlx_moeflux.checkpoint.source import Checkpoint
from mlx_moeflux.checkpoint.tensors import TensorRef
from mlx_moeflux.cli import main
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.conversion.synthesize import synthesize
from mlx_moeflux.errors import CheckpointError, ConfigError, InputError, UnsupportedError
from mlx_moeflux.experts.budget import Memory
from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from mlx_moeflux.measure.plan import (
    Sizes,
    described_memory,
    measure_sizes,
    open_sizes,
    plan_model,
    range_around,
    span,
    speeds,
    typical_hit_rate,
)
from mlx_moeflux.models import model_class, shapes
from tests.models.test_published import PUBLISHED, opened

HERE = Path("published")
MEMORIES = ["16GB", "32GB", "64GB", "128GB"]


def sizes_of(config: dict, tensors: dict[str, TensorRef], **options) -> Sizes:
    quantization = Quantization.from_config(config)
    checkpoint = Checkpoint(HERE, "safetensors", config, tensors, quantization)
    return measure_sizes(checkpoint, **options)


@functools.cache
def published(name):
    _, tensors, _ = opened(name)
    return json.loads((PUBLISHED / f"{name}.json").read_text())["config"], dict(tensors)


@functools.cache
def sizes_at(name: str, **options) -> Sizes:
    return sizes_of(*published(name), **options)


# Block, all routed experts, MoE layers; trunk and state are checked to a few per cent.
SHAPES = {
    "qwen3.5-35b-a3b-4bit": (1_769_472, 18_119_393_280, 40, 1.4e9),
    "qwen3.5-122b-a10b-4bit": (5_308_416, 65_229_815_808, 48, 3.48e9),
    "qwen3.5-397b-a17b-4bit": (7_077_888, 217_432_719_360, 60, 5.5e9),
    "qwen3-30b-a3b-4bit": (2_654_208, 16_307_453_952, 48, 0.87e9),
    "deepseek-v3-4bit": (24_772_608, 342.6 * 2**30, 58, 10e9),
}


@pytest.mark.parametrize("name", SHAPES)
def test_sizes_are_the_published_ones(name):
    block, experts, layers, trunk = SHAPES[name]
    sizes = sizes_at(name)
    assert set(sizes.blocks.values()) == {block}
    assert len(sizes.blocks) == layers
    assert abs(sizes.expert_bytes / experts - 1) < 0.01
    assert sizes.bytes_per_token == layers * sizes.experts_per_token * block
    assert abs(sizes.trunk_bytes / trunk - 1) < 0.05
    assert sizes.embedding_bytes < sizes.trunk_bytes / 4


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", SHAPES)
def test_plans_for_real_machines(name, memory):
    sizes = sizes_at(name)
    plan = plan_model(name, sizes, memory=memory)
    gib = int(memory[:-2])
    usable = 0.9 * gib * 2**30 * (2 / 3 if gib <= 32 else 3 / 4)
    needs_all = sizes.trunk_bytes + sizes.state_bytes + sizes.expert_bytes + 1e9
    assert plan.resident == (needs_all <= usable)
    assert plan.fits == (sizes.trunk_bytes + sizes.state_bytes + plan.budget_bytes <= usable)
    assert 0 < plan.slow < plan.fast
    if not plan.resident:
        assert plan.slots * sum(sizes.blocks.values()) <= plan.budget_bytes
        # No faster than the disk allows for what even all of the memory would miss.
        missing = (1 - typical_hit_rate(gib * 2**30 / sizes.expert_bytes)) * sizes.bytes_per_token
        assert plan.estimate * missing <= 3e9
    assert json.loads(json.dumps(plan.as_dict()))["sizes"]["expert_bytes"] == sizes.expert_bytes
    assert all(word in str(plan) for word in ("trunk", "experts", "state", "budget", "speed"))


def test_which_machines_hold_what():
    verdicts = {
        name: [plan_model(name, sizes_at(name), memory=m) for m in MEMORIES] for name in SHAPES
    }
    # 1.4 + 18.1 + 0.2 + 1 GB are 1 % more than 0.9 of 2/3 of 32 GiB.
    assert [p.resident for p in verdicts["qwen3.5-35b-a3b-4bit"]] == [False, False, True, True]
    assert [p.resident for p in verdicts["qwen3-30b-a3b-4bit"]] == [False, True, True, True]
    # 3.5 + 65.2 + 0.3 + 1 GB exceed 0.9 of 3/4 of 64 GiB and fit in that of 128.
    assert [p.resident for p in verdicts["qwen3.5-122b-a10b-4bit"]] == [False, False, False, True]
    assert [p.fits for p in verdicts["qwen3.5-122b-a10b-4bit"]] == [True] * 4
    assert [p.fits for p in verdicts["qwen3.5-397b-a17b-4bit"]] == [True] * 4
    assert [p.fits for p in verdicts["deepseek-v3-4bit"]] == [False, False, True, True]
    assert "does not fit" in str(verdicts["deepseek-v3-4bit"][0])
    assert not any(p.resident for p in verdicts["deepseek-v3-4bit"])


def test_state_bytes_by_hand():
    def state(name, context):
        return sizes_at(name, context=context).state_bytes

    # 512 + 64 latents of two bytes for each of 61 layers; 4 heads of 128 twice in each of 48.
    assert state("deepseek-v3-4bit", 1024) == 2 * 576 * 61 * 1024
    assert state("qwen3-30b-a3b-4bit", 1024) == 4 * 512 * 48 * 1024
    # 10 layers with 2 heads of 256 twice, 30 with 32 heads of 128 x 128 and 3 rows of 8192.
    rows = 10 * 2 * 2 * 2 * 256
    fixed = 30 * (4 * 32 * 128 * 128 + 2 * 3 * 8192)
    for context, kept in ((1, 256), (256, 256), (257, 512), (100_000, 100_096)):
        assert state("qwen3.5-35b-a3b-4bit", context) == rows * kept + fixed


@pytest.mark.parametrize("shape", [name for name in shapes.SHAPES if "tiny" in name])
def test_state_bytes_are_those_of_a_model(shape):
    config = shapes.SHAPES[shape]
    kind = model_class(config.published()["model_type"])
    model = kind(config)
    model.set_dtype(mx.bfloat16)
    for positions in (1, 256, 257, 1000):
        assert config.state_bytes(positions) == model.state_bytes(positions)


def test_bits_are_what_a_conversion_would_give():
    floats = sizes_at("qwen3.5-35b-a3b", bits=4)
    packed = sizes_at("qwen3.5-35b-a3b-4bit")
    assert floats.blocks == packed.blocks
    assert abs(floats.trunk_bytes / packed.trunk_bytes - 1) < 0.01
    assert sizes_at("qwen3.5-35b-a3b").blocks[0] == 3 * 512 * 2048 * 2
    with pytest.raises(InputError, match="quantised already"):
        sizes_at("qwen3.5-35b-a3b-4bit", bits=4)
    with pytest.raises(InputError, match="cannot have 7 bits"):
        sizes_at("qwen3.5-35b-a3b", bits=7)


@pytest.mark.slow
def test_fp8_is_held_decoded_and_its_scales_vanish_when_converted():
    weights = 3 * 2048 * 7168
    assert set(sizes_at("deepseek-v3").blocks.values()) == {2 * weights}
    converted = sizes_at("deepseek-v3", bits=4)
    assert set(converted.blocks.values()) == {9 * weights // 16}


@pytest.mark.slow
def test_packed_integers_of_others_are_quantised_already():
    weights = 3 * 2048 * 7168
    assert set(sizes_at("kimi-k2-thinking").blocks.values()) == {5 * weights // 8}
    with pytest.raises(InputError, match="quantised already"):
        sizes_at("kimi-k2-thinking", bits=4)


def test_a_plan_is_what_loading_decides():
    for budget in ("auto", "25%", "2MB"):
        plan = plan_model("x", open_sizes(BUNDLED_MODEL), memory="16GB", expert_memory=budget)
        with load_model(BUNDLED_MODEL, expert_memory=budget) as model:
            assert plan.resident == model.plan.resident
            assert plan.budget_bytes == model.plan.budget_bytes
            assert plan.slots == min(model.plan.slots.values())
            assert plan.sizes.expert_bytes == model.plan.expert_bytes


def test_every_layout_has_the_same_experts(tmp_path):
    packed = convert(BUNDLED_MODEL, tmp_path / "packed")
    assert open_sizes(packed).blocks == open_sizes(BUNDLED_MODEL).blocks


def test_headers_of_a_file_larger_than_this_disk(tmp_path):
    """A sparse file with the headers of 376 GB: nothing but headers can have been read."""
    config, tensors = published("deepseek-v3-4bit")
    (tmp_path / "config.json").write_text(json.dumps(config))
    header, offset = {}, 0
    for name, ref in tensors.items():
        end = offset + ref.nbytes
        header[name] = {"dtype": ref.dtype, "shape": ref.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        try:
            file.truncate(8 + len(text) + offset)
        except OSError:
            pytest.skip("this file system has no files of 376 GB")
    assert open_sizes(tmp_path) == sizes_of(config, tensors)


def test_the_hub_is_asked_for_headers_only(tmp_path, monkeypatch, capsys):
    config, tensors = published("qwen3.5-35b-a3b-4bit")
    (tmp_path / "config.json").write_text(json.dumps(config))
    parts = {"model.safetensors": SimpleNamespace(tensors={
        name: SimpleNamespace(dtype=ref.dtype, shape=list(ref.shape))
        for name, ref in tensors.items()
    })}  # fmt: skip
    asked, failure = [], []

    class Api:
        def model_info(self, repo_id, *, revision=None, files_metadata=False, timeout=None):
            siblings = [{"rfilename": name, "size": 9} for name in ("config.json", *parts)]
            return ModelInfo(id=repo_id, sha="c0ffee", siblings=siblings)

        def get_safetensors_metadata(self, repo_id, *, revision=None):
            asked.append((repo_id, revision))
            if failure:
                raise failure[0]
            return SimpleNamespace(files_metadata=parts)

    def download(repo_id, filename, *, revision=None, tqdm_class=None):
        assert filename == "config.json"
        return str(tmp_path / filename)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
    assert open_sizes("org/name", revision="x") == sizes_of(config, tensors)
    assert asked == [("org/name", "c0ffee")]
    rates = ["--ssd-gbps", "3", "--memory-gbps", "100"]
    assert main(["plan", "org/name", "--memory", "32GB", "--json", *rates]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["memory_source"] == data["ssd_source"] == "given"
    assert data["sizes"]["expert_bytes"] == 18_119_393_280
    assert data["slow"] < data["fast"]
    failure.append(errors.NotASafetensorsRepoError("none"))
    with pytest.raises(UnsupportedError, match="no weights in safetensors"):
        open_sizes("org/name")
    failure[0] = OSError("no route")
    with pytest.raises(UnsupportedError, match="no route"):
        open_sizes("org/name")
    with pytest.raises(CheckpointError, match="neither a directory nor a hub id"):
        open_sizes("just a name")


@pytest.mark.parametrize("memory", [Memory("measured", 10**10, 9 * 10**9, "x", 11 * 10**9), "16GB"])
def test_the_arithmetic_by_hand(memory):
    sizes = sizes_at("qwen3.5-35b-a3b-4bit")
    plan = plan_model("x", sizes, memory=memory, expert_memory="25%", ssd_gbps=2, memory_gbps=50)
    active = sizes.trunk_bytes - sizes.embedding_bytes + sizes.bytes_per_token
    resident = 40 * 0.13e-3 + active / (0.6 * 50e9)
    # Pages of files get what trunk, state and bank leave, of 11 GB or of what macOS leaves.
    room = 16 * 2**30 - 5.5e9 if memory == "16GB" else 11e9
    left = room - sizes.trunk_bytes - sizes.state_bytes - sizes.expert_bytes / 4
    held, kept = 0.25**0.3, (0.25 + left / sizes.expert_bytes) ** 0.3
    assert 0 < held < kept < 1
    fetched = sizes.bytes_per_token * ((1 - held) / 20e9 + (1 - kept) / 2e9)
    assert plan.estimate == pytest.approx(1 / (resident + 40 * 0.25e-3 + fetched))
    assert plan.fast / plan.slow == pytest.approx(1.2**2)
    text = str(plan)
    for what in (f"{100 * held:.0f} % are in slots, ", f"{100 * kept:.0f} % are in slots or in "):
        assert what in text
    assert f"together {1e3 / plan.estimate:.1f} ms a token" in text
    whole = plan_model("x", sizes, memory=memory, expert_memory="100%", memory_gbps=50)
    assert whole.estimate == pytest.approx(1 / resident)
    assert "synchronisation" not in str(whole)


def test_a_reader_that_passes_by_the_page_cache_reads_all_that_the_bank_lacks():
    sizes = sizes_at("qwen3.5-35b-a3b-4bit")
    rates = {"ssd_gbps": 2.0, "memory_gbps": 50.0}
    seconds = [
        1 / math.sqrt(slow * fast)
        for cached in (0, 4 * 10**9, sizes.expert_bytes, 10**12)
        for slow, fast, _ in [speeds(sizes, 64, resident=False, page_cache_bytes=cached, **rates)]
    ]
    assert seconds[0] > seconds[1] > seconds[2] == seconds[3]
    # From the page cache nothing waits for the disk.
    read = sizes.bytes_per_token * (1 - typical_hit_rate(0.25)) / 2e9
    assert seconds[0] - seconds[2] == pytest.approx(read)
    assert typical_hit_rate(1) == 1
    assert typical_hit_rate(0) == 0


def test_a_printed_range_is_narrow():
    for step in range(2000):
        slow, fast = range_around(10 ** (step / 500 - 2))
        ends = [float(end) for end in span(slow, fast).split(" to ")]
        assert ends[-1] / ends[0] <= 1.6


@pytest.mark.parametrize(
    ("size", "least", "most"),
    [("8GB", 5726.6, 5726.7), ("16GB", 11453.2, 11453.3), ("24GB", 17179.8, 17179.9),
     ("32 GiB", 22906.4, 22906.5), ("36GB", 28991.0, 28991.1), ("64gb", 51539.6, 51539.7)],
)  # fmt: skip
def test_a_described_mac_has_the_working_set_that_macos_recommends(size, least, most):
    """In 10^6 bytes, as programs print Metal's recommendedMaxWorkingSetSize on such Macs."""
    memory = described_memory(size)
    assert least < memory.usable_bytes / 0.9 / 1e6 < most
    assert memory.free_bytes == int(re.match(r"\d+", size)[0]) * 2**30
    assert memory.system_bytes == memory.free_bytes - 5_500_000_000
    assert described_memory(memory.free_bytes) == memory


@pytest.mark.parametrize(
    "blocks",
    [(6e6, 6e6, 6e6), (8e6, 2e6, 2e6), (1e3, 4e3), (2e6,), (3e6, 3e6 + 3000), (9e6, 1e3, 5e5, 7e6)],
)
def test_products_that_a_plan_prints_are_what_it_says(blocks):
    blocks = dict(enumerate(map(int, blocks)))
    sizes = replace(sizes_at("qwen3-30b-a3b-4bit"), blocks=blocks)
    text = str(plan_model("x", sizes, memory="32GB"))
    units = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
    form = r"([\d.]+) (\w+)(?: of experts)?: (\d+)(?: layers)? x (\d+) x ([\d.]+) (\w+)(.*)"
    products = re.findall(form, text)
    assert [int(row[3]) for row in products] == [128, 8]
    for total, unit, layers, experts, size, of_size, rest in products:
        assert int(layers) == len(blocks)
        product = int(layers) * int(experts) * float(size) * units[of_size]
        assert product == pytest.approx(float(total) * units[unit], rel=0.01)
        assert ("on average" in rest) == (len({*blocks.values()}) > 1)


def test_what_cannot_be_planned():
    config, tensors = published("qwen3-30b-a3b-4bit")
    with pytest.raises(ConfigError, match="num_experts"):
        sizes_of({k: v for k, v in config.items() if k != "num_experts"}, tensors)
    with pytest.raises(UnsupportedError, match=r"'mixtral' is not one of .*; mlx-lm runs"):
        sizes_of(config | {"model_type": "mixtral"}, tensors)
    with pytest.raises(CheckpointError, match="no routed experts"):
        sizes_of(config, {n: t for n, t in tensors.items() if "switch_mlp" not in n})
    sizes = sizes_of(config, tensors)
    with pytest.raises(InputError, match="must be a number"):
        plan_model("x", sizes, memory="auto")
    with pytest.raises(InputError, match="ssd_gbps is 0"):
        plan_model("x", sizes, memory="16GB", ssd_gbps=0)


@pytest.mark.parametrize(
    ("option", "of_generate", "words"),
    [
        ("--context 8193", "--max-context 8193", "context is 8193; this model allows 1 to 8192."),
        ("--expert-memory 101%",) * 2 + ("the expert memory '101%' is more than all",),
    ],
)
def test_plan_refuses_what_generate_refuses(option, of_generate, words, capsys):
    lines = []
    for command, given in (("plan", option), ("generate", of_generate)):
        assert main([command, "--model", str(BUNDLED_MODEL), *given.split()]) == 1
        lines.append(capsys.readouterr().err.splitlines()[-1].replace("max_context", "context"))
    assert words in lines[0]
    assert lines[0] == lines[1]


def test_the_state_is_planned_as_loading_plans_it(tmp_path):
    """A model that allows less than 8192 tokens is planned at all of them."""
    path = synthesize("qwen3.5-tiny", tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 1000
    (path / "config.json").write_text(json.dumps(config))
    sizes = open_sizes(path)
    assert sizes.context == 1000
    assert sizes.state_bytes == open_sizes(path, context=1000).state_bytes
    with pytest.raises(InputError, match="context is 1001; this model allows 1 to 1000"):
        open_sizes(path, context=1001)
    assert open_sizes(BUNDLED_MODEL).context == 8192


def test_memory_for_rows_of_n_grams_is_that_of_loading(tmp_path):
    path = synthesize("qwen4-exp-tiny", tmp_path / "model", layers=4)
    for rows in ("64MB", "20kB", 0, "10%"):
        plan = plan_model("it", open_sizes(path), memory="8GB", row_memory=rows)
        with load_model(path, expert_memory="100%", row_memory=rows) as model:
            assert plan.row_bytes == model.plan.row_bytes == model.runtime.row_bytes
            assert plan.sizes.table_bytes == sum(t.nbytes for t in model.runtime.tables.values())
    shown = str(plan_model("it", open_sizes(path), memory="8GB"))
    assert "n-grams  12.8 kB on disk, 146 kB of memory for rows" in shown
    with pytest.raises(InputError, match="the row memory is 'auto'"):
        plan_model("it", open_sizes(path), memory="8GB", row_memory="auto")
