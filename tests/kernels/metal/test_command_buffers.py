"""A token of a published model takes few Metal command buffers, by MLX's rule.

A buffer costs some 20 us, reported for an M3 Ultra. Launches alone make some, by MLX's limit; own
launches make no more by their arrays. Models are of full depth; nothing runs.
"""

from __future__ import annotations

import contextlib
import math
import random
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.cache import AttentionCache
from mlx_moeflux.experts.compute import from_whole_bank
from mlx_moeflux.experts.resident import ResidentStore
from mlx_moeflux.generation.loop import normalised
from mlx_moeflux.kernels.runtime import views
from mlx_moeflux.models.shapes import SHAPES
from tests.kernels.metal import test_device_limits as limits
from tests.kernels.metal.command_buffers import (
    CHIPS,
    Array,
    Encoder,
    Limits,
    Step,
    blank,
    contiguous,
    counted_steps,
    reshaped,
)
from tests.kernels.metal.recording import recorded
from tests.kernels.metal.work import counted

CONTEXTS, LONG = (512, 4096), (32_768, 131_072)
# Model -> most launches of a token, stock operations and the choice of the next token among them.
LAUNCHES = {
    "qwen3.5-35b-a3b": 288,
    "qwen3-next-80b-a3b": 414,
    "gpt-oss-120b": 884,
    "glm-4.5-air": 842,
    "qwen3.8-flash-next": 1127,
}
# Buffers beyond those that launches alone make: MLX's lookup of a token counts the whole table of
# embeddings.
BEYOND = 1
SLOTS = 64


class Waiting(ResidentStore):
    """A streamed store whose experts are all there: every layer waits for the host."""

    stays_on_device = False
    looks_ahead = False
    generation = 0

    @property
    def steps(self) -> Waiting:
        return self

    @property
    def slots(self) -> dict[int, int]:
        return dict.fromkeys(self.layers, SLOTS)

    def exclusive(self):
        return contextlib.nullcontext()

    def partial(self) -> tuple[int, ...]:
        return self.layers

    def whole(self, layer: int) -> None:
        return None

    def experts(self, layer, x, ids, weights, **options) -> mx.array:
        return mx.zeros(x.shape, mx.float32)

    def begin_load(self, layer, ids, weights, *, ahead=None) -> mx.array:
        mx.eval(ids)
        return ids

    def slots_of(self, call: mx.array) -> mx.array:
        return blank(call.shape, mx.uint32)

    def bank(self, layer: int):
        return self._banks(layer)

    def wait(self, call: Any) -> None: ...

    def release_after(self, call: Any, output: mx.array) -> None: ...

    def compute_slots(self, x, slots, weights, bank):
        return from_whole_bank(x, slots, weights, bank, self.expert_compute, padded=False)


@dataclass
class Table:
    """Rows of n-grams, `width` numbers of a token."""

    width: int

    def begin(self, rows: Any) -> Table:
        self.count = rows.shape[1]
        return self

    def rows(self, columns: slice) -> mx.array:
        return blank((1, len(range(self.count)[columns]), self.width), mx.bfloat16)


def model_of(name: str, monkeypatch, *, streamed: bool = False):
    """A model of full depth whose arrays take no memory."""
    kind, _ = limits.MODELS[name]
    config: Any = SHAPES[name]
    monkeypatch.setitem(limits.MODELS, name, (kind, config))
    if streamed:
        monkeypatch.setattr(limits, "ResidentStore", Waiting)
        bank_of = limits.bank_of

        class Fewer:
            def __init__(self, config):
                self._config = config

            def __getattr__(self, name):
                return SLOTS if name == "num_experts" else getattr(self._config, name)

        monkeypatch.setattr(limits, "bank_of", lambda c, dtype: bank_of(Fewer(c), dtype))
    model = limits.model_of(name, mx.bfloat16, apart=False)
    for _, part in model.named_modules():
        if hasattr(part, "set_table"):
            part.set_table(Table(config.ple_embed_dim))
    return model


def token(step: Step, model, context: int) -> None:
    """Take a token down, with the choice of the next, behind `context` others."""
    cache = model.make_cache()
    with recorded():
        model(mx.zeros((1, 2), mx.uint32), cache, last_only=True)
    for entry in cache:
        if isinstance(entry, AttentionCache):
            rows = entry.rows_for(context + 1)
            entry.arrays = [blank((*a.shape[:2], rows, a.shape[3]), a.dtype) for a in entry.arrays]
        else:
            entry._set([a if a is None else blank(a.shape, a.dtype) for a in entry._arrays()])
        entry.columns = context
    step.end()
    step.work.clear()
    step.names.clear()
    step.nodes = 0
    logits = model(mx.zeros((1, 1), mx.uint32), cache)
    step.trace(choice, [logits], fuses=False)
    step.end()


def choice(logits: mx.array) -> Any:
    """The most likely token, as a reply is drawn."""
    logprobs, finite = normalised(logits[:, -1])
    return mx.argmax(logprobs, axis=-1), logprobs.squeeze(0), finite


def of_launches(step: Step, chip: Limits) -> int:
    """The buffers that launches and evaluations alone make."""
    work = [None if one is None else ([], one[1]) for one in step.work]
    return Step(work).buffers(chip)


