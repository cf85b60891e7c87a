"""Oracle: the references in float32, operation by operation, on the arguments that models give.

Each family is walked through calls of all sizes at which the table changes implementations:
prompts, padding, batches and steps of a token. Whatever "auto" takes must take the arguments, or
say that it does not, and give what the reference gives.
"""

from __future__ import annotations

import dataclasses
import functools

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.conversion import synthesize
from mlx_moeflux.kernels import dispatch
from mlx_moeflux.kernels.operation import REFERENCE
from mlx_moeflux.kernels.runtime.launcher import backend
from mlx_moeflux.loading import load_model
from tests.kernels.experts import BETWEEN
from tests.kernels.harness import emulated
from tests.kernels.implementations import IMPLEMENTATIONS, differences
from tests.kernels.metal.emulator import Emulator

# Family -> what makes two layers of it hold every kind, and prompts of it take every way.
SHAPES = {
    "qwen3.5-tiny": {"full_attention_interval": 2},
    "deepseek-tiny": {"kv_lora_rank": 128},
    "qwen3-tiny": {"use_sliding_window": True, "sliding_window": 5},
    "qwen3-next-tiny": {"full_attention_interval": 2},
    "qwen4-exp-tiny": {"full_attention_interval": 2, "ple_layer_ids": (1,)},
}
# Around the places where an implementation begins.
PROMPTS = (1, 4, 5, 9, 64, 130)


class Comparison:
    """Implementations that compare what they return with what the reference says.

    taken: (operation, implementation) of what ran. wrong: What differed.
    """

    def __init__(self):
        self.taken: set[tuple[str, str]] = set()
        self.wrong: list[str] = []
        self._comparing = False

    def implementation(self, operation: str, name: str):
        implementation = IMPLEMENTATIONS[operation][name]

        @functools.wraps(implementation)
        def call(*args, **kwargs):
            actual = implementation(*args, **kwargs)
            if not self._comparing:  # by a reference that calls operations
                self.taken.add((operation, name))
                self._comparing = True
                found = differences(operation, args, kwargs, actual)
                self.wrong += [f"{operation}={name} {what}" for what in found]
                self._comparing = False
            return actual

        return call


@pytest.fixture
def compared(request, monkeypatch):
    """A :class:`Comparison` of everything, on the emulator under the table of a back end."""
    comparison = Comparison()
    for operation, implementations in IMPLEMENTATIONS.items():
        for name in implementations:
            if name != REFERENCE:
                monkeypatch.setitem(
                    implementations, name, comparison.implementation(operation, name)
                )
    # Steps are laid out as for a trace, which the emulator cannot be part of.
    monkeypatch.setattr(mx, "compile", lambda function: function)
    options = {"schedules": Emulator.FIRST, "partly_written": BETWEEN}
    with emulated(name=request.param, **options):
        yield comparison


def walk(model) -> None:
    """Prompts of every size with a token behind each; padded batches; a batch of steps."""
    rng, model.compile_steps = np.random.default_rng(0), True

    def run(cache, *shape):
        y = model(mx.array(rng.integers(0, model.config.vocab_size, shape)), cache)
        assert np.isfinite(np.array(y.astype(mx.float32))).all()

    for T in PROMPTS:
        cache = model.make_cache()
        run(cache, 1, T)
        run(cache, 1, 1)
    left, right = {"left_padding": [0, 3]}, {"lengths": [6, 4], "right_padding": [0, 2]}
    for T, padding in ((6, left), (6, right), (2, {"left_padding": [1, 0]})):
        cache = model.make_cache()
        for entry in cache:
            entry.prepare(**padding)
        run(cache, 2, T)
        for entry in cache:
            entry.finalize()
        run(cache, 2, 1)
        run(cache, 2, 4)
    cache = model.make_cache()
    run(cache, 6, 2)
    run(cache, 6, 1)


def calls():
    """Families under NVIDIA's table and under Apple's."""
    for family in SHAPES:
        for table in ("cuda", "metal"):
            yield pytest.param(family, table, id=f"{family}-{table}")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "compared"), list(calls()), indirect=["compared"])
def test_forms_give_what_references_give(family, compared, tmp_path, monkeypatch):
    shape = dataclasses.replace(synthesize.SHAPES[family], **SHAPES[family])
    monkeypatch.setitem(synthesize.SHAPES, family, shape)
    directory = synthesize.synthesize(family, tmp_path / "model", layers=2)
    with load_model(directory, dtype=mx.bfloat16) as model:
        walk(model)
    assert not compared.wrong, "\n".join(compared.wrong)
    for operation in {operation for operation, _ in compared.taken}:
        rows = dispatch.rows(operation, backend().name)
        implementations = {row.name for row in rows if row.start <= max(PROMPTS)} - {REFERENCE}
        assert {(operation, implementation) for implementation in implementations} <= compared.taken
