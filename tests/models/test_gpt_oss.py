"""Oracles: transformers' float layout and mlx-lm on the same numbers as the published MXFP4 layout,
and float64 loops of what is new. Logits of transformers: test_twins.py."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.checkpoint.source import open_checkpoint
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.conversion.synthesize import synthesize
from mlx_moeflux.errors import CheckpointError, UnsupportedError
from mlx_moeflux.kernels.attention.attention import causal_sdpa
from mlx_moeflux.kernels.cpu.blas import expert_mix_blas, sdpa_blas
from mlx_moeflux.kernels.moe.expert_ffn import ClampedSwiGLU, ExpertBank, ProjectionBank, expert_ffn
from mlx_moeflux.kernels.moe.expert_mix import expert_mix
from mlx_moeflux.loading import load_model
from mlx_moeflux.models import map_checkpoint
from tests.checkpoint.test_mx_formats import decoded
from tests.models.twins import relative_error

LAYERS, EXPERTS = 2, 12
QUANTIZATION = {
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    "quant_method": "mxfp4",
}


def interleaved(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """[E, F, ...] twice -> [E, 2 F, ...]."""
    return np.stack([gate, up], axis=2).reshape(gate.shape[0], -1, *gate.shape[2:])


def of_layer(tensors: dict[str, mx.array], layer: int) -> dict[str, np.ndarray]:
    """The experts of a layer in mlx-lm's layout; biases in float32."""
    start = f"model.layers.{layer}.mlp.experts."
    found = {n.removeprefix(start): a for n, a in tensors.items() if n.startswith(start)}
    biases = {n: a.astype(mx.float32) for n, a in found.items() if n.endswith(".bias")}
    return {n: np.array(a) for n, a in (found | biases).items()}


