"""What kernels ask of Apple's GPUs at the sizes of published models: threads, memory, buffers.

Models of two layers, one of each kind, have weights that nobody evaluates; their launches are
recorded and never run, so that no GPU is needed and no memory.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map_with_path

from mlx_moeflux.cache.kv import TAIL_ROWS
from mlx_moeflux.cache.paged import BLOCK_TOKENS
from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.errors import ShapeError
from mlx_moeflux.experts.compute import SCRATCH_BYTES
from mlx_moeflux.experts.resident import ResidentStore
from mlx_moeflux.kernels.attention.choose_blocks import choose_blocks_fused
from mlx_moeflux.kernels.attention.chosen_sdpa import chosen_sdpa_fused
from mlx_moeflux.kernels.attention.paged_attention import paged_sdpa_fused
from mlx_moeflux.kernels.linear.matvec import project_fused
from mlx_moeflux.kernels.linear.weight import Weight
from mlx_moeflux.kernels.mla.head_product import HeadMatrices
from mlx_moeflux.kernels.mla.latent_values import attend_values, takes_values
from mlx_moeflux.kernels.moe.expert_ffn import ExpertBank, ProjectionBank
from mlx_moeflux.kernels.moe.expert_pairs import expert_mix_pairs
from mlx_moeflux.kernels.moe.moe_combine import moe_combine_fused
from mlx_moeflux.kernels.runtime import launcher, views
from mlx_moeflux.models import model_class
from mlx_moeflux.models.layers import stack
from mlx_moeflux.models.packed_parameters import unpacked
from mlx_moeflux.models.shapes import SHAPES
from tests.kernels.harness import scratch_kernel
from tests.kernels.metal.recording import Launch, recorded, threadgroup_bytes, value

PUBLISHED = Path(__file__).parents[2] / "published"
# Metal: bytes of threadgroup memory, buffers of a kernel, and what counts threads.
MOST_MEMORY, MOST_BUFFERS, MOST_IN_GRID = 32 * 1024, 31, 2**32 - 1
# What a launch makes lies beside the model; a matrix of all a layer's experts is a buffer, of
# which a Mac of 16 GB takes more than half its memory.
MOST_MADE, MOST_READ = 1 << 30, 4 << 30
F32, BF16 = mx.float32, mx.bfloat16
BITS, ROUTER_BITS, GROUP = 4, 8, 64
PROMPTS, BATCHES = (64, 300, 2048), (4, 8, 16)


def in_two_layers(config):
    """The same model with a layer of each kind, and without tables on disk."""
    told = {"num_hidden_layers": 2, "layer_types": (), "full_attention_interval": 2}
    told |= {"first_k_dense_replace": 1, "mlp_only_layers": (), "ple_layer_ids": ()}
    return replace(config, **{name: n for name, n in told.items() if hasattr(config, name)})


def published() -> dict[str, tuple[type, object]]:
    """Name -> a model's class and config, of those that differ in a size."""
    found, seen = {}, set()
    files = sorted(PUBLISHED.glob("*.json"))
    configs = [(n, model_class(c.published()["model_type"]), c) for n, c in SHAPES.items()]
    for file in files:
        raw = json.loads(file.read_text())["config"]
        kind = model_class(raw["model_type"])
        configs.append((file.stem, kind, kind.Config.from_dict(raw, file=file)))
    for name, kind, config in configs:
        two = in_two_layers(config)
        sizes = {k: v for k, v in asdict(two).items() if isinstance(v, int)}
        sizes.pop("max_position_embeddings")
        key = kind.MODEL_TYPE, *sorted(sizes.items())
        if "tiny" not in name and key not in seen:
            seen.add(key)
            found[name] = kind, two
    return found


MODELS = published()


def zeros_quantised(*shape: int, dtype: mx.Dtype, bits: int = BITS) -> tuple[mx.array, ...]:
    """Weight, scales and biases of a matrix, as nobody has asked for them yet."""
    spec, (*rows, width) = QuantSpec(bits, GROUP), shape
    groups = mx.zeros((*rows, spec.groups(width)), dtype)
    return mx.zeros((*rows, spec.words(width)), mx.uint32), groups, groups


