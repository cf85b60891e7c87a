"""mlx-lm's own programs on our models: generate, cache_prompt, benchmark, lora, fuse, evaluate.

Their texts and numbers are compared with greedy continuations evaluated anew for every token, with
losses and likelihoods computed here, and with mlx-lm's own model in float32."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
import types

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_moeflux import mlx_lm_plugin
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.errors import UnsupportedError
from mlx_moeflux.experts.telemetry.events import Chosen
from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from mlx_moeflux.mlx_lm_plugin import register_with_mlx_lm
from mlx_moeflux.tokenizer import load_tokenizer
from tests.models.twins import GOLDEN
from tests.test_mlx_lm_client import greedy, write_tokenizer

mlx_lm = pytest.importorskip("mlx_lm")
PROMPT, COUNT = "def f(", 5


@pytest.fixture
def register(monkeypatch):
    """Registration that ends with the test."""
    from mlx_lm import utils

    monkeypatch.setattr(utils, "load_model", utils.load_model)
    monkeypatch.setattr(utils, "save_model", utils.save_model)
    for name in ("utils", "convert", "fuse"):
        module = importlib.import_module(f"mlx_lm.{name}")
        monkeypatch.setattr(module, "dequantize_model", module.dequantize_model)
    return register_with_mlx_lm


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a program as ``python -m mlx_lm`` does; return what it prints."""
    from mlx_lm import cli

    def program(*args):
        monkeypatch.setattr(sys, "argv", ["mlx_lm", *map(str, args)])
        capsys.readouterr()
        cli.main()
        return capsys.readouterr().out

    return program


@pytest.fixture(scope="module")
def tokenizer(two_bundled_layers):
    return load_tokenizer(two_bundled_layers)


@pytest.fixture(scope="module")
def continuation(two_bundled_layers, tokenizer):
    """Ids that follow a text, greedily."""
    with load_model(two_bundled_layers) as model:
        yield lambda text, count: greedy(model, tokenizer.encode(text), count, None)


@pytest.fixture
def generated(run, two_bundled_layers):
    """Return the reply that mlx_lm.generate prints."""
    options = ["--model", two_bundled_layers, "--ignore-chat-template", "--verbose", "F"]
    return lambda *args: run("generate", *options, *args).removesuffix("\n")


def shown(tokenizer, ids):
    """Return the text of ids as mlx-lm prints it: without a space at its beginning."""
    return tokenizer.decode(ids).removeprefix(" ")


FLAGS = {
    "sampling": ["--prefill-step-size", 2, "--seed", 3, "--temp", 0, "--top-p", 0.9, "--top-k", 5],
    "cache": ["--max-kv-size", 64, "--trust-remote-code", "--quantized-kv-start", 1],
}


@pytest.mark.parametrize("flags", ["sampling", pytest.param("cache", marks=pytest.mark.slow)])
def test_generate(register, generated, tokenizer, continuation, flags):
    register(expert_memory="25%")
    got = generated("--prompt", PROMPT, "--max-tokens", COUNT, *FLAGS[flags])
    ids = continuation(PROMPT, COUNT)
    assert got == shown(tokenizer, ids)
    assert len(set(ids)) > 2


def test_generate_ends_at_an_extra_token(register, generated, tokenizer, continuation):
    register(expert_memory="50%")
    ids = continuation(PROMPT, COUNT)
    end = tokenizer.convert_ids_to_tokens(ids[3])
    assert ids[3] not in ids[:3]
    got = generated("--prompt", PROMPT, "--max-tokens", COUNT, "--extra-eos-token", end)
    assert got == shown(tokenizer, ids[:3])


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.slow), {"kv_bits": 8}])
def test_a_cached_prompt_is_continued(
    two_bundled_layers, register, run, generated, tokenizer, continuation, options, tmp_path
):
    register(expert_memory="50%", **options)
    file, rest = tmp_path / "prompt.safetensors", " return"
    cached = run(
        "cache_prompt",
        "--model",
        two_bundled_layers,
        "--prompt",
        PROMPT,
        "--prompt-cache-file",
        file,
    )
    assert f"Processed {len(tokenizer.encode(PROMPT)):6d} tokens" in cached
    got = generated("--prompt", rest, "--max-tokens", COUNT, "--prompt-cache-file", file)
    assert tokenizer.encode(PROMPT) + tokenizer.encode(rest) == tokenizer.encode(PROMPT + rest)
    assert got == shown(tokenizer, continuation(PROMPT + rest, COUNT))


REFUSED = {
    "--quantize-activations": (UnsupportedError, "quantize_activations=True would override"),
    "--kv-bits=4": (UnsupportedError, r"kv_bits to load\(\) or register_with_mlx_lm\(\)"),
    f"--draft-model={BUNDLED_MODEL}": (ValueError, "requires a trimmable prompt cache"),
    "--image=picture.png": (ValueError, "does not take images"),
}


