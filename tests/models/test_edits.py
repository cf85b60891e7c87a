"""Models that were edited after a traced step. Oracle: the same edit made before the first step of
a model that traces nothing and has no concatenated projections."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_moeflux.errors import InputError, ShapeError
from mlx_moeflux.generation.batch import BatchGenerator
from mlx_moeflux.loading import load_model
from mlx_moeflux.models import modules, qwen3_5_moe
from mlx_moeflux.models.layers import DecoderLayer
from mlx_moeflux.models.modules import Linear, Module, RMSNorm
from mlx_moeflux.models.moe import SharedExpertMoeBlock

PROMPT, STEPS = [5, 6, 7], [9, 8, 11]


def loaded(directory, memory="100%", *, traced=True):
    model = load_model(directory, expert_memory=memory, fuse=traced, dtype=mx.float32)
    model.compile_steps = traced
    return model


def logits_of(model, edit: Callable[[Any], object] | None = None) -> mx.array:
    """Logits of a prompt and of steps; `edit` before the last of them."""
    cache = model.make_cache()
    found = [model(mx.array([PROMPT]), cache)]
    for i, token in enumerate(STEPS):
        if edit is not None and i == len(STEPS) - 1:
            edit(model)
        found.append(model(mx.array([[token]]), cache))
    y = mx.concatenate(found, axis=1)
    mx.eval(y)
    return y


def close(a: mx.array, b: mx.array) -> bool:
    return float(mx.abs(a - b).max()) <= 2e-5 * float(mx.abs(b).max())


def traces_of(model) -> list[Any]:
    return [*model.steps.whole._compiled.values(), *model.steps.segments._plans.values()]


# ---- Edits


class Scaled(nn.Module):
    """Calls a module and multiplies what it adds to its first argument."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.factor = inner, 1.5

    def __call__(self, x, *args, **kwargs):
        return x + self.factor * (self.inner(x, *args, **kwargs) - x)


class Halved(nn.Module):
    """A norm that halves what RMS normalises."""

    def __call__(self, x):
        return 0.5 * mx.fast.rms_norm(x, None, 1e-6)


class Doubled(SharedExpertMoeBlock):
    def __call__(self, x, norm, mask=None):
        return x + 2 * (super().__call__(x, norm, mask) - x)


class Reversed(SharedExpertMoeBlock):
    def route(self, logits):
        return super().route(-logits)


class Louder(DecoderLayer):
    def __call__(self, x, cache, mask=None, *, chunk):
        return 1.25 * super().__call__(x, cache, mask, chunk=chunk)


def wrap_layer(model):
    model.layers[1] = Scaled(model.layers[1])


def wrap_with_a_function(model):
    layer = model.layers[0]
    model.layers[0] = lambda x, cache, mask=None, *, chunk: 0.5 * layer(x, cache, mask, chunk=chunk)


def wrap_block(model):
    model.layers[0].mlp = Scaled(model.layers[0].mlp)


def wrap_mixer(model):
    model.layers[0].linear_attn = Scaled(model.layers[0].linear_attn)


def scale(*names: str, by: float = 1.5):
    def edit(model):
        for name in names:
            path, _, leaf = name.rpartition(".")
            module = model
            for part in path.split("."):
                module = module[int(part)] if part.isdigit() else getattr(module, part)
            setattr(module, leaf, getattr(module, leaf) * by)

    return edit


def in_place(model):
    model.layers[0].input_layernorm.weight *= 1.5
    model.layers[0].mlp.gate.scales *= -1


def by_key(model):
    model.layers[1].post_attention_layernorm["weight"] = mx.full((model.config.hidden_size,), 0.3)


def by_update(model):
    norm = model.layers[0].input_layernorm
    model.update({"model": {"layers": [{"input_layernorm": {"weight": 2 * norm.weight}}]}})


def by_update_of_a_part(model):
    layer = model.layers[0]
    layer.update({"input_layernorm": {"weight": 2 * layer.input_layernorm.weight}})


def by_load_weights(model):
    name = "model.layers.0.input_layernorm.weight"
    model.load_weights([(name, mx.full((model.config.hidden_size,), 0.7))], strict=False)


def subclass(kind, path):
    def edit(model):
        module = model.layers[0]
        for part in path.split("."):
            module = getattr(module, part) if part else module
        module.__class__ = kind

    return edit


def replace_route(model):
    block = model.layers[0].mlp
    block.route = lambda logits: type(block).route(block, -logits)