def bank_of(config, dtype: mx.Dtype) -> ExpertBank:
    E, C, F = config.num_experts, config.hidden_size, config.moe_intermediate_size
    sizes = (E, F, C), (E, F, C), (E, C, F)
    spec = QuantSpec(BITS, GROUP)
    parts = (ProjectionBank(*zeros_quantised(*s, dtype=dtype), spec) for s in sizes)
    return ExpertBank(*parts, fixed=True)


def model_of(name: str, dtype: mx.Dtype, *, apart: bool):
    """A published model, quantised as published.

    apart: Matrices that read the same input do not lie one behind another, and those of heads are
        split as mlx-lm has them.
    """
    kind, config = MODELS[name]
    model = kind(config)
    if apart:
        model.fit_names(f"model.layers.{i}.self_attn.embed_q.weight" for i in range(2))

    def spec(path, module):
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % GROUP:
            return False
        routes = path.endswith(("mlp.gate", "shared_expert_gate"))
        return {"group_size": GROUP, "bits": ROUTER_BITS if routes else BITS}

    def blank(path, array):
        if not mx.issubdtype(array.dtype, mx.floating):
            return mx.zeros(array.shape, array.dtype)
        return mx.zeros(array.shape, F32 if model.keeps_float32(path) else dtype)

    nn.quantize(model, class_predicate=spec)
    model.update(tree_map_with_path(blank, model.parameters()))
    model.eval()
    for layer in () if apart else model.layers:
        for module in layer.children().values():
            for linears in module.stacks():
                stack(*linears)
    banks = {layer: bank_of(config, dtype) for layer in model.moe_blocks()}
    views.keep(unpacked(model))
    views.keep(array for bank in banks.values() for array in bank.flat)
    store = ResidentStore(
        banks.__getitem__, layers=banks, num_experts=config.num_experts,
        mix=model.kernels.expert_mix, scratch_bytes=SCRATCH_BYTES["gpu"],
    )  # fmt: skip
    model.set_store(store)
    model.compile_steps = True
    return model


def walk(model, prompts=PROMPTS, batches=BATCHES) -> None:
    """Prompts with a step behind each, and batches of steps."""
    for B, T in (*((1, T) for T in prompts), *((B, 4) for B in batches)):
        cache = model.make_cache()
        model(mx.zeros((B, T), mx.uint32), cache, last_only=True)
        model(mx.zeros((B, 1), mx.uint32), cache)


def faults(launch: Launch) -> list[str]:
    """What Metal would refuse in a launch."""
    numbers = {k: n for k, n in launch.template.items() if isinstance(n, int)}
    told = {
        "threads": launch.threads > launcher.MOST_THREADS["metal"],
        "threadgroup memory": launch.memory > MOST_MEMORY,
        "buffers": launch.buffers > MOST_BUFFERS,
        "outputs": max(launch.outputs.values()) > MOST_MADE,
        "inputs": max(launch.inputs.values()) > MOST_READ,
        "grid": max(launch.grid) > MOST_IN_GRID,
        "template": min(numbers.values(), default=0) < 0,
    }
    return [f"{launch.name} {what}: {launch}" for what, wrong in told.items() if wrong]


WAYS = {"bf16-together": (BF16, False), "f32-apart": (F32, True)}
OTHERS = {"bf16-apart": (BF16, True), "f32-together": (F32, False)}
# By default a model of one family is met in both ways, one of each other family in one of them in
# turns.
BOTH = ("qwen3.5-35b-a3b",)
FIRST = {kind: name for name, (kind, _) in reversed(MODELS.items())}


def usual(name: str, way: str) -> bool:
    first = name == FIRST[MODELS[name][0]]
    turn = list(WAYS)[list(MODELS).index(name) % 2]
    return (first and way == turn) or (way in WAYS and name in BOTH)