@pytest.mark.parametrize("flag", REFUSED)
def test_a_flag_without_effect_is_refused(register, generated, flag):
    register(expert_memory="50%")
    kind, message = REFUSED[flag]
    with pytest.raises(kind, match=message):
        generated("--prompt", PROMPT, flag)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"quantize_activations": False}, None),
        ({"rope_scaling": None, "model_type": "qwen3_5_moe", "eos_token_id": 0}, None),
        ({}, None),
        ({"quantize_activations": False, "vocab_size": 9}, "vocab_size"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"eos_token_id": 3}, "eos_token_id"),
    ],
)
def test_only_what_changes_the_config_is_refused(two_bundled_layers, register, given, key):
    register(expert_memory="50%")
    if key is None:
        model, _ = mlx_lm.load(str(two_bundled_layers), model_config=given)
        assert not model.plan.resident
        model.close()
    else:
        with pytest.raises(UnsupportedError, match=f"{key}=.* would override config.json"):
            mlx_lm.load(str(two_bundled_layers), model_config=given)


@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v3_direct",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("gemma4_shared", "glm_moe_dsa_shared", "gpt_oss_sinks", "qwen3_moe_window")
        ),
    ],
)
def test_a_draft_changes_no_token(name, tmp_path):
    """Models without recurrent layers: entries are cut back after tokens that were not accepted."""
    from mlx_moeflux.loading import load

    for file in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name / file, tmp_path)
    write_tokenizer(tmp_path, 90)
    prompt = [3, 7, 9, 20, 11, 5, 60, 2]
    model, tokenizer = load(tmp_path, expert_memory="80%")
    with model, load_model(tmp_path, experts_per_token=1) as draft:
        replies = list(
            mlx_lm.stream_generate(
                model, tokenizer, prompt, max_tokens=10, draft_model=draft, num_draft_tokens=3
            )
        )
        assert [r.token for r in replies] == greedy(model, prompt, 10, None)
    assert 0 < sum(r.from_draft for r in replies) < 10


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_benchmark_computes_every_token(two_bundled_layers, register, run, batch):
    heard = []
    register(expert_memory="50%", events=lambda e: heard.append(e) if e.layer == 0 else None)
    sizes = {"-p": 5, "-g": 2, "-n": 1, "-b": batch}
    printed = run(
        "benchmark", "--model", two_bundled_layers, *(x for pair in sizes.items() for x in pair)
    )
    trials = re.findall(r"(Trial \d|Averages): +prompt_tps=(.*?), generation_tps=(.*?),", printed)
    assert [name for name, *_ in trials] == ["Trial 1", "Averages"]
    assert all(float(n) > 0 for _, *speeds in trials for n in speeds)
    tokens = sum(len(e.ids) for e in heard if isinstance(e, Chosen))
    # Once to warm up, then once; mlx-lm evaluates the last token too.
    assert tokens == 2 * batch * (5 + 2)


TEXTS = [f"the quick brown fox number {i} jumps over the lazy dog" for i in range(4)]
# Of the twin's alphabet, which has no space.
ASCII = [text.replace(" ", "_") for text in TEXTS]


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for part in ("train", "valid", "test"):
        lines = (json.dumps({"text": text}) for text in ASCII)
        (folder / f"{part}.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def twin(tmp_path):
    """Delta net and attention with a shared expert; unquantised, so that fusing rounds nothing."""
    folder = tmp_path / "twin"
    folder.mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "text_top3" / file, folder)
    write_tokenizer(folder, 90)
    return folder


@pytest.fixture
def not_compiled():
    mx.disable_compile()
    yield
    mx.enable_compile()


def train(run, twin, data, adapters, *flags, iters=3):
    lora = ["lora", "--model", twin, "--data", data, "--adapter-path", adapters]
    lora += ["--batch-size", 2, "--seed", 1, "--max-seq-length", 64]
    lora += ["--train", "--iters", iters, "--num-layers", 4, "--steps-per-report", 1]
    printed = run(*lora, "--optimizer", "sgd", "--learning-rate", 0.05, *flags)
    return [
        float(loss) for loss in re.findall(r"(\d+\.\d+) [▼▲]", re.sub(r"\x1b.*?m", "", printed))
    ]