def replace_projection(model):
    layer = model.layers[1].self_attn
    width, rows = model.config.hidden_size, layer.q_proj.scales.shape[0]
    made = Linear(width, rows, bias=False)
    made.weight = mx.full((rows, width), 0.01)
    layer.q_proj = made


def bias_a_projection(model):
    layer = model.layers[1].self_attn
    layer.o_proj.bias = mx.full((model.config.hidden_size,), 0.25)


def set_router(model):
    model.router.norm_topk_prob = False


def set_clamp(model):
    model.config = dataclasses.replace(model.config, rms_norm_eps=0.5)
    for layer in model.layers:
        for module in layer.modules():
            if hasattr(module, "config"):
                module.config = model.config


EDITS = {
    "layer, wrapped": wrap_layer,
    "layer, wrapped by a function": wrap_with_a_function,
    "block, wrapped": wrap_block,
    "mixer, wrapped": wrap_mixer,
    "layer's class": subclass(Louder, ""),
    "block's class": subclass(Doubled, "mlp"),
    "a method of a subclass": subclass(Reversed, "mlp"),
    "a method of an object": replace_route,
    "norm": lambda model: setattr(model.layers[0], "input_layernorm", Halved()),
    "second norm": lambda model: setattr(model.layers[1], "post_attention_layernorm", Halved()),
    "last norm": lambda model: setattr(model.model, "norm", Halved()),
    "a norm of MLX": lambda model: setattr(
        model.layers[0], "input_layernorm", nn.LayerNorm(model.config.hidden_size)
    ),
    "weight of a norm": scale("layers.0.input_layernorm.weight"),
    "weight of a head's norm": scale("layers.1.self_attn.q_norm.weight"),
    "weight of the last norm": scale("model.norm.weight"),
    "epsilon": scale("layers.0.input_layernorm.eps", by=1e5),
    "scales of a router": scale("layers.0.mlp.gate.scales"),
    "scales of a projection": scale("layers.1.self_attn.k_proj.scales"),
    "biases of a projection": scale("layers.1.self_attn.v_proj.biases"),
    "scales and biases of the head": scale("lm_head.scales", "lm_head.biases"),
    "biases of a delta net's projection": scale("layers.0.linear_attn.in_proj_z.biases"),
    "decay": scale("layers.0.linear_attn.A_log"),
    "convolution": scale("layers.0.linear_attn.conv1d.weight"),
    "scales of an expert's matrix": scale("layers.0.mlp.switch_mlp.gate_proj.scales"),
    "biases of an expert's matrix": scale("layers.0.mlp.switch_mlp.down_proj.biases"),
    "in place": in_place,
    "by key": by_key,
    "update": by_update,
    "update of a part": by_update_of_a_part,
    "load_weights": by_load_weights,
    "another projection": replace_projection,
    "a bias that was not there": bias_a_projection,
    "an attribute of the router": set_router,
    "attributes of the layers": set_clamp,
}
STREAMED = {"layer, wrapped", "block's class", "scales of a router", "in place"}
RESIDENT = STREAMED | {
    *("layer, wrapped by a function", "a method of an object", "epsilon"),
    *("biases of an expert's matrix", "update", "attributes of the layers"),
}