def each_model(*contexts: int):
    """By default the first model at these contexts, the others and longer ones with -m slow."""
    every = [(name, context) for name in LAUNCHES for context in (*CONTEXTS, *LONG)]
    usual = [(next(iter(LAUNCHES)), context) for context in contexts]
    return pytest.mark.parametrize(
        ("name", "context"),
        [pytest.param(*one, marks=[pytest.mark.slow] * (one not in usual)) for one in every],
    )


@each_model(512, 4096)
def test_a_resident_token_takes_few_command_buffers(name, context, monkeypatch):
    with counted_steps() as step:
        token(step, model_of(name, monkeypatch), context)
    assert step.launches <= LAUNCHES[name]
    for chip in CHIPS.values():
        assert step.buffers(chip) <= of_launches(step, chip) + BEYOND
        assert step.buffers(chip) <= 10 or step.launches > 410


@each_model(4096)
def test_a_streamed_token_takes_a_command_buffer_a_layer(name, context, monkeypatch):
    """One with the first layer's router, one for each other, one for the logits, one for the
    choice."""
    with counted_steps() as step:
        model = model_of(name, monkeypatch, streamed=True)
        token(step, model, context)
    assert step.work.count(None) == len(model.store.layers) + 2
    for chip in CHIPS.values():
        assert step.buffers(chip) <= of_launches(step, chip) + BEYOND
        # Layers with an indexer or n-grams have more launches than a buffer.
        assert step.buffers(chip) <= len(model.layers) + 3 or name == "qwen3.8-flash-next"


def test_a_prompt_frees_what_it_freed(monkeypatch):
    """Launches of many rows get whole arrays, so that MLX ends buffers where it did."""
    most = []
    for rows in (views.MOST_ROWS, -1):
        monkeypatch.setattr(views, "MOST_ROWS", rows)
        with counted() as counter:
            model = limits.model_of("qwen3.5-35b-a3b", mx.bfloat16, apart=False)
            model(mx.zeros((1, 8192), mx.uint32), model.make_cache(), last_only=True)
        most.append(max(sum(one.made for one in each) for each in counter.buffers()))
    assert most[0] <= 1.1 * most[1], most


# ---- What finds it out


def test_without_views_a_token_takes_many_and_as_many_nodes(monkeypatch):
    nodes = []
    for rows in (views.MOST_ROWS, -1):
        monkeypatch.setattr(views, "MOST_ROWS", rows)
        with counted_steps() as step:
            token(step, model_of("qwen3.5-35b-a3b", monkeypatch), 4096)
        nodes.append(step.nodes)
    assert min(map(step.buffers, CHIPS.values())) > 40
    assert nodes[0] == nodes[1] > 288


def test_without_views_of_caches_a_long_context_takes_more(monkeypatch):
    monkeypatch.setattr(AttentionCache, "short_views", lambda self: ())
    with counted_steps() as step:
        token(step, model_of("qwen3.5-35b-a3b", monkeypatch), 131_072)
    assert min(map(step.buffers, CHIPS.values())) > 10


def test_a_buffer_is_counted_once_and_by_the_first_array():
    mega = 1 << 20
    encoder = Encoder(Limits(4, 10))
    assert not encoder.add([("a", 8 * mega), ("b", mega)])
    assert not encoder.add([("a", 8 * mega)])
    assert encoder.add([("c", 2 * mega)])
    assert not encoder.add([("a", 1), ("a", 80 * mega)], launches=4)
    assert encoder.add([])
    assert encoder.ended == 2
    encoder.end()
    assert encoder.ended == 2


def test_shapes_of_views_are_mlxs():
    """Reshaping is a view where MLX's result lies where its input does."""
    rng, met = random.Random(0), set()
    for _ in range(300):
        shape = [rng.choice((1, 2, 3, 4, 6)) for _ in range(rng.randint(1, 4))]
        whole = mx.arange(math.prod(shape)).reshape(shape)
        axes = rng.sample(range(len(shape)), len(shape))
        starts = [rng.randrange(n) for n in shape]
        part = whole[tuple(slice(start, n) for start, n in zip(starts, shape, strict=True))]
        array = part.transpose(axes)
        strides = tuple(contiguous(shape)[axis] for axis in axes)
        size, target = array.size, []
        while size > 1:
            n = rng.choice([d for d in range(2, size + 1) if size % d == 0])
            target.append(n)
            size //= n
        target = tuple(target) or (1,)
        y = array.reshape(target)
        mx.eval(array, y)
        begins = [np.asarray(each).ctypes.data for each in (array, y)]
        found = reshaped(Array("x", array.shape, strides), target)
        assert (found is None) == (begins[0] != begins[1]), (array.shape, strides, target)
        met.add(found is None)
    assert met == {True, False}


def test_primitives_of_a_trace():
    """Elementwise operations are fused, copies count, what was there before the step does not."""
    weight = mx.ones((64, 8))

    def function(x):
        y = mx.sigmoid(x) * x + 1  # one launch
        parts = mx.split(y.reshape(2, 4, 8), 2, axis=-1)  # views
        z = mx.concatenate([part.reshape(-1) for part in parts])  # two copies, two launches
        return z @ (weight + 1)

    with counted_steps() as step:
        step.trace(function, [mx.zeros((64,))])
    assert step.launches == 6
    assert step.names == ["Add", "Reshape", "Reshape", "Concatenate", "Matmul"]