def test_lora_trains_streamed_models_as_resident_ones(
    register, run, twin, data, tmp_path, not_compiled
):
    losses, adapters = [], []
    for memory in ("100%", "50%"):
        register(expert_memory=memory)
        losses.append(train(run, twin, data, tmp_path / memory))
        adapters.append(mx.load(str(tmp_path / memory / "adapters.safetensors")))
    assert len(losses[0]) == 3
    assert losses[0][-1] < 0.9 * losses[0][0]
    assert losses[1] == losses[0]
    resident, streamed = adapters
    assert streamed.keys() == resident.keys()
    for name, array in resident.items():
        assert mx.allclose(streamed[name], array, rtol=1e-3, atol=1e-5), name
    modules = {name.split(".", 3)[3].rpartition(".")[0] for name in resident}
    shared = {f"mlp.shared_expert.{p}_proj" for p in ("gate", "up", "down")}
    assert {*shared, "mlp.shared_expert_gate", "mlp.gate", "self_attn.q_proj"} <= modules
    assert not any("switch_mlp" in name for name in modules)
    assert all(mx.abs(resident[n]).max() > 0 for n in resident if n.endswith("lora_b"))


def test_a_compiled_step_of_lora_names_both_ways_out(register, run, twin, data, tmp_path):
    register(expert_memory="50%")
    with pytest.raises(UnsupportedError, match=r"disable_compile\(\).*expert_memory='100%'"):
        train(run, twin, data, tmp_path / "adapters", "--val-batches", 1)
    mx.random.seed(0)  # its state was captured by the step, and MLX leaves it so after an error


@pytest.mark.slow  # MLX compiles C++ for it
@pytest.mark.parametrize("flags", [[], ["--grad-checkpoint"], ["--fine-tune-type", "dora"]])
def test_lora_trains_in_a_compiled_step(register, run, twin, data, tmp_path, flags, monkeypatch):
    from mlx_moeflux.models.layers import DecoderLayer

    monkeypatch.setattr(DecoderLayer, "__call__", DecoderLayer.__call__)
    register(expert_memory="100%")
    losses = train(run, twin, data, tmp_path / "adapters", *flags, iters=4)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.slow
def test_adapters_load_are_tested_and_fused(register, run, twin, data, tmp_path, not_compiled):
    from mlx_lm.tuner.utils import load_adapters

    register(expert_memory="100%")
    adapters, fused = tmp_path / "adapters", tmp_path / "fused"
    train(run, twin, data, adapters)
    tokens = mx.array([[2, 5, 9, 14, 33, 41, 7]])
    with load_model(twin) as plain:
        before = plain(tokens)
        load_adapters(plain, str(adapters))
        plain.eval()
        expected = plain(tokens)
        # As mlx-lm counts: an end token, and one of padding, 0, are predicted too.
        tokenizer = load_tokenizer(twin)
        rows = [[*tokenizer.encode(text), tokenizer.eos_token_id, 0] for text in ASCII]
        batch = mx.array(rows)
        loss = nn.losses.cross_entropy(plain(batch[:, :-1]), batch[:, 1:], reduction="mean").item()
        mx.eval(before, expected)
    assert mx.abs(expected - before).max() > 0.05
    register(expert_memory="50%")
    printed = run("lora", "--model", twin, "--data", data, "--adapter-path", adapters, "--test")
    assert float(re.search(r"Test loss (\d+\.\d+)", printed)[1]) == pytest.approx(loss, abs=2e-3)
    with pytest.raises(UnsupportedError, match=r"streamed experts.*expert_memory='100%'"):
        run("fuse", "--model", twin, "--adapter-path", adapters, "--save-path", fused)
    assert not fused.exists()
    register(expert_memory="100%")
    run("fuse", "--model", twin, "--adapter-path", adapters, "--save-path", fused)
    with load_model(fused, expert_memory="50%") as model:
        assert mx.allclose(model(tokens), expected, atol=1e-4)


@pytest.mark.slow
def test_mlx_lm_itself_loads_a_fused_model(register, run, data, tmp_path, not_compiled):
    register(expert_memory="100%")
    adapters, fused = tmp_path / "adapters", tmp_path / "fused"
    train(run, BUNDLED_MODEL, data, adapters)
    run("fuse", "--model", BUNDLED_MODEL, "--adapter-path", adapters, "--save-path", fused)
    tokens = mx.array([[2, 5, 9, 14, 33, 41, 7]])
    stock, _ = mlx_lm_plugin._stock["load_model"](fused)
    stock.set_dtype(mx.float32)
    with load_model(fused, expert_memory="25%") as model, load_model(BUNDLED_MODEL) as base:
        assert mx.allclose(model(tokens), stock(tokens), atol=1e-3)
        assert not mx.allclose(model(tokens), base(tokens), atol=1e-1)


def test_other_models_are_saved_by_mlx_lm(register, tmp_path):
    from mlx_lm import utils

    register(expert_memory="50%")
    register(expert_memory="25%")
    utils.save_model(tmp_path, nn.Linear(3, 2))
    assert mx.load(str(tmp_path / "model.safetensors"))["weight"].shape == (2, 3)


class Request(types.SimpleNamespace):
    def __init__(self, *args):
        super().__init__(args=args)