@pytest.mark.parametrize(
    ("name", "dtype", "apart"),
    [
        pytest.param(
            name, *values, id=f"{name}-{way}", marks=[pytest.mark.slow] * (not usual(name, way))
        )
        for name in MODELS
        for way, values in (WAYS | OTHERS).items()
    ],
)
def test_a_model_stays_within_the_limits(name, dtype, apart):
    with recorded(every_implementation=True) as recorder:
        walk(model_of(name, dtype, apart=apart))
    assert recorder.launches
    assert not recorder.refused
    wrong = [fault for launch in recorder.launches for fault in faults(launch)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("name", [n for n in MODELS if hasattr(MODELS[n][1], "head_dim")])
def test_attention_out_of_a_pool_stays_within_the_limits(name, dtype):
    """By itself: what takes sequences into a pool evaluates their states."""
    config, pages, scale = MODELS[name][1], 64, 0.1
    Hq, Hkv, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    with recorded() as recorder:
        for B, gated in product((1, *BATCHES, 256), (False, True)):
            pool = mx.zeros((pages * BLOCK_TOKENS, Hkv, D), dtype)
            tail = mx.zeros((B, Hkv, TAIL_ROWS, D), dtype)
            paged_sdpa_fused(
                mx.zeros((B, Hq, 1, D), dtype), pool, pool, tail=(tail, tail), scale=scale,
                table=mx.zeros((B, pages), mx.int32), page=BLOCK_TOKENS,
                length=mx.zeros(B, mx.int32),
                gate=mx.zeros((B, 1, Hq, 2 * D), dtype) if gated else None,
            )  # fmt: skip
    assert {"attend_shared", "attend_shared_parts"} <= recorder.names()
    wrong = [fault for launch in recorder.launches for fault in faults(launch)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
def test_chosen_blocks_stay_within_the_limits(dtype):
    """By themselves: a walk ends where tokens begin to see less than everything."""
    config = MODELS["qwen3.8-flash-next"][1]
    Hq, Hkv, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    H, Di, most = config.indexer_n_heads, config.indexer_head_dim, config.block_topk
    ratio, columns = config.indexer_compress_ratio, 1 << 16
    with recorded() as recorder:
        for B, T in product((1, *BATCHES), (1, 2, 16)):
            keys, count = mx.zeros((B, 1, columns // ratio, Di), dtype), mx.zeros(B, mx.int32)
            tail = {"tail": keys[:, :, : TAIL_ROWS // ratio], "before": count}
            complete = mx.zeros((B, T), mx.int32)
            q = mx.zeros((B, H, T, Di), dtype)
            chosen = choose_blocks_fused(q, keys, complete, k=most, **tail)
            k, end = (mx.zeros((B, Hkv, n, D), dtype) for n in (columns, TAIL_ROWS))
            options = {"ratio": ratio, "scale": 0.1, "length": mx.zeros(1, mx.int32)}
            for tails, gated in product((None, (end, end)), (False, True)):
                gate = mx.zeros((B, 1, Hq, 2 * D), dtype) if gated else None
                chosen_sdpa_fused(
                    mx.zeros((B, Hq, 1, D), dtype), k, k, chosen[:, 0], **options, tail=tails,
                    gate=gate,
                )  # fmt: skip
    assert {"block_scores", "best_blocks", "attend_shared_parts"} <= recorder.names()
    wrong = [fault for launch in recorder.launches for fault in faults(launch)]
    assert not wrong, "\n".join(wrong)


def test_every_operation_of_a_step_is_met():
    """A walk would say nothing of kernels that it never launched."""
    met = set()
    for name, apart in product(("qwen3.5-35b-a3b", "deepseek-v3"), (False, True)):
        with recorded(every_implementation=True) as recorder:
            walk(model_of(name, BF16, apart=apart), prompts=(2048,), batches=(4,))
        met |= recorder.names()
    assert met >= {
        *("add_shared", "append_row", "attend_latents", "attend_shared_parts", "attend_values"),
        *("delta_step", "expert_inner", "expert_inner_wide", "expert_outer", "expert_outer_wide"),
        *("expert_rows_inner", "expert_tiles_gated", "head_vecmat", "latent_step", "latent_turn"),
        *("moe_combine", "moe_step_finish", "norm_rope", "project_1", "project_rows_1"),
    }


# ---- Kernels that had more threads than Apple's GPUs allow


def project_wide(width: int):
    x, out = mx.zeros((1, width), BF16), 7168
    weight = Weight(*zeros_quantised(out, width, dtype=BF16), QuantSpec(BITS, GROUP))
    project_fused(x, [weight], residual=mx.zeros((1, out), BF16))


def outer_wide():
    config = MODELS["deepseek-v3"][1]
    N, K, C = 1, config.num_experts_per_tok, config.hidden_size
    slots, weights = mx.zeros((N, K), mx.uint32), mx.zeros((N, K))
    expert_mix_pairs(mx.zeros((N, C), BF16), slots, weights, bank_of(config, BF16))


def heads(out: int, width: int) -> HeadMatrices:
    """Of DeepSeek-V3."""
    return HeadMatrices(
        *zeros_quantised(128, out, width, dtype=BF16), QuantSpec(BITS, GROUP), 0, out
    )


def values():
    matrices = heads(128, 512)
    assert takes_values(matrices, 512)
    attend_values(mx.zeros((1, 33, 128, 512)), mx.zeros((1, 33, 128, 2)), matrices, BF16)


def combine():
    moe_combine_fused(mx.zeros((1, 7168), BF16), mx.zeros((1, 7168)))


# A call, and its kernels' threads on Metal and on CUDA.
HAD_MORE = {
    "16384 columns": (functools.partial(project_wide, 16384), [256], [512]),
    "18432 columns": (functools.partial(project_wide, 18432), [288], [576]),
    "outer": (outer_wide, [224, 256], [224, 512]),
    "values": (values, [256], [512]),
    "combine": (combine, [384], [512]),
}


@pytest.mark.parametrize("call", HAD_MORE)
def test_threads_by_back_end(call):
    call, *expected = HAD_MORE[call]
    for name, threads in zip(("metal", "cuda"), expected, strict=True):
        with recorded(name) as recorder:
            call()
        assert [launch.threads for launch in recorder.launches] == threads


# ---- What finds it out


def test_a_threadgroup_that_is_too_large_is_refused():
    kernel = scratch_kernel(
        "crowd", inputs=("x",), outputs=("y",), body="y[thread_position_in_grid.x] = x[0];"
    )
    launch = {"output_shapes": [(1664,)], "output_dtypes": [F32], "grid": (1664, 1, 1)}
    x = mx.zeros(8)
    for name, most in (("metal", 384), ("cuda", 1024)):
        with recorded(name):
            kernel(x, **launch, threadgroup=(208, 1, 1))
            with pytest.raises(ShapeError, match=f"crowd.* larger than the {most} threads"):
                kernel(x, **launch, threadgroup=(416 if most < 416 else 1664, 1, 1))


def test_threadgroup_memory_is_read_off_the_declarations():
    body = """
        threadgroup float a[K | 1];
        threadgroup T b[LAYOUT == 0 ? N * (D + 8) : 8];
        threadgroup alignas(16) pack<T, 16 / sizeof(T)> c[2 * N];
        const threadgroup float* d;
    """
    template = {"T": BF16, "K": 8, "LAYOUT": 0, "N": 3, "D": 16}
    kernel = scratch_kernel("memory", inputs=(), outputs=("y",), body=body)
    assert threadgroup_bytes(kernel, template) == 48 + 144 + 96
    assert threadgroup_bytes(kernel, template | {"LAYOUT": 1}) == 48 + 16 + 96
    for odd in ("threadgroup float a;", "threadgroup float a[2][3];"):
        kernel = scratch_kernel("odd", inputs=(), outputs=("y",), body=odd)
        with pytest.raises(AssertionError, match="scratch_odd"):
            threadgroup_bytes(kernel, {})
    with pytest.raises(AssertionError, match="what is"):
        value("__import__('os')", {})
