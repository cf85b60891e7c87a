"""Oracles: mlx-lm's whole model for its layers one by one; arithmetic of whole matrices for those
that are decoded; layers that are made wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.cli import main
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.conversion.synthesize import synthesize
from mlx_moeflux.errors import CheckpointError
from mlx_moeflux.experts.budget import Memory
from mlx_moeflux.loading import BUNDLED_MODEL
from mlx_moeflux.measure import against
from mlx_moeflux.measure.against import Comparison, Part, compare
from mlx_moeflux.measure.stock_layers import StockLayers
from mlx_moeflux.models.base import StreamingModel
from mlx_moeflux.models.moe import SoftmaxRouter

pytest.importorskip("mlx_lm")
PROMPT = np.random.default_rng(0).integers(0, 1000, 19).tolist()
REPLY = 4
FAMILIES = ("qwen3.5-tiny", "deepseek-tiny", "gpt-oss-tiny")
OTHERS = (
    *("deepseek-v3.2-tiny", "gemma-4-tiny", "glm-5-tiny", "glm-flash-tiny", "glm-tiny"),
    *("kimi-k2.5-tiny", "laguna-tiny", "minimax-tiny", "qwen3-next-tiny", "qwen3-tiny"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Returns a directory of two layers of a family."""
    root = tmp_path_factory.mktemp("models")

    def made(family: str) -> Path:
        if not (root / family).exists():
            layers = 4 if "3.5" in family or "next" in family else 2
            synthesize(family, root / family, layers=layers, experts=16)
        return root / family

    return made


def checked(directory: Path, **options) -> Comparison:
    return compare(directory, PROMPT, reply=REPLY, **options)


@pytest.mark.parametrize(
    "family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_every_family_is_right(model, family):
    lines = []
    found = checked(model(family), found=lambda part: lines.append(str(part)))
    names = [part.name for part in found.parts]
    layers = [f"layer {index}" for index in range(len(names) - 2)]
    assert names == ["embedding", *layers, "logits"]
    assert [part.fault for part in found.parts] == [None] * len(names)
    assert found.right
    assert found.whole is True
    assert found.dtype == "bfloat16"
    # As far from float32 as numbers of 8 bits are; no part is exact, and none is far off.
    assert all(1e-3 < part.ours < 0.2 for part in found.parts)
    assert all(1e-3 < part.theirs < 0.2 for part in found.parts)
    assert {part.same_bits for part in found.parts} <= {True, None}
    assert sum(part.same_bits is True for part in found.parts) >= len(layers) - 1
    assert len(lines) == len(names)


def cut(array: mx.array) -> list[mx.array]:
    return list(mx.split(array, list(range(40, 45)), axis=1))


def test_layers_one_by_one_are_mlx_lms_whole_model(model):
    """With masks and caches of two kinds of layers, windows that the text exceeds, and tuples that
    layers return."""
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    for family in ("qwen3.5-tiny", "gpt-oss-tiny", "gemma-4-tiny"):
        ids = mx.array(np.random.default_rng(1).integers(0, 1000, (1, 45)))
        parts = cut(ids)
        whole, _ = load_model(model(family))
        cache = make_prompt_cache(whole)
        expected = mx.concatenate([whole(part, cache=cache) for part in parts], axis=1)
        stock = StockLayers(model(family))
        x = stock.embed(ids)
        for index in range(stock.count):
            stock.forget()
            x, _ = stock.layer(index, parts, cut(x))
        found = stock.logits(parts, cut(x))
        assert mx.array_equal(found, expected).item(), family


def test_a_matrix_that_mlx_lm_quantises_anew_is_decoded(model):
    directory = model("deepseek-tiny")
    tensors: Any = mx.load(str(next(directory.glob("*.safetensors"))))
    name = "model.layers.0.self_attn.kv_b_proj"
    parts = [tensors[f"{name}.{part}"] for part in ("weight", "scales", "biases")]
    spec = json.loads((directory / "config.json").read_text())["quantization"]
    bits, group_size = spec["bits"], spec["group_size"]
    parts[1:] = [part.astype(mx.float32) for part in parts[1:]]
    expected = mx.dequantize(*parts, group_size=group_size, bits=bits)
    attention = StockLayers(directory, exact=True)._model.layers[0].self_attn
    keys, values = attention.embed_q.weight, attention.unembed_out.weight
    found = mx.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(expected.shape)
    assert mx.array_equal(found, expected).item()
    # Quantised twice, mlx-lm's own is not what the checkpoint has.
    layer = checked(directory).parts[1]
    assert layer.ratio < 0.7


def wrong(monkeypatch, change, layer: int = 1):
    """Let `change` replace what our `layer` returns of several tokens."""
    original = StreamingModel.run_layer

    def run_layer(self, index, hidden, cache=None):
        out = original(self, index, hidden, cache)
        return change(self, out) if index == layer and out.shape[1] > 1 else out

    monkeypatch.setattr(StreamingModel, "run_layer", run_layer)


def only_token(index: int, factor: float):
    def change(_, out):
        rows = mx.arange(out.shape[1])[None, :, None]
        return mx.where(rows == index, out * factor, out).astype(out.dtype)

    return change


def few_slots(self, out):
    few = self.store.streaming.slots[1] < self.config.num_experts
    return out * (1 + 2**-7) if few else out


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda _, out: (out * 1.1).astype(out.dtype), "more than 2 times mlx-lm's error"),
        (only_token(7, 1.2), "more than 2 times mlx-lm's error"),
        (only_token(18, float("nan")), "its numbers are not finite"),
        (few_slots, "streamed and resident differ"),
    ],
    ids=["all tokens", "one token", "NaN", "bits"],
)
def test_a_wrong_layer_is_named(model, monkeypatch, change, fault):
    wrong(monkeypatch, change)
    found = checked(model("qwen3-tiny"))
    faults = {part.name: part.fault for part in found.parts if part.fault is not None}
    assert faults == {"layer 1": fault}
    assert not found.right