@pytest.fixture(scope="module")
def expected(two_layers):
    """Logits of a model that traces nothing, edited before the last step, and then of all steps."""
    known = {}

    def logits(name):
        if name not in known:
            with loaded(two_layers / "qwen3.5-tiny", traced=False) as model:
                known[name] = logits_of(model, EDITS.get(name)), logits_of(model)
        return known[name]

    return logits


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("name", "memory"),
    [
        pytest.param(name, memory, marks=[pytest.mark.slow] * (name not in default))
        for memory, default in (("100%", RESIDENT), ("50%", STREAMED))
        for name in EDITS
        if memory == "100%" or "expert's" not in name
    ],
)
def test_an_edit_between_two_steps_acts(two_layers, expected, name, memory):
    (right, after), (plain, _) = expected(name), expected("none")
    with loaded(two_layers / "qwen3.5-tiny", memory) as model:
        assert close(logits_of(model), plain)
        traces = traces_of(model)
        assert traces
        assert close(logits_of(model, EDITS[name]), right)
        # Without mx.compile what is kept would see the edit.
        assert all(one is not other for one in traces for other in traces_of(model))
        assert close(right[:, :-1], plain[:, :-1])
        assert not close(right[:, -1], plain[:, -1])
        assert close(logits_of(model), after)


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["100%", "50%"])
def test_edits_act_on_compiled_steps(two_layers, expected, memory):
    plain, _ = expected("none")
    for name, edit in EDITS.items():
        if memory == "50%" and "expert's" in name:
            continue
        with loaded(two_layers / "qwen3.5-tiny", memory) as model:
            assert close(logits_of(model), plain), name
            assert close(logits_of(model, edit), expected(name)[0]), name
            assert close(logits_of(model), expected(name)[1]), name


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("traced", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_edits_of_latent_attention_act(two_layers, traced):
    edits = [
        scale("layers.0.self_attn.kv_a_layernorm.weight"),
        scale("layers.1.self_attn.kv_b_proj.scales", "layers.1.self_attn.kv_b_proj.biases", by=-1),
        scale("layers.1.self_attn.kv_b_proj.biases"),
        scale("layers.1.mlp.gate.e_score_correction_bias", by=-3),
        lambda model: setattr(model.layers[0].self_attn, "scale", 0.0),
        lambda model: setattr(model.layers[1], "mlp", Scaled(model.layers[1].mlp)),
        lambda model: setattr(model.router, "scale", 0.25),
    ]
    directory = two_layers / "deepseek-tiny"
    with (
        loaded(directory, traced=traced) as model,
        load_model(directory, dtype=mx.float32, kernels="reference") as other,
    ):
        before = logits_of(model)
        for i, edit in enumerate(edits):
            edit(other)
            edit(model)
            right = logits_of(other)
            assert close(logits_of(model), right), i
            assert not close(right, before), i
            before = right


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("memory", ["100%", "50%"])
def test_code_that_is_not_the_packages_runs_at_every_step(two_layers, memory):
    class Counted(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.calls, self.largest = inner, 0, []

        def __call__(self, *args, **kwargs):
            y = self.inner(*args, **kwargs)
            self.calls += 1
            self.largest.append(y.max().item())  # needs values, which a trace has not got
            return y

    class Declared(Counted):
        traceable = True

        def __call__(self, *args, **kwargs):
            self.calls += 1
            return self.inner(*args, **kwargs)

    with loaded(two_layers / "qwen3.5-tiny", memory) as model:
        plain = logits_of(model)
        inner, model.layers[0] = model.layers[0], Counted(model.layers[0])
        assert close(logits_of(model), plain)
        assert model.layers[0].calls == len(model.layers[0].largest) == 1 + len(STEPS)
        assert not traces_of(model)
        model.layers[0] = inner
        assert close(logits_of(model), plain)
        assert traces_of(model)
        model.layers[0] = Declared(inner)
        assert close(logits_of(model), plain)
        assert traces_of(model) or memory != "100%"


@pytest.mark.usefixtures("uncompiled")
def test_a_trace_outlives_other_models_and_what_is_no_edit(two_layers):
    with loaded(two_layers / "qwen3.5-tiny") as model:
        plain, traces = logits_of(model), traces_of(model)
        model.prefill_chunk = model.prefill_chunk
        model.layers[0].input_layernorm.eps = model.layers[0].input_layernorm.eps
        loaded(two_layers / "deepseek-tiny").close()
        assert close(logits_of(model), plain)
        assert traces_of(model) == traces


def test_prompts_of_a_batch_pass_through_a_wrapped_layer(two_layers):
    prompts = [[5, 6, 7], [8, 9, 10, 11]]

    def replies(model, together):
        options = {"max_tokens": 3, "sampler": lambda y: mx.argmax(y, axis=-1)}
        with BatchGenerator(model, prefill_batch_size=2 if together else 1, **options) as batch:
            uids, found = batch.insert(prompts), {}
            while new := batch.next():
                for reply in new:
                    found.setdefault(reply.uid, []).append(reply.logprobs)
        return [mx.stack(found[uid]) for uid in uids]

    for edit in (EDITS["layer, wrapped"], EDITS["layer's class"], EDITS["block's class"]):
        with loaded(two_layers / "qwen3.5-tiny", traced=False) as model:
            plain = replies(model, together=True)
            edit(model)
            pairs = list(zip(replies(model, True), replies(model, False), plain, strict=True))
            assert all(close(a, b) and not close(a, c) for a, b, c in pairs)


@pytest.mark.usefixtures("uncompiled")
def test_a_method_that_was_replaced_in_the_class_acts_and_can_be_put_back(two_layers, monkeypatch):
    with loaded(two_layers / "qwen3.5-tiny") as model:
        plain = logits_of(model)
        combine = SharedExpertMoeBlock.combine
        monkeypatch.setattr(
            SharedExpertMoeBlock,
            "combine",
            lambda self, x, experts, shared: combine(self, x, 0 * experts, shared),
        )
        without = logits_of(model)
        assert not model.steps.traceable
        assert not close(without, plain)
        monkeypatch.undo()
        assert close(logits_of(model), plain)
        assert model.steps.traceable


@pytest.mark.parametrize("family", ["qwen3.5-tiny", "deepseek-tiny"])
def test_every_module_counts_edits(two_layers, family):
    with loaded(two_layers / family) as model:
        assert all(isinstance(module, Module) for module in model.modules())
    for file in Path(modules.__file__).parent.glob("*.py"):
        made = re.findall(r"nn\.(?:Linear|RMSNorm|Embedding)\(", file.read_text())
        assert not made, file


# ---- What cannot act


class Other(nn.Module):
    """Has the parameters that are read, and a meaning of its own."""

    def __init__(self, *names):
        super().__init__()
        for name in names:
            self[name] = mx.ones((4,))

    def __call__(self, x):
        return x


class OwnNorm(RMSNorm):
    def __call__(self, x):
        return x


class OwnGated(qwen3_5_moe.GatedNorm):
    def __call__(self, x):
        return x


REFUSED = {
    "layers.1.self_attn.q_norm is a OwnNorm, .* wrap layers.1.self_attn instead": (
        lambda m: setattr(m.layers[1].self_attn, "q_norm", OwnNorm(32))
    ),
    "layers.1.self_attn.k_norm is a LayerNorm": (
        lambda m: setattr(m.layers[1].self_attn, "k_norm", nn.LayerNorm(32))
    ),
    "layers.0.linear_attn.norm is a OwnGated": (
        lambda m: setattr(m.layers[0].linear_attn.norm, "__class__", OwnGated)
    ),
    "layers.0.linear_attn.conv1d is a Other": (
        lambda m: setattr(m.layers[0].linear_attn, "conv1d", Other("weight"))
    ),
    "layers.0.mlp.shared_expert is a Other": (
        lambda m: setattr(m.layers[0].mlp, "shared_expert", Other("weight"))
    ),
    "layers.1.mlp.switch_mlp is a Other": (
        lambda m: setattr(m.layers[1].mlp, "switch_mlp", Other("weight"))
    ),
    "layers.0.mlp is the block of layer 1": (
        lambda m: setattr(m.layers[0], "mlp", m.layers[1].mlp)
    ),
    "the model has 1 layers and its config 2": lambda m: m.layers.pop(),
    "never one of a single SharedExpertMoeBlock; wrap": (
        lambda m: setattr(m.layers[0].mlp, "__call__", lambda x: x)
    ),
}


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("traced", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("message", REFUSED)
def test_what_would_be_ignored_is_one_line(two_layers, message, traced):
    with loaded(two_layers / "qwen3.5-tiny", traced=traced) as model:
        logits_of(model)
        for _ in range(2):  # as often as it is tried
            with pytest.raises(InputError, match=message):
                logits_of(model, REFUSED[message])


def test_another_block_has_the_experts_that_were_loaded(two_layers):
    with loaded(two_layers / "qwen3.5-tiny") as model:
        right, old = logits_of(model), model.layers[0].mlp
        new = model.moe_block(0, SharedExpertMoeBlock, shared_intermediate_size=64)
        for name in ("gate", "shared_expert", "shared_expert_gate"):
            new[name] = old[name]
        model.layers[0].mlp = new
        with pytest.raises(InputError, match="has other experts than were loaded"):
            logits_of(model)
        new.switch_mlp = old.switch_mlp
        new.eval()
        assert close(logits_of(model), right)


def test_a_norm_of_another_shape_is_one_line(two_layers):
    class Wide(nn.Module):
        def __call__(self, x):
            return mx.concatenate([x, x], axis=-1)

    with loaded(two_layers / "qwen3.5-tiny", traced=False) as model:
        model.layers[0].input_layernorm = Wide()
        with pytest.raises(ShapeError, match=r"norm Wide returned .*256\] for .*128\]; expected"):
            logits_of(model)
