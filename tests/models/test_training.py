"""Training with adapters: gradients through streamed experts are those of resident ones, even if
other experts have been read into their slots; a layer that is computed again gives the same
gradients; an adapter computes what the matrix into which it is fused computes."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from mlx_moeflux.errors import UnsupportedError
from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from tests.models.twins import GOLDEN, relative_error, smallest_memory

tuner = pytest.importorskip("mlx_lm.tuner.utils")
trainer = pytest.importorskip("mlx_lm.tuner.trainer")

RESIDENT = "100%"
# Families, and both ways to compute: experts in float32, which stay in their slots, and in
# bfloat16, of which the CPU computes with copies.
TWINS = [
    *("glm4_moe_plain", "qwen3_moe_window"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("bundled", "text_top3")),
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("deepseek_v3_direct", "gpt_oss_sinks")),
]
STREAMED = {"bundled": "12.5%"}


def directory_of(name):
    return BUNDLED_MODEL if name == "bundled" else GOLDEN / name


def memory_of(name):
    return STREAMED.get(name) or smallest_memory(GOLDEN / name)


def with_adapters(name, memory, keys=None, **options):
    """A model in float32 with adapters on all linear layers, or on `keys`, that change its
    outputs."""
    model = load_model(directory_of(name), expert_memory=memory, dtype=mx.float32, **options)
    model.freeze()
    config = {"rank": 3, "scale": 2.0, "dropout": 0.0} | ({"keys": keys} if keys else {})
    tuner.linear_to_lora_layers(model, len(model.layers), config)
    key, drawn = mx.random.key(7), []
    for path, array in sorted(tree_flatten(model.trainable_parameters())):
        key, this = mx.random.split(key)
        drawn.append((path, mx.random.normal(array.shape, key=this) * 0.05))
    model.update(tree_unflatten(drawn))
    return model


def tokens_of(model, length, rows=2, seed=1):
    return mx.random.randint(0, model.config.vocab_size, (rows, length), key=mx.random.key(seed))


def loss(model, *batches):
    """Return the sum over several batches in one graph, which losses of preferences have too."""
    losses = (
        nn.losses.cross_entropy(model(b[:, :-1]).astype(mx.float32), b[:, 1:], reduction="mean")
        for b in batches
    )
    return sum(losses)


def gradients(model, *batches):
    model.train()
    value, found = nn.value_and_grad(model, loss)(model, *batches)
    found = dict(tree_flatten(found))
    mx.eval(value, found)
    return value.item(), found


def compiled(model):
    """Return what mlx-lm's trainer compiles, without the optimiser."""
    step = nn.value_and_grad(model, loss)
    return mx.compile(lambda batch: step(model, batch), inputs=model.state)


def check_equal(actual, expected, tolerance=2e-5):
    """Each array to `tolerance` of its largest number, and zeros to that of all."""
    assert actual.keys() == expected.keys()
    largest = max(np.abs(np.array(a)).max() for a in expected.values())
    assert largest > 0
    for name, array in expected.items():
        a, b = np.array(actual[name]), np.array(array)
        assert np.isfinite(a).all()
        limit = tolerance * max(np.abs(b).max(), 1e-4 * largest)
        assert np.abs(a - b).max() <= limit, name


@pytest.mark.parametrize("name", TWINS)
def test_gradients_through_streamed_experts_are_those_of_resident_ones(name):
    found = []
    for memory in (RESIDENT, memory_of(name)):
        with with_adapters(name, memory) as model:
            assert model.plan.resident == (memory == RESIDENT)
            batches = [tokens_of(model, 14, seed=seed) for seed in (1, 2)]
            found.append(gradients(model, *batches))
    (value, resident), (streamed_value, streamed) = found
    assert streamed_value == value
    check_equal(streamed, resident)


