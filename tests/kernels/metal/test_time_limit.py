"""How long launches and command buffers take on an M1, by arithmetic.

macOS ends a command buffer after some 5 s. Prompts and steps of models of two layers, one of each
kind, are recorded at contexts up to each model's limit; nothing runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlx_moeflux.kernels.registry import choose_kernels
from mlx_moeflux.kernels.runtime.launcher import KERNELS
from mlx_moeflux.models import decoder
from mlx_moeflux.models.base import PREFILL_CHUNK
from mlx_moeflux.models.indexed_mla import IndexedLatentAttention
from tests.kernels.metal.test_device_limits import MODELS, model_of
from tests.kernels.metal.work import BYTES_RATE, OPERATIONS_RATE, Counter, Work, counted, rule_of

# Seconds of a launch, and of all launches in one command buffer.
LAUNCH, BUFFER = 0.5, 2.0
CONTEXTS = (2048, 16_000, 100_000)
# Later parts of a conversation.
TURNS = (20, 100, 300, 2048)
# One of each kind of attention: own kernels, stock with a mask of windows, stock, latents, heads
# of 512, residual streams.
USUAL = (
    *("qwen3.5-35b-a3b", "gpt-oss-20b", "glm-4.6", "deepseek-v3"),
    *("gemma-4-26b-a4b", "qwen3.8-flash-next"),
)
# An indexer scores some tokens at a time, so that a prompt has very many launches.
INDEXED = ("deepseek-v3.2", "glm-5")
ELSE = [name for name in MODELS if name not in (*USUAL, *INDEXED)]


def slow(names):
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def longest(counter: Counter) -> float:
    """Seconds of the longest launch of what was counted since the last call, which is checked."""
    launch, buffer = counter.longest(), counter.longest_buffer()
    assert launch.seconds <= LAUNCH, f"a launch: {launch}"
    assert buffer <= BUFFER, f"a command buffer: {buffer:.2f} s, a launch in it: {launch}"
    counter.work.clear()
    return launch.seconds


def limit_of(name: str) -> int:
    config: Any = MODELS[name][1]
    return config.max_position_embeddings


def read(model, cache, T: int, **options) -> None:
    B = options.pop("B", 1)
    model(mx.zeros((B, T), mx.uint32), cache, **{"last_only": T > 1} | options)


def last_context(name: str) -> int:
    """One that leaves room for some more turns."""
    return limit_of(name) - 4000


@pytest.mark.parametrize(
    ("name", "context"),
    [
        *((name, None) for name in USUAL),
        *(pytest.param(n, None, marks=pytest.mark.slow) for n in ELSE),
        *(pytest.param(n, c, marks=pytest.mark.slow) for n in (*USUAL, *ELSE) for c in CONTEXTS),
    ],
)
def test_prompts_and_steps_end_in_time(name, context):
    context = min(context or last_context(name), last_context(name))
    with counted() as counter:
        model = model_of(name, mx.bfloat16, apart=False)
        cache = model.make_cache()
        for T in (context, 1, 1, *TURNS):
            read(model, cache, T)
            longest(counter)


@pytest.mark.parametrize("name", ["qwen3.5-35b-a3b", *slow([*USUAL[1:], *ELSE])])
def test_buffers_of_many_layers_end_in_time(name, monkeypatch):
    """Launches of several layers share a buffer."""
    kind, config = MODELS[name]
    two: Any = config
    deep: Any = {"num_hidden_layers": 12}
    if hasattr(config, "full_attention_interval"):
        deep["full_attention_interval"] = 4
    monkeypatch.setitem(MODELS, name, (kind, replace(two, **deep)))
    with counted() as counter:
        model = model_of(name, mx.bfloat16, apart=False)
        cache = model.make_cache()
        for T in (16_000, 1, 1, *TURNS):
            read(model, cache, T)
            longest(counter)


@pytest.mark.parametrize("name", [*USUAL[1:3], *slow([USUAL[0], *USUAL[3:], *ELSE])])
def test_float32_ends_in_time(name):
    with counted() as counter:
        model = model_of(name, mx.float32, apart=True)
        cache = model.make_cache()
        for T in (last_context(name), 1, 1, *TURNS):
            read(model, cache, T)
            longest(counter)


@pytest.mark.parametrize("name", [*USUAL, *slow([*ELSE, *INDEXED])])
def test_batches_and_logits_of_all_positions_end_in_time(name):
    with counted() as counter:
        model = model_of(name, mx.bfloat16, apart=False)
        for B, T in ((4, PREFILL_CHUNK), (16, PREFILL_CHUNK)):
            cache = model.make_cache()
            read(model, cache, T, B=B)
            longest(counter)
            read(model, cache, 1, B=B)
            longest(counter)
        read(model, model.make_cache(), PREFILL_CHUNK, last_only=False)
        longest(counter)


@pytest.mark.slow
@pytest.mark.parametrize("name", USUAL[:4])
def test_references_end_in_time(name, monkeypatch):
    """Where every kernel failed its trial."""
    monkeypatch.setattr(decoder, "Kernels", lambda: choose_kernels("reference"))
    with counted() as counter:
        model = model_of(name, mx.bfloat16, apart=False)
        cache = model.make_cache()
        for T in (30_000, 1, 1, *TURNS):
            read(model, cache, T)
            longest(counter)


def nothing_seen(self, queries, index, cache, **options):
    B, T, H, _ = queries.whole.shape
    return mx.zeros((B, H, T, self.config.v_head_dim), queries.whole.dtype)


@pytest.mark.parametrize(
    ("name", "context"),
    [
        ("deepseek-v3.2", 4096),
        *(pytest.param(n, c, marks=pytest.mark.slow) for n in INDEXED for c in (100_000, None)),
    ],
)
def test_the_last_part_of_an_indexed_prompt_ends_in_time(name, context, monkeypatch):
    context, last = context or limit_of(name) - 300, 100 if context == 4096 else PREFILL_CHUNK
    with counted() as counter:
        model = model_of(name, mx.bfloat16, apart=False)
        cache = model.make_cache()
        with monkeypatch.context() as patch:
            patch.setattr(IndexedLatentAttention, "attend", nothing_seen)
            read(model, cache, context - last)
        for T in (last, 1, 1, 6, 100):
            read(model, cache, T)
            longest(counter)


# ---- What finds it out


def test_every_kernel_has_an_entry():
    for name in KERNELS:
        rule_of(name)
    with pytest.raises(AssertionError, match="no entry for kernel 'attend_all'"):
        rule_of("attend_all")


def test_the_limits_are_those_without_pieces(monkeypatch):
    """A prompt that is not cut is found too long, by own kernels and by stock attention."""
    monkeypatch.setattr("mlx_moeflux.kernels.runtime.pieces.MOST_OPERATIONS", 10**18)
    for name in ("qwen3.5-35b-a3b", "glm-4.6"):
        with counted() as counter:
            read(model := model_of(name, mx.bfloat16, apart=False), model.make_cache(), 60_000)
            with pytest.raises(AssertionError, match="a launch"):
                longest(counter)


def test_work_is_the_larger_of_operations_and_bytes():
    assert Work("x", (), 2 * OPERATIONS_RATE, 100, {}, 0).seconds == 2.0
    assert Work("x", (), 100, 3 * round(BYTES_RATE), {}, 0).seconds == 3.0


def test_operations_and_bytes_of_an_attention_and_of_experts():
    with counted() as counter:
        model = model_of("qwen3.5-35b-a3b", mx.bfloat16, apart=False)
        cache = model.make_cache()
        read(model, cache, PREFILL_CHUNK)
        prompt = {one.name: one for one in counter.launches}
        counter.work.clear()
        read(model, cache, 1)
        step = {one.name: one for one in counter.launches}
    config, T = model.config, PREFILL_CHUNK
    heads, D = config.num_attention_heads, config.head_dim
    assert prompt["attend_shared"].operations == 4 * T * T * heads * D
    C, F, k = config.hidden_size, config.moe_intermediate_size, config.num_experts_per_tok
    assert prompt["expert_tiles_gated"].operations == 2 * 2 * T * k * C * F
    assert prompt["expert_tiles_down"].operations == 2 * T * k * C * F
    block = 2 * C * F * (4 + 2 * 16 / 64) / 8  # gate and up of 4 bits, a scale and a bias for 64
    assert block * config.num_experts < prompt["expert_tiles_gated"].nbytes
    # Its scales are its biases here.
    assert 0.9 * block * k < step["moe_step_inner"].nbytes < block * k


def test_buffers_end_by_mlxs_rule():
    def launch(*held: int, made: int = 0) -> Work:
        return Work("x", (), 1.0, 0, {n: n << 20 for n in held}, made << 20)

    def sizes(*work: Work | None) -> list[int]:
        counter = Counter()
        counter.work = list(work)
        return [len(buffer) for buffer in counter.buffers()]

    # The launch that goes beyond either limit is the last one.
    assert sizes(*[launch(1)] * 100) == [41, 41, 18]
    assert sizes(*[launch(30)] * 3, launch(11), launch(2)) == [4, 1]
    assert sizes(launch(41), launch(41), launch(2)) == [1, 1, 1]
    assert sizes(launch(20, made=20), launch(20), launch(1), launch(3)) == [3, 1]
    # An evaluation ends one too.
    assert sizes(launch(1), None, launch(1), launch(1)) == [1, 2]