def write(out: Path, config: dict, tensors: dict[str, mx.array], quantization: dict | None) -> Path:
    out.mkdir()
    mx.save_safetensors(str(out / "model.safetensors"), tensors)
    config = {k: v for k, v in config.items() if not k.startswith("quantization")}
    config |= {} if quantization is None else {"quantization_config": quantization}
    if quantization is not None and "quant_method" not in quantization:
        config["quantization"] = quantization
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.fixture(scope="module")
def layouts(tmp_path_factory) -> dict[str, Path]:
    """The same numbers: mlx-lm's stacks, MXFP4 as published, floats as transformers writes them."""
    root = tmp_path_factory.mktemp("gpt_oss")
    stored = synthesize("gpt-oss-tiny", root / "stored", layers=LAYERS, experts=EXPERTS)
    floats = convert(stored, root / "floats", layout="safetensors", dequantize=True)
    config = json.loads((floats / "config.json").read_text())
    del config["rope_scaling"]["truncate"]  # mlx-lm 0.32.2 ignores it
    packed = mx.load(str(stored / "model.safetensors"))
    trunk = {
        name: array
        for name, array in mx.load(str(floats / "model.safetensors")).items()
        if ".experts." not in name
    }
    theirs, published, transposed = dict(trunk), dict(trunk), dict(trunk)
    theirs |= {name: array for name, array in packed.items() if ".experts." in name}
    for layer in range(LAYERS):
        at, parts = f"model.layers.{layer}.mlp.experts.", of_layer(packed, layer)
        both = {
            part: interleaved(parts[f"gate_proj.{part}"], parts[f"up_proj.{part}"])
            for part in ("weight", "scales", "bias")
        }
        down = {part: parts[f"down_proj.{part}"] for part in ("weight", "scales", "bias")}
        for name, own in (("gate_up_proj", both), ("down_proj", down)):
            E, rows, words = own["weight"].shape
            blocks = own["weight"].view(np.uint8).reshape(E, rows, words // 4, 16)
            published[f"{at}{name}_blocks"] = mx.array(blocks)
            published[f"{at}{name}_scales"] = mx.array(own["scales"])
            dense = decoded(
                own["weight"].reshape(E * rows, -1), own["scales"].reshape(E * rows, -1), "mxfp4"
            ).reshape(E, rows, -1)
            transposed[f"{at}{name}"] = mx.array(dense.swapaxes(1, 2).astype(np.float32))
            for tensors in (published, transposed):
                tensors[f"{at}{name}_bias"] = mx.array(own["bias"]).astype(mx.bfloat16)
    mxfp4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    return {
        "mlx-lm": write(root / "mlx-lm", config | {"quantization": mxfp4}, theirs, mxfp4),
        "published": write(root / "published", config, published, QUANTIZATION),
        "floats": write(root / "transposed", config, transposed, None),
    }


def logits(path: Path, **options) -> np.ndarray:
    tokens = mx.array(np.random.default_rng(4).integers(0, 1024, (2, 40)))
    with load_model(path, dtype=mx.float32, **options) as model:
        cache = model.make_cache()
        parts = [model(tokens[:, :36], cache)]
        parts += [model(tokens[:, t : t + 1], cache) for t in range(36, 40)]
        return np.array(mx.concatenate(parts, axis=1))


def test_published_mxfp4_gives_the_bits_of_mlx_lms_layout(layouts, tmp_path):
    expected = logits(layouts["mlx-lm"])
    assert np.isfinite(expected).all()
    packed = convert(layouts["published"], tmp_path / "packed", verify_written=True)
    stock = convert(layouts["published"], tmp_path / "stock", layout="safetensors")
    for path, options in (
        (layouts["published"], {}),
        (layouts["published"], {"expert_memory": "80%", "expert_reader": "pread"}),
        (layouts["published"], {"expert_memory": "80%", "expert_reader": "mmap"}),
        (layouts["mlx-lm"], {"expert_memory": "40%"}),
        (packed, {"expert_memory": "40%"}),
        (stock, {}),
    ):
        assert np.array_equal(logits(path, **options), expected), (path.name, options)
    kept = map_checkpoint(open_checkpoint(stock)).experts
    for layer, parts in map_checkpoint(open_checkpoint(layouts["published"])).experts.items():
        for name, refs in parts.items():
            assert mx.array_equal(refs[5].load(), kept[layer][name][5].load()), (layer, name)


def test_published_mxfp4_is_what_transformers_dequantises(layouts):
    """In float32; streamed floats, which are transposed when they are read, give their bits."""
    expected = logits(layouts["floats"])
    assert relative_error(mx.array(logits(layouts["published"])), mx.array(expected)) <= 1e-5
    assert np.array_equal(logits(layouts["floats"], expert_memory="80%"), expected)


def test_mlx_lm_gives_the_same_logits(layouts):
    utils = pytest.importorskip("mlx_lm.utils")
    tokens = mx.array(np.random.default_rng(3).integers(0, 1024, (1, 33)))
    for name in ("mlx-lm", "published"):
        theirs, _ = utils.load_model(layouts[name])
        theirs.set_dtype(mx.float32)
        with load_model(layouts[name], dtype=mx.float32) as model:
            assert relative_error(model(tokens), theirs(tokens)) <= 1e-5


def test_what_is_refused_is_counted(layouts):
    with load_model(layouts["published"], dtype=mx.float32) as model:
        mx.eval(model(mx.array([[1, 2, 3]])))
        lines = model.kernels.fallbacks()
    assert any(line.startswith("sdpa=") and "sinks" in line for line in lines)
    assert any(line.startswith("expert_mix=") for line in lines)


def test_blocks_without_scales_are_one_line(layouts, tmp_path):
    config = json.loads((layouts["published"] / "config.json").read_text())
    tensors = mx.load(str(layouts["published"] / "model.safetensors"))
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    broken = write(tmp_path / "broken", config, tensors, QUANTIZATION)
    with pytest.raises(CheckpointError, match=r"^[^\n]*_blocks' is there without '[^\n]*$"):
        load_model(broken)
    tensors = mx.load(str(layouts["published"] / "model.safetensors"))
    name = "model.layers.1.mlp.experts.down_proj_scales"
    tensors[name] = tensors[name][:, :, :1]
    broken = write(tmp_path / "narrow", config, tensors, QUANTIZATION)
    with pytest.raises(CheckpointError, match=r"^[^\n]*is no MXFP4 in blocks of 16 bytes[^\n]*$"):
        load_model(broken)


def attended(q, k, v, sinks, scale, seen) -> np.ndarray:
    """softmax over keys and a sink, in float64 loops."""
    B, Hq, T, _ = q.shape
    y = np.zeros((B, Hq, T, v.shape[-1]))
    for b in range(B):
        for h in range(Hq):
            keys, values = k[b, h * k.shape[1] // Hq], v[b, h * k.shape[1] // Hq]
            for t in range(T):
                scores = np.where(seen[t], keys @ q[b, h, t] * scale, -np.inf)
                top = max(scores.max(), sinks[h])
                weights = np.exp(scores - top)
                y[b, h, t] = weights @ values / (weights.sum() + np.exp(sinks[h] - top))
    return y


@pytest.mark.parametrize("window", [None, 3])
def test_sinks_take_part_in_the_softmax(window):
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, h, s, 16)) for h, s in ((4, 5), (2, 9), (2, 9)))
    sinks = np.array([-3.0, 0.0, 1.0, 6.0])
    place = np.arange(9)[None] - np.arange(4, 9)[:, None]
    seen = (place <= 0) & (place > -(window or 99))
    given = [mx.array(a.astype(np.float32)) for a in (q, k, v)]
    mask = "causal" if window is None else mx.array(seen)[None, None]
    options = {"scale": 0.25, "mask": mask, "sinks": mx.array(sinks.astype(np.float32))}
    truth = attended(q, k, v, sinks, 0.25, seen)
    assert relative_error(causal_sdpa(*given, **options), mx.array(truth.astype(np.float32))) < 1e-6
    with pytest.raises(UnsupportedError, match="sinks"):
        sdpa_blas(*given, **options)