@pytest.fixture
def evaluation(monkeypatch):
    """mlx_lm.evaluate without lm-evaluation-harness: its class needs a base and a decorator."""
    names = ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.api.registry")
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["lm_eval.api.model"].LM = type("LM", (), {})
    sys.modules["lm_eval.api.registry"].register_model = lambda name: lambda kind: kind
    monkeypatch.delitem(sys.modules, "mlx_lm.evaluate", raising=False)
    monkeypatch.delattr(mlx_lm, "evaluate", raising=False)
    yield importlib.import_module("mlx_lm.evaluate")
    del sys.modules["mlx_lm.evaluate"], mlx_lm.evaluate


def log_probability(model, ids, first):
    """Return the sum over ids[first:], each after all ids before it."""
    logits = model(mx.array([ids[:-1]]))[0].astype(mx.float32)
    each = mx.take_along_axis(nn.log_softmax(logits), mx.array(ids[1:])[:, None], axis=-1)
    return each[first - 1 :].sum().item()


@pytest.mark.parametrize("memory", [pytest.param("100%", marks=pytest.mark.slow), "25%"])
def test_evaluate(two_bundled_layers, register, evaluation, tokenizer, continuation, memory):
    register(expert_memory=memory)
    harness = evaluation.MLXLM(str(two_bundled_layers), batch_size=2, max_tokens=COUNT)
    pairs = [("import", " os"), ("import", " sys"), ("return", " self")]
    texts = ["def f(self):", "import os"]
    with load_model(two_bundled_layers) as model:
        expected = [
            log_probability(model, tokenizer.encode(a + b), len(tokenizer.encode(a)))
            for a, b in pairs
        ]
        rolling = [log_probability(model, tokenizer.encode(text), 1) for text in texts]
    scores = harness.loglikelihood([Request(*pair) for pair in pairs])
    np.testing.assert_allclose([score for score, _ in scores], expected, rtol=1e-4)
    best = [
        continuation(a, len(tokenizer.encode(a + b)) - len(tokenizer.encode(a))) for a, b in pairs
    ]
    given = [tokenizer.encode(a + b)[len(tokenizer.encode(a)) :] for a, b in pairs]
    assert [greedily for _, greedily in scores] == [
        a == b for a, b in zip(best, given, strict=True)
    ]
    found = harness.loglikelihood_rolling([Request(text) for text in texts])
    np.testing.assert_allclose(found, rolling, rtol=1e-4)
    replies = harness.generate_until([Request(text, {"until": ["\0"]}) for text in texts])
    assert replies == [tokenizer.decode(continuation(text, COUNT)) for text in texts]
    harness._model.close()


@pytest.fixture(scope="module")
def in_floats(two_bundled_layers, tmp_path_factory):
    return convert(two_bundled_layers, tmp_path_factory.mktemp("plain") / "m", dequantize=True)


@pytest.mark.parametrize("mode", [(), ("--q-mode", "mxfp4"), ("--q-bits", "8")])
def test_a_conversion_quantises_experts_too(register, run, in_floats, tmp_path, mode):
    register(expert_memory="100%")
    run("convert", "--hf-path", in_floats, "--mlx-path", tmp_path / "out", "-q", *mode)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    with load_model(tmp_path / "out") as model:
        for block in model.moe_blocks().values():
            specs = {block.switch_mlp[p].spec for p in ("gate_proj", "up_proj", "down_proj")}
            (spec,) = specs
            assert (spec.bits, spec.group_size) == (config["bits"], config["group_size"])
        assert mx.isfinite(model(mx.array([[1, 2, 3]]))).all()
    own, _ = mlx_lm_plugin._stock["load_model"](tmp_path / "out")
    assert mx.isfinite(own(mx.array([[1, 2, 3]]))).all()


@pytest.mark.parametrize("memory", ["50%", "100%"])
def test_a_conversion_to_floats_is_refused_with_the_command_for_it(register, run, tmp_path, memory):
    """mlx-lm's would leave experts quantised in a model whose config.json does not say so."""
    register(expert_memory=memory)
    register(expert_memory=memory)
    out = tmp_path / "out"
    with pytest.raises(UnsupportedError, match="mlx_moeflux convert -d --layout safetensors"):
        run("convert", "--hf-path", BUNDLED_MODEL, "--mlx-path", out, "-d")
    assert not out.exists()
    other = nn.Sequential(nn.QuantizedLinear(64, 3))
    floats = importlib.import_module("mlx_lm.convert").dequantize_model(other)
    assert floats.layers[0].weight.shape == (3, 64)


def test_a_conversion_of_streamed_experts_is_refused(register, run, in_floats, tmp_path):
    register(expert_memory="50%")
    with pytest.raises(UnsupportedError, match="streamed experts are no parameters"):
        run("convert", "--hf-path", in_floats, "--mlx-path", tmp_path / "out", "-q")
