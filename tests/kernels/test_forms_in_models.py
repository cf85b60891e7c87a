"""Oracle: the references in float32, operation by operation, on the arguments that models give.

Each family is walked through calls of all sizes at which the table changes forms: prompts, padding,
batches and steps of a token. Whatever form "auto" takes must take the arguments, or say that it
does not, and give what the reference gives.
"""

from __future__ import annotations

import dataclasses
import functools

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux import synthesize
from mlx_moeflux.kernels import auto
from mlx_moeflux.kernels.choice import FORMS, REFERENCE
from mlx_moeflux.kernels.delta_mixer import References
from mlx_moeflux.kernels.metal import backend
from mlx_moeflux.kernels.selfcheck import LIMITS, describe
from mlx_moeflux.loading import load_model
from tests.kernels.emulator import Emulator
from tests.kernels.experts import BETWEEN
from tests.kernels.harness import emulated, error

# Family -> what makes two layers of it hold every kind, and prompts of it take every way.
SHAPES = {
    "qwen3.5-tiny": {"full_attention_interval": 2},
    "deepseek-tiny": {"kv_lora_rank": 128},
    "qwen3-tiny": {"use_sliding_window": True, "sliding_window": 5},
    "qwen3-next-tiny": {"full_attention_interval": 2},
}
# Around the places where a form begins.
PROMPTS = (1, 4, 5, 9, 64, 130)


def in_float32(value):
    """The same with all floats in float32: what a form should compute."""
    if isinstance(value, mx.array):
        return value.astype(mx.float32) if mx.issubdtype(value.dtype, mx.floating) else value
    if isinstance(value, (list, tuple)):
        return type(value)(map(in_float32, value))
    if isinstance(value, dict):
        return {key: in_float32(entry) for key, entry in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{n: in_float32(getattr(value, n)) for n in names})
    return value


def truth(operation, args, kwargs):
    """What the reference gives in float32; of a whole block, in whose middle experts are chosen,
    as it is: rounding decides which."""
    reference = FORMS[operation][REFERENCE]
    if operation == "moe_step":
        return reference(*args, **kwargs)
    if operation == "delta_mixer":
        kwargs = kwargs | {"steps": References}
    return reference(*in_float32(args), **in_float32(kwargs))


def arrays_of(value) -> list[mx.array]:
    if isinstance(value, mx.array):
        return [value]
    return [] if value is None else [array for entry in value for array in arrays_of(entry)]


def without_padding(array: mx.array, start: mx.array | None, length) -> mx.array:
    """array ``[B, H, T, D]`` with zeros for queries before their sequence's first key."""
    if start is None:
        return array
    query = mx.array(length) - array.shape[2] + mx.arange(array.shape[2])
    return mx.where((query >= start[:, None])[:, None, :, None], array, 0.0)


class Comparison:
    """Forms that compare what they return with what the reference says.

    taken: (operation, form) of what ran. wrong: What differed.
    """

    def __init__(self):
        self.taken: set[tuple[str, str]] = set()
        self.wrong: list[str] = []
        self._comparing = False

    def form(self, operation: str, name: str):
        form = FORMS[operation][name]

        @functools.wraps(form)
        def call(*args, **kwargs):
            actual = form(*args, **kwargs)
            if not self._comparing:  # by a reference that calls operations
                self.taken.add((operation, name))
                self._comparing = True
                self.compare(f"{operation}={name}", actual, operation, args, kwargs)
                self._comparing = False
            return actual

        return call

    def compare(self, what, actual, operation, args, kwargs) -> None:
        shapes = describe(FORMS[operation][REFERENCE](*args, **kwargs))
        if describe(actual) != shapes:
            self.wrong.append(f"{what} gives {describe(actual)}, not {shapes}")
            return
        expected = arrays_of(truth(operation, args, kwargs))
        pairs = list(zip(arrays_of(actual), expected, strict=True))
        if operation in ("sdpa", "latent_attention", "latent_prefill"):
            hide = functools.partial(
                without_padding, start=kwargs.get("start"), length=kwargs.get("length")
            )
            pairs = [tuple(map(hide, pair)) for pair in pairs]
        # Results of one call belong together: a single number near zero says nothing alone.
        numbers = [pair for pair in pairs if mx.issubdtype(pair[0].dtype, mx.floating)]
        largest = max(float(mx.abs(b).max()) for _, b in numbers)
        worst = max(error(a, b) for a, b in numbers)
        if not worst <= LIMITS[arrays_of(args[0])[0].dtype] * largest:
            self.wrong.append(f"{what} is off by {worst:.3g} of {largest:.3g}: {shapes}")
        if not all(mx.array_equal(a, b).item() for a, b in pairs if a.dtype == mx.uint32):
            self.wrong.append(f"{what} chooses others: {shapes}")


@pytest.fixture
def compared(request, monkeypatch):
    """A :class:`Comparison` of all forms, on the emulator under the table of a back end."""
    comparison = Comparison()
    for operation, forms in FORMS.items():
        for name in forms:
            if name != REFERENCE:
                monkeypatch.setitem(forms, name, comparison.form(operation, name))
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
    """Families under NVIDIA's table, those with forms of their own always, and under Apple's."""
    for family in SHAPES:
        for table in ("cuda", "metal"):
            often = table == "cuda" and family != "qwen3-next-tiny"
            marks = () if often else pytest.mark.slow
            yield pytest.param(family, table, marks=marks, id=f"{family}-{table}")


@pytest.mark.parametrize(("family", "compared"), list(calls()), indirect=["compared"])
def test_forms_give_what_references_give(family, compared, tmp_path, monkeypatch):
    shape = dataclasses.replace(synthesize.SHAPES[family], **SHAPES[family])
    monkeypatch.setitem(synthesize.SHAPES, family, shape)
    directory = synthesize.synthesize(family, tmp_path / "model", layers=2)
    with load_model(directory, dtype=mx.bfloat16) as model:
        walk(model)
    assert not compared.wrong, "\n".join(compared.wrong)
    for operation in {operation for operation, _ in compared.taken}:
        rows = auto.rows(operation, backend().name)
        forms = {row.form for row in rows if row.start <= max(PROMPTS)} - {REFERENCE}
        assert {(operation, form) for form in forms} <= compared.taken