def test_biases_and_the_clamped_activation():
    random = np.random.default_rng(1)
    C, F, E, P = 12, 8, 3, 7
    w = [2 * random.standard_normal((E, *shape)) for shape in ((F, C), (F, C), (C, F))]
    b = [random.standard_normal((E, shape)) for shape in (F, F, C)]
    x, slots = random.standard_normal((P, C)), random.integers(0, E, P)
    truth = np.zeros((P, C))
    for p, s in enumerate(slots):
        gate = np.minimum(w[0][s] @ x[p] + b[0][s], 1.5)
        up = np.clip(w[1][s] @ x[p] + b[1][s], -1.5, 1.5)
        inner = (up + 1) * gate / (1 + np.exp(-1.7 * gate))
        truth[p] = w[2][s] @ inner + b[2][s]
    parts = [
        ProjectionBank(*(mx.array(a.astype(np.float32)) for a in (weight,)), None, None, None,
                       mx.array(bias.astype(np.float32)))
        for weight, bias in zip(w, b, strict=True)
    ]  # fmt: skip
    bank = ExpertBank(*parts, activation=ClampedSwiGLU(1.7, 1.5))
    rows, ids = mx.array(x.astype(np.float32)), mx.array(slots.astype(np.uint32))
    expected = mx.array(truth.astype(np.float32))
    assert relative_error(expert_ffn(rows, ids, bank), expected) < 1e-6
    small = bank.take(ids, mx.float32)
    assert relative_error(expert_ffn(rows, mx.arange(P, dtype=mx.uint32), small), expected) < 1e-6
    weights = mx.ones((P, 1))
    assert relative_error(expert_mix(rows, ids[:, None], weights, bank), expected) < 1e-6
    with pytest.raises(UnsupportedError, match="without biases"):
        expert_mix_blas(rows, ids[:, None], weights, bank)
