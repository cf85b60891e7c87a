"""No product of a step is fused with a sum: a trace has the bits of a step that calls the store.

A graph of stock operations is looked through as a GPU would get it: launches and what MLX has
kernels for there are closed boxes in it.
"""

from __future__ import annotations

import io
import re
from collections import defaultdict

import mlx.core as mx
import pytest

from mlx_moeflux.kernels.rounding import rounded
from tests.kernels.metal.recording import Recorder, recorded
from tests.models_at_hand import model_of

PRODUCTS, SUMS = {"Multiply", "Square"}, {"Add", "Subtract"}
# What MLX fuses between a product and a sum.
BETWEEN = {"Broadcast", "Copy", "StopGradient", "Negative"}
FAST = ("rms_norm", "layer_norm", "rope", "scaled_dot_product_attention")


def fused(*arrays: mx.array) -> list[str]:
    """Return the sums in a graph that have a product for a term, with what made the terms."""
    text = io.StringIO()
    mx.export_to_dot(text, *arrays)
    kinds = dict(re.findall(r"(\d+) \[label =\"([^\"]+)\"", text.getvalue()))
    maker, terms = {}, defaultdict(list)
    for one, other in re.findall(r"\"?(\w+)\"? -> \"?(\w+)\"?", text.getvalue()):
        if other in kinds:
            terms[other].append(one)
        else:
            maker[other] = one

    def is_product(array: str) -> bool:
        node = maker.get(array)
        while node is not None and kinds[node] in BETWEEN:
            node = maker.get(terms[node][0])
        return node is not None and kinds[node] in PRODUCTS

    def told(array: str, depth: int = 2) -> str:
        node = maker.get(array)
        if node is None or not depth:
            return "." if node is None else kinds[node]
        return f"{kinds[node]}({', '.join(told(each, depth - 1) for each in terms[node])})"

    sums = (node for node, kind in kinds.items() if kind in SUMS)
    return [
        f"{kinds[node]}: {' | '.join(map(told, terms[node]))}"
        for node in sums
        if any(map(is_product, terms[node]))
    ]


def closed(function):
    """Return results of `function` that nothing is known of but what they were made from."""

    def box(*arrays, **options):
        inputs = [a for a in (*arrays, *options.values()) if isinstance(a, mx.array)]
        result = mx.stop_gradient(function(*arrays, **options))
        return mx.depends([mx.zeros(result.shape, result.dtype)], inputs)[0]

    return box


@pytest.fixture
def boxes(monkeypatch):
    """See the module."""
    for name in FAST:
        monkeypatch.setattr(mx.fast, name, closed(getattr(mx.fast, name)))
    monkeypatch.setattr(mx, "dequantize", closed(mx.dequantize))
    build = Recorder.build

    def built(self, kernel):
        launch = build(self, kernel)
        return lambda *, inputs, **rest: mx.depends(launch(inputs=inputs, **rest), list(inputs))

    monkeypatch.setattr(Recorder, "build", built)


@pytest.mark.usefixtures("boxes")
@pytest.mark.parametrize("dtype", [mx.float32, pytest.param(mx.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind",
    [
        *("hybrid", "qwen4_exp_rows", "gemma4_shared"),
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("4 bits", "deepseek_v3_groups", "qwen3_moe_window", "glm_moe_dsa_shared")
        ),
    ],
)
def test_a_step_fuses_no_product_with_a_sum(tmp_path, kind, dtype):
    evaluate = mx.eval
    with (
        model_of(kind, tmp_path, expert_memory="100%", dtype=dtype) as model,
        recorded("cuda"),
    ):
        cache = model.make_cache()
        evaluate(model(mx.zeros((2, 10), mx.uint32), cache))
        with model.hook(0, "before_mixer", lambda x: None):
            y = model(mx.zeros((2, 1), mx.uint32), cache)
        assert fused(y) == []


def test_what_is_fused_is_seen():
    a, b = mx.ones((8,)), mx.ones((8,))
    mx.eval(a, b)
    assert fused(a * b + a) == ["Add: Multiply(., .) | ."]
    assert fused(a - mx.broadcast_to(a * b, (2, 8))) != []
    assert fused(rounded(a * b) + a) == fused((a + b) * a) == fused((a * b).sum() + a) == []


def test_a_product_that_is_rounded_is_a_launch_of_its_own():
    def graph(function) -> str:
        text = io.StringIO()
        mx.export_to_dot(text, mx.compile(function)(mx.ones((8,)), mx.ones((8,))))
        return text.getvalue()

    assert "MultiplyAdd" in graph(lambda a, b: a * b + a)
    assert "Compiled" not in graph(lambda a, b: rounded(a * b) + a)


def test_gradients_flow_through():
    gradient = mx.grad(lambda a: (rounded(a * a) + a).sum())
    assert gradient(mx.array([3.0])).item() == 7.0