@pytest.mark.parametrize("memory", [RESIDENT, pytest.param("streamed", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["deepseek_v3_direct", "qwen3_moe_window", "text_top3"])
def test_a_layer_that_is_computed_again_gives_the_same_gradients(name, memory, monkeypatch):
    """mlx-lm's --grad-checkpoint calls each layer a second time, with the same arguments."""
    memory = memory_of(name) if memory == "streamed" else memory
    with with_adapters(name, memory, ["self_attn.o_proj", "linear_attn.out_proj"]) as model:
        tokens = tokens_of(model, 14)
        value, expected = gradients(model, tokens)
        kind = type(model.layers[0])
        monkeypatch.setattr(kind, "__call__", kind.__call__)
        trainer.grad_checkpoint(model.layers[0])
        again, found = gradients(model, tokens)
    assert again == value
    check_equal(found, expected)


def test_a_cache_advances_in_training_too():
    with load_model(GOLDEN / "text_top3") as model:
        tokens = tokens_of(model, 9)
        expected = model(tokens)[:, -3:]
        model.train()
        cache = model.make_cache()
        mx.eval(model(tokens[:, :6], cache=cache))
        assert cache[0].columns == 6
        assert relative_error(model(tokens[:, 6:], cache=cache), expected) < 1e-5


@pytest.mark.slow  # MLX compiles C++ for it
def test_a_compiled_step_takes_prompts_of_several_chunks():
    with with_adapters("qwen3_moe_window", RESIDENT, ["self_attn.q_proj"]) as model:
        tokens = tokens_of(model, 14)
        _, expected = gradients(model, tokens)
        model.prefill_chunk = 4
        _, found = compiled(model)(tokens)
        check_equal(dict(tree_flatten(found)), expected)


@pytest.mark.parametrize("name", ["qwen3_moe_window", "text_top3", "deepseek_v3_direct"])
def test_a_compiled_step_of_a_streamed_model_is_refused(name):
    with load_model(GOLDEN / name, expert_memory=memory_of(name)) as model:
        tokens = tokens_of(model, 9)
        expected = model(tokens)
        with pytest.raises(UnsupportedError, match=r"mx.disable_compile\(\).*memory='100%'"):
            mx.compile(model)(tokens)
        assert mx.array_equal(model(tokens), expected)


# The matrices beside the routed experts and after attention that kernels take as `down` and
# `residual`, and the one that multi-head latent attention splits by heads.
ADAPTED = {
    "text_top3": ["mlp.shared_expert.down_proj", "mlp.shared_expert_gate", "mlp.gate"],
    "bundled": ["mlp.shared_expert.down_proj"],
    "qwen3_next_top3": ["mlp.shared_expert.down_proj", "linear_attn.out_proj"],
    "deepseek_v3_direct": ["mlp.shared_experts.down_proj", "self_attn.kv_b_proj"],
    "glm4_moe_lite_flash": ["mlp.down_proj", "self_attn.kv_b_proj"],
    "glm4_moe_norms": ["mlp.shared_experts.down_proj", "mlp.down_proj"],
    "kimi_k25_wrapped": ["self_attn.kv_b_proj"],
    "qwen3_moe_window": ["mlp.down_proj", "self_attn.o_proj"],
}


@pytest.mark.parametrize("kernels", ["auto", pytest.param("reference", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ADAPTED)
def test_an_adapter_computes_what_its_fused_matrix_does(name, kernels):
    options = {"kernels": kernels, "fuse": kernels == "auto"}  # on GPUs fuse is the default
    with with_adapters(name, memory_of(name), ADAPTED[name], **options) as model:
        tokens = tokens_of(model, 11)
        model.eval()
        whole = model(tokens)
        cache, steps = model.make_cache(), []
        for start, stop in ((0, 9), (9, 10), (10, 11)):
            steps.append(model(tokens[:, start:stop], cache=cache))
        stepwise = mx.concatenate(steps, axis=1)
        adapters = [(p, m) for p, m in model.named_modules() if hasattr(m, "lora_b")]
        assert {p.split(".", 3)[3] for p, _ in adapters} == set(ADAPTED[name])
        mx.eval(whole, stepwise)
        fused = [(path, adapter.fuse(dequantize=True)) for path, adapter in adapters]
        model.update_modules(tree_unflatten(fused))
        model.steps.forget()
        expected = model(tokens)
        assert relative_error(whole, expected) < 1e-5
        assert relative_error(stepwise, expected) < 1e-5
    with load_model(directory_of(name), dtype=mx.float32) as plain:
        assert relative_error(plain(tokens), expected) > 1e-3


def test_a_bias_of_the_matrix_that_attention_splits_is_refused():
    with load_model(GOLDEN / "deepseek_v3_direct") as model:
        linear = model.layers[0].self_attn.kv_b_proj
        linear.bias = mx.ones((linear.weight.shape[0],))
        with pytest.raises(UnsupportedError, match="kv_b_proj takes no bias"):
            model(mx.array([[1, 2]]))


@pytest.mark.parametrize("memory", [RESIDENT, "25%"])
def test_parameters_are_counted_as_mlx_lm_counts_its_own(memory):
    from mlx_lm.utils import get_total_parameters
    from mlx_lm.utils import load_model as load_stock

    stock, _ = load_stock(BUNDLED_MODEL)
    routed = sum(get_total_parameters(layer.mlp.switch_mlp) for layer in stock.layers)
    expected = get_total_parameters(stock) - (0 if memory == RESIDENT else routed)
    with load_model(BUNDLED_MODEL, expert_memory=memory) as model:
        assert get_total_parameters(model) == expected
