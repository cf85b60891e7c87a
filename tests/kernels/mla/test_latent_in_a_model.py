"""Oracle: the same model with references on the CPU in float32; the fused implementations run in
the emulator, or with all the others on a GPU."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_moeflux.cache import LatentCache
from mlx_moeflux.cache.traced import ChosenPositions, Step
from mlx_moeflux.conversion.synthesize import synthesize
from mlx_moeflux.kernels.registry import choose_kernels
from mlx_moeflux.loading import load_model
from mlx_moeflux.models.deepseek_v3 import Config, Model
from mlx_moeflux.models.mla import LatentAttention
from tests.kernels.harness import emulated, error, launched
from tests.models.twins import GOLDEN

FUSED = "reference," + ",".join(
    f"{name}=fused" for name in ("latent_attention", "latent_prepare", "head_product")
)
# Matrices that are not quantised: MLX compiles its quantised products on a GPU with headers that
# may be missing, and what these add is tested operation by operation.
TWIN = GOLDEN / "deepseek_v3_yarn40"


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    return synthesize("deepseek-tiny", tmp_path_factory.mktemp("model") / "deepseek")


def logits(directory, kernels, *, padding, traced=False, **options):
    """A prompt of 9 tokens, two single ones, then three, in a batch of two."""
    tokens = mx.array([[7, 3, 9, 4, 5, 6, 2, 11, 8, 1, 2, 12, 13, 14], list(range(40, 54))])
    with load_model(directory, kernels=kernels, **options) as model:
        model.compile_steps = traced
        cache = model.make_cache()
        if padding:
            for entry in cache:
                entry.prepare(left_padding=[0, 3])
        steps = [model(tokens[:, a:b], cache) for a, b in ((0, 9), (9, 10), (10, 11), (11, 14))]
        y = mx.concatenate(steps, axis=1)
        mx.eval(y)
    # Padding columns mean nothing.
    return [y[0], y[1, 3 if padding else 0 :]]


def on_the_cpu(directory, **options):
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        return logits(directory, "reference", dtype=mx.float32, **options)
    finally:
        mx.set_default_device(device)


@pytest.mark.parametrize("padding", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("absorbed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_model_says_the_same_with_fused_forms(
    device_of_a_model, quantised, monkeypatch, padding, absorbed
):
    directory = TWIN if device_of_a_model == "gpu" else quantised
    reference = on_the_cpu(directory, padding=padding)
    kernels = FUSED
    if not absorbed:
        monkeypatch.setattr(LatentAttention, "absorbs", lambda self, T: T == 1)
        kernels += ",latent_prefill=expanded"
    # The emulator cannot be traced.
    options = {"traced": absorbed and device_of_a_model == "gpu", "padding": padding}
    fused = logits(directory, None if device_of_a_model == "gpu" else kernels, **options)
    scale = max(float(mx.abs(r).max()) for r in reference)
    # bfloat16 on a GPU, float32 elsewhere.
    limit = scale * (0.05 if device_of_a_model == "gpu" else 1e-4)
    assert max(map(error, fused, reference)) <= limit


STEP = {
    "model_type": "deepseek_v3", "vocab_size": 32, "hidden_size": 96, "intermediate_size": 64,
    "moe_intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 6,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6, "q_lora_rank": None,
    "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 64,
    "max_position_embeddings": 512, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip


@pytest.mark.parametrize("padding", [None, pytest.param([3, 0], marks=pytest.mark.slow)])
@pytest.mark.parametrize("split", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("low", [None, pytest.param(1536, marks=pytest.mark.slow)])
def test_a_step_of_one_token_is_fewer_launches_of_the_same_bits(padding, split, low):
    """What is traced, untraced; against the operations one by one. low: the width of what
    queries are made of."""
    mx.random.seed(3)
    config = Config.from_dict(STEP | {"q_lora_rank": low}, file="config.json")
    model = Model(config, kernels=choose_kernels("auto"))
    attention, norm = model.layers[0].self_attn, model.layers[0].input_layernorm
    if split:
        attention.use_split_heads()
    B = 1 if low else 2
    x, arrays = mx.random.normal((B, 1, 96)), [mx.random.normal((B, 1, 256, n)) for n in (128, 16)]
    tails = [array[:, :, 128:192] for array in arrays]
    counts = [mx.array([n], dtype=mx.int32) for n in (150, 151)]
    start = None if padding is None else mx.array(padding[:B], dtype=mx.int32)
    results, names = [], []
    for implementations in ("auto", "auto,append_row=fused,latent_attention=fused"):
        entry = LatentCache.traced(Step(counts, start, ChosenPositions()), (*arrays, *tails))
        with emulated(name="cuda"), launched() as own:
            attention._kernels = choose_kernels(implementations)
            results.append([attention(x, entry, norm), *entry.ends[-1]])
            mx.eval(results[-1])
        names += own
    # Matrices of kv_b_proj are read transposed, which the one launch does not do.
    assert names.count("latent_step") == split
    assert names.count("latent_prepare") == names.count("append_row") == 2 - split
    assert names.count("attend_values") == names.count("attend_combine") == 1
    for once, composed in zip(*results, strict=True):
        assert mx.array_equal(once, composed).item()