def test_a_wrong_router_is_named(model, monkeypatch):
    original = SoftmaxRouter.__call__
    monkeypatch.setattr(SoftmaxRouter, "__call__", lambda self, logits: original(self, -logits))
    found = checked(model("qwen3-tiny"))
    layers = [part.fault for part in found.parts if part.same_bits is not None]
    assert set(layers) == {"other experts are chosen"}
    assert found.parts[0].fault is None


def test_a_streamed_reply_with_other_bits_is_wrong(model, monkeypatch):
    original, calls = against._reply, []

    def reply(*arguments):
        calls.append(arguments)
        ids, logits = original(*arguments)
        return ids, logits + (len(calls) == 2) * 1e-3

    monkeypatch.setattr(against, "_reply", reply)
    found = checked(model("qwen3-tiny"))
    assert all(part.fault is None for part in found.parts)
    assert found.whole is False
    assert not found.right
    assert len(calls[1][3]) == REPLY  # the tokens of the first
    assert "wrong, streamed and resident differ" in "\n".join(found.lines(str))


def test_experts_that_do_not_fit_are_compared_layer_by_layer(model, monkeypatch):
    small = Memory("cpu", 10**6, 10**6, "the memory of a test")
    monkeypatch.setattr("mlx_moeflux.loading.steps.measure_memory", lambda: small)
    found = checked(model("qwen3-tiny"))
    assert found.right
    assert found.whole is None
    assert [part.same_bits for part in found.parts] == [None, True, True, None]
    assert "compared layer by layer only" in "\n".join(found.lines(str))


@pytest.mark.slow
def test_the_first_token_that_differs(model):
    """The reply of the whole models, each to its own tokens."""
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    from mlx_moeflux.loading import load_model as load_ours

    def greedy(whole, cache, call):
        tokens, found = mx.array([PROMPT]), []
        for _ in range(8):
            found.append(int(call(whole, tokens, cache)[0, -1].argmax().item()))
            tokens = mx.array([found[-1:]])
        return found

    directory = model("gpt-oss-tiny")
    stock, _ = load_model(directory)
    theirs = greedy(stock, make_prompt_cache(stock), lambda m, t, c: m(t, cache=c))
    with load_ours(directory, dtype=mx.bfloat16) as own:
        ours = greedy(own, own.make_cache(), lambda m, t, c: m(t, c))
    differ = [at for at in range(8) if ours[at] != theirs[at]]
    at = differ[0]
    assert compare(directory, PROMPT, reply=8).first == (at, ours[at], theirs[at])
    assert compare(directory, PROMPT, reply=at).first is None


def test_float32_is_not_judged_by_its_last_bits(model, tmp_path):
    directory = convert(
        model("qwen3-tiny"),
        tmp_path / "floats",
        dequantize=True,
        dtype="float32",
        layout="safetensors",
    )
    found = checked(directory)
    assert found.right
    assert found.dtype == "float32"
    assert max(part.ours for part in found.parts) < against.FLOOR


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        (Part("a", 8, 2.0, 1.0), None),
        (Part("a", 8, 2.01, 1.0), "more than 2 times mlx-lm's error"),
        (Part("a", 8, 2e-5, 0.0), None),
        (Part("a", 8, 2.1e-5, 0.0), "more than 2 times mlx-lm's error"),
        (Part("a", 8, float("nan"), 1.0), "its numbers are not finite"),
        (Part("a", 8, float("inf"), 1.0), "its numbers are not finite"),
        (Part("a", 8, 1.0, float("nan")), "mlx-lm's numbers are not finite"),
        (Part("a", 8, 1.0, 1.0, 2, 0, True), None),
        (Part("a", 8, 1.0, 1.0, 3, 0, True), "other experts are chosen"),
        (Part("a", 8, 1.0, 1.0, 6, 2, True), None),
        (Part("a", 8, 1.0, 1.0, 0, 0, False), "streamed and resident differ"),
    ],
)
def test_what_is_right(part, fault):
    assert part.fault == fault
    assert ("right" in str(part)) == (fault is None)


def test_the_command(model, capsys, monkeypatch):
    monkeypatch.setattr(against, "PROMPT", 12)
    monkeypatch.setattr(against, "REPLY", 2)
    assert main(["check", "--against", "mlx-lm", str(model("qwen3-tiny"))]) == 0
    out = capsys.readouterr().out
    assert out.count("right") == 5
    assert "4 of 4 parts are right" in out
    wrong(monkeypatch, lambda _, out: (out * 1.5).astype(out.dtype))
    assert main(["check", "--against", "mlx-lm", "--model", str(model("qwen3-tiny"))]) == 1
    assert "wrong: more than 2 times" in capsys.readouterr().out


def refused(capsys, *arguments: str) -> str:
    assert main(["check", *arguments]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


def test_what_mlx_lm_does_not_read_is_one_line(model, two_layers, tmp_path, capsys, monkeypatch):
    packed = convert(model("qwen3-tiny"), tmp_path / "packed")
    given = ("--against", "mlx-lm")
    assert "which mlx-lm does not read" in refused(capsys, *given, str(packed))
    assert "mlx-lm has no " in refused(capsys, *given, str(two_layers / "qwen4-exp-tiny"))

    def fails(*_, **options):
        raise TypeError("ModelArgs lacks hidden_size\nand more")

    with monkeypatch.context() as patch:
        patch.setattr("mlx_lm.utils.load_model", fails)
        with pytest.raises(CheckpointError, match=r"cannot load this \(TypeError: .*hidden_size\)"):
            StockLayers(BUNDLED_MODEL)
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    err = refused(capsys, *given, str(BUNDLED_MODEL))
    assert "mlx-lm is not installed here; install it with" in err


def test_options_that_exclude_each_other_are_one_line(capsys):
    assert "leave out --operation" in refused(capsys, "--against", "mlx-lm", "--operation", "stock")
    assert "are for --against mlx-lm" in refused(capsys, "qwen3.6")
