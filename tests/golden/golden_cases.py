"""The golden twins: shapes, spellings, what is added to a checkpoint; see make_golden.py."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Case:
    """One twin. `text` are keys of transformers' config of the text, `written` of config.json."""

    family: str
    text: dict
    length: int
    vision: dict | None = None  # keys of the config of images; the text's is inside
    reserved: int = 0  # the last ids of the vocabulary, which are images' and videos'
    stops: int | None = None  # an id that some tokens get
    seed: int = 1
    leniency: float = 1.0  # times the two minima
    gain: float = 0.5  # of matrices; 0.5 keeps transformers in float32 within 1e-6 of float64
    fused: bool = False  # experts.gate_up_proj / down_proj, else one tensor per expert
    dtype: torch.dtype = torch.bfloat16
    float32_parts: tuple[str, ...] = ()  # suffixes kept in float32 in a bfloat16 checkpoint
    shard_bytes: int | None = None
    written: dict = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    old_rope: bool = False  # rope_theta + rope_scaling instead of rope_parameters
    extra: Callable[[dict, torch.Generator], dict] | None = None  # tensors -> more of them
    bias: tuple[float, float] = (0.0, 0.3)  # mean and deviation of a router's bias
    model_type: str | None = None  # written in the end, where transformers knows no such class
    prefix: str = ""  # of all tensors of a wrapper, which gets `wrapper` beside text_config
    wrapper: dict = field(default_factory=dict)


def prediction_layer(tensors: dict, generator: torch.Generator) -> dict:
    """The names of a published multi-token-prediction layer and of rotary buffers."""
    layers = sorted({int(k.split(".")[2]) for k in tensors if k.startswith("model.layers.")})
    last, new = f"model.layers.{layers[-1]}.", f"model.layers.{layers[-1] + 1}."
    shapes = {new + k[len(last) :]: t.shape for k, t in tensors.items() if k.startswith(last)}
    vocabulary, width = tensors["model.embed_tokens.weight"].shape
    shapes |= {f"{new}{n}.weight": (width,) for n in ("enorm", "hnorm", "shared_head.norm")}
    shapes |= {
        f"{new}{n}.weight": (vocabulary, width) for n in ("embed_tokens", "shared_head.head")
    }
    shapes[f"{new}eh_proj.weight"] = (width, 2 * width)
    shapes |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": (8,) for i in layers}
    return {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in shapes.items()
    }


def wrapped_prediction_layer(tensors: dict, generator: torch.Generator) -> dict:
    """The names of a published multi-token-prediction layer, of the last layer's shapes."""
    start = "model.language_model.layers."
    layers = max(int(k[len(start) :].split(".")[0]) for k in tensors if k.startswith(start))
    last, width = f"{start}{layers}.", tensors["model.language_model.norm.weight"].shape[0]
    shapes = {f"mtp.layers.0.{k[len(last) :]}": t.shape for k, t in tensors.items() if last in k}
    shapes["mtp.fc.weight"] = (width, 2 * width)
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        shapes[f"mtp.{norm}.weight"] = (width,)
    return {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in shapes.items()
    }


def yarn(**more) -> dict:
    """Of an original context so short that all pairs differ."""
    keys = {"original_max_position_embeddings": 32, "beta_fast": 4, "beta_slow": 1}
    return keys | {"rope_theta": 1e4} | more


VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 2,
    "num_position_embeddings": 16,
}


def plain_rope(keys: dict) -> dict:
    return {"rope_parameters": {"rope_type": "default"} | keys}


def hybrid(**kwargs) -> dict:
    """Keys of Qwen3.5-MoE's text."""
    names = {
        "V": "vocab_size",
        "C": "hidden_size",
        "L": "num_hidden_layers",
        "E": "num_experts",
        "K": "num_experts_per_tok",
        "F": "moe_intermediate_size",
        "shared": "shared_expert_intermediate_size",
        "Hq": "num_attention_heads",
        "Hkv": "num_key_value_heads",
        "Dh": "head_dim",
        "Hk": "linear_num_key_heads",
        "Hv": "linear_num_value_heads",
        "Dk": "linear_key_head_dim",
        "Dv": "linear_value_head_dim",
        "interval": "full_attention_interval",
        "tied": "tie_word_embeddings",
    }
    return {names[k]: v for k, v in kwargs.items()} | {"max_position_embeddings": 512}


def streams(**kwargs) -> dict:
    """Keys of Qwen4-Exp's text beside those of :func:`hybrid`."""
    names = {
        "streams": "hc_count",
        "rank": "hc_lowrank",
        "heads": "indexer_n_heads",
        "width": "indexer_head_dim",
        "budget": "indexer_budget",
        "ratio": "indexer_compress_ratio",
    }
    return {names[k]: v for k, v in kwargs.items()} | {"indexer_kv_heads": 1}


QWEN3 = {"max_position_embeddings": 512, "use_cache": True}

# Without the parts of Gemma-4's models that have no experts.
GEMMA = {"enable_moe_block": True, "hidden_size_per_layer_input": 0}
GEMMA |= {"max_position_embeddings": 512}
GEMMA_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 2,
    "position_embedding_size": 16,
}

CASES = {
    # Every input width is a multiple of 64, so that this one can be quantised in any way.
    "text_top3": Case(
        "qwen3_5_moe_text",
        hybrid(V=101, C=64, L=4, E=6, K=3, F=64, shared=64, Hq=4, Hkv=2, Dh=32)
        | hybrid(Hk=2, Hv=4, Dk=24, Dv=16, interval=2, tied=False)
        | plain_rope({"rope_theta": 1e4, "partial_rotary_factor": 0.25}),
        length=37,
        reserved=4,
        fused=True,
    ),
    "text_tied_top1": Case(
        "qwen3_5_moe_text",
        hybrid(V=113, C=48, L=6, E=7, K=1, F=16, shared=24, Hq=3, Hkv=1, Dh=24)
        | hybrid(Hk=1, Hv=3, Dk=12, Dv=20, interval=3, tied=True)
        | plain_rope({"rope_theta": 1e7, "partial_rotary_factor": 0.5}),
        length=29,
        reserved=4,
        float32_parts=("linear_attn.A_log", "linear_attn.norm.weight"),
        # With one expert a token its weight is always 1: less shows, still ten times the limit.
        leniency=0.1,
    ),
    "text_top_all": Case(
        "qwen3_5_moe_text",
        hybrid(V=97, C=40, L=4, E=5, K=5, F=16, shared=24, Hq=4, Hkv=2, Dh=20)
        | hybrid(Hk=2, Hv=6, Dk=20, Dv=12, interval=4, tied=False)
        | plain_rope({"rope_theta": 5e5, "partial_rotary_factor": 0.4}),
        length=70,
        reserved=4,
        dtype=torch.float32,
        shard_bytes=150_000,
        written={"full_attention_interval": 4},
        dropped=("layer_types",),
        old_rope=True,
    ),
    "vision_top2": Case(
        "qwen3_5_moe",
        hybrid(V=131, C=56, L=4, E=8, K=2, F=16, shared=24, Hq=4, Hkv=2, Dh=32)
        | hybrid(Hk=2, Hv=6, Dk=16, Dv=24, interval=4, tied=False)
        | plain_rope(
            {
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            }
        ),
        length=33,
        reserved=4,
        fused=True,
        vision=VISION,
        extra=wrapped_prediction_layer,
        written={
            "attn_output_gate": True,
            "full_attention_interval": 4,
            "mamba_ssm_dtype": "float32",
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "mlp_only_layers": [],
        },
    ),
    "vision_tied_top3": Case(
        "qwen3_5_moe",
        hybrid(V=103, C=32, L=4, E=6, K=3, F=8, shared=24, Hq=2, Hkv=1, Dh=16)
        | hybrid(Hk=2, Hv=4, Dk=8, Dv=12, interval=2, tied=True)
        | plain_rope({"rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}),
        length=23,
        reserved=4,
        vision=VISION,
    ),
    # Every input width is a multiple of 64, so that this one can be quantised in any way.
    "qwen3_moe_top2": Case(
        "qwen3_moe",
        QWEN3
        | {"vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 128}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 6}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
        length=37,
        written={"rope_scaling": None, "rope_theta": 1e6, "max_window_layers": 3},
        dropped=("rope_parameters",),
    ),
    "qwen3_moe_window": Case(
        "qwen3_moe",
        QWEN3
        | {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 4, "intermediate_size": 56}
        | {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20, "num_experts": 7}
        | {"num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": False}
        | {"use_sliding_window": True, "sliding_window": 5, "mlp_only_layers": [1]}
        | {"decoder_sparse_step": 2, "tie_word_embeddings": True, "attention_bias": True},
        length=29,
        fused=True,
        dtype=torch.float32,
        # Weights that are not normalised are small: less shows.
        leniency=0.3,
    ),
    "qwen3_moe_yarn4": Case(
        "qwen3_moe",
        {"vocab_size": 71, "hidden_size": 40, "num_hidden_layers": 2, "intermediate_size": 56}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "num_experts": 5}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
        | {"max_position_embeddings": 128}
        | {"rope_parameters": yarn(rope_type="yarn", factor=4.0)},
        length=41,
        written={
            "rope_scaling": {k: v for k, v in yarn().items() if k != "rope_theta"}
            | {"type": "yarn", "factor": 4},
            "rope_theta": 10000,
        },
        dropped=("rope_parameters",),
    ),
    "qwen3_next_yarn2": Case(
        "qwen3_next",
        {"vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 40}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 4}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
        | {"shared_expert_intermediate_size": 24, "max_position_embeddings": 64}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
        | {"linear_value_head_dim": 24, "layer_types": ["linear_attention", "full_attention"]}
        | {
            "rope_parameters": yarn(rope_type="yarn", factor=2.0, attention_factor=1.3)
            | {"partial_rotary_factor": 0.5}
        },
        length=43,
        leniency=0.5,
    ),
    # Three value heads to a key head, so that an order by value heads would show; dense layers.
    "qwen3_next_top3": Case(
        "qwen3_next",
        QWEN3
        | {"vocab_size": 107, "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 72}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 6}
        | {"num_experts_per_tok": 3, "moe_intermediate_size": 64, "norm_topk_prob": True}
        | {"shared_expert_intermediate_size": 64, "mlp_only_layers": [2]}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 24}
        | {
            "linear_value_head_dim": 32,
            "layer_types": ["linear_attention"] * 2 + ["full_attention"] + ["linear_attention"],
        }
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
            }
        },
        length=35,
        written={"rope_scaling": None, "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        dropped=("rope_parameters",),
    ),
    # Kimi-K2's shape of things: one group, YaRN of factor 32 with one beta.
    "kimi_k2_group1": Case(
        "deepseek_v3",
        {"vocab_size": 73, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 40}
        | {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 24}
        | {"kv_lora_rank": 20, "v_head_dim": 12, "qk_nope_head_dim": 16, "qk_rope_head_dim": 24}
        | {"n_routed_experts": 12, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 5}
        | {"moe_intermediate_size": 16, "first_k_dense_replace": 1, "norm_topk_prob": True}
        | {"routed_scaling_factor": 2.827, "max_position_embeddings": 1024, "num_mtp_layers": 0}
        | {
            "rope_parameters": yarn(rope_type="yarn", factor=32.0, mscale=1.0, mscale_all_dim=1.0)
            | {"rope_theta": 5e4, "beta_fast": 1.0, "beta_slow": 1.0}
        },
        length=33,
        bias=(-0.4, 0.3),
        written={"num_nextn_predict_layers": 0, "auto_map": {"x": "y"}},
        model_type="kimi_k2",
        leniency=0.5,
    ),
    # Every input width is a multiple of 64, so that this one can be quantised in any way. All
    # scores of experts are negative: a group that lost would win with zero.
    "deepseek_v3_yarn40": Case(
        "deepseek_v3",
        {"vocab_size": 89, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 128}
        | {
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "q_lora_rank": 64,
            "kv_lora_rank": 64,
            "v_head_dim": 64,
        }
        | {"qk_nope_head_dim": 64, "qk_rope_head_dim": 16, "n_routed_experts": 8}
        | {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
        | {"first_k_dense_replace": 1, "norm_topk_prob": True, "max_position_embeddings": 1280}
        | {"num_mtp_layers": 1}
        | {"rope_parameters": yarn(rope_type="yarn", factor=40.0, mscale=1.0, mscale_all_dim=0.8)},
        length=39,
        bias=(-1.6, 0.3),
        extra=prediction_layer,
        written={
            "rope_scaling": {k: v for k, v in yarn().items() if k != "rope_theta"}
            | {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.8},
            "rope_theta": 10000,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
            "ep_size": 1,
            "seq_aux": True,
            "aux_loss_alpha": 0.001,
        },
        dropped=("rope_parameters",),
    ),
    "deepseek_v3_direct": Case(
        "deepseek_v3",
        {"vocab_size": 83, "hidden_size": 40, "num_hidden_layers": 2, "intermediate_size": 56}
        | {
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "q_lora_rank": None,
            "kv_lora_rank": 28,
            "v_head_dim": 18,
        }
        | {"qk_nope_head_dim": 22, "qk_rope_head_dim": 12, "n_routed_experts": 5}
        | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"first_k_dense_replace": 0, "norm_topk_prob": False, "n_shared_experts": 2}
        | {"attention_bias": True, "max_position_embeddings": 32, "num_mtp_layers": 0}
        | {"rope_parameters": yarn(rope_type="yarn", factor=1.0, mscale=1.0, mscale_all_dim=1.0)},
        length=31,
        dtype=torch.float32,
        fused=True,
        bias=(0.4, 0.2),
    ),
    "deepseek_v3_groups": Case(
        "deepseek_v3",
        {"vocab_size": 79, "hidden_size": 48, "num_hidden_layers": 3, "intermediate_size": 40}
        | {
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "q_lora_rank": 36,
            "kv_lora_rank": 32,
            "v_head_dim": 20,
        }
        | {"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "n_routed_experts": 16}
        | {"n_group": 8, "topk_group": 3, "num_experts_per_tok": 4, "moe_intermediate_size": 16}
        | {"first_k_dense_replace": 2, "norm_topk_prob": True, "rope_interleave": False}
        | {"max_position_embeddings": 512, "num_mtp_layers": 0, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
        length=27,
        bias=(-0.5, 0.4),
        leniency=0.3,
    ),
    # GLM-4.6's shape of things: norms per head, biases of queries, keys and values alone.
    "glm4_moe_norms": Case(
        "glm4_moe",
        {"vocab_size": 87, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 128}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
        | {"n_routed_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        | {"first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "use_qk_norm": True}
        | {"attention_bias": True, "max_position_embeddings": 512, "num_mtp_layers": 1},
        length=33,
        bias=(0.4, 0.3),
        extra=prediction_layer,
        written={"rope_scaling": None, "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        dropped=("rope_parameters",),
        leniency=0.5,
    ),
    # GLM-4.5-Air's: no norms; groups and a tied head, which no release has.
    "glm4_moe_plain": Case(
        "glm4_moe",
        {"vocab_size": 75, "hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 40}
        | {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 20}
        | {"n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
        | {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "n_shared_experts": 2}
        | {"first_k_dense_replace": 0, "tie_word_embeddings": True, "num_mtp_layers": 0}
        | {"max_position_embeddings": 512},
        length=31,
        fused=True,
        dtype=torch.float32,
        bias=(-0.4, 0.3),
        leniency=0.3,
    ),
    # Norms over all heads; more values in the heads than in the residual stream.
    "minimax_m2_norms": Case(
        "minimax_m2",
        {"vocab_size": 91, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 64}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
        | {"num_local_experts": 7, "num_experts_per_tok": 3, "max_position_embeddings": 512}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}, "bos_token_id": 1}
        | {"eos_token_id": 2, "rotary_dim": 16},
        length=35,
        bias=(-0.3, 0.3),
        written={
            "rope_theta": 5e6,
            "rotary_dim": 16,
            "attn_type_list": [1, 1, 1],
            "qk_norm_type": "per_layer",
            "scoring_func": "sigmoid",
            "shared_intermediate_size": 0,
            "num_mtp_modules": 3,
            "use_qk_norm": True,
        },
        dropped=("rope_parameters", "partial_rotary_factor"),
        leniency=0.5,
    ),
    # Kimi-K2.5: DeepSeek-V3's text model in a wrapper.
    "kimi_k25_wrapped": Case(
        "deepseek_v3",
        {"vocab_size": 69, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 40}
        | {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 24}
        | {"kv_lora_rank": 20, "v_head_dim": 12, "qk_nope_head_dim": 16, "qk_rope_head_dim": 24}
        | {"n_routed_experts": 9, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4}
        | {"moe_intermediate_size": 16, "first_k_dense_replace": 1, "norm_topk_prob": True}
        | {"routed_scaling_factor": 2.827, "max_position_embeddings": 2048, "num_mtp_layers": 0}
        | {
            "rope_parameters": yarn(rope_type="yarn", factor=64.0, mscale=1.0, mscale_all_dim=1.0)
            | {"rope_theta": 5e4}
        },
        length=29,
        bias=(-0.4, 0.3),
        written={"num_nextn_predict_layers": 0},
        model_type="kimi_k25",
        prefix="language_model.",
        wrapper={
            "media_placeholder_token_id": 3,
            "vision_config": {"patch_size": 2},
            "use_unified_vision_chunk": True,
        },
        leniency=0.5,
    ),
    # GLM-4.7-Flash's shape of things: values wider than keys, no YaRN.
    "glm4_moe_lite_flash": Case(
        "glm4_moe_lite",
        {"vocab_size": 77, "hidden_size": 40, "num_hidden_layers": 3, "intermediate_size": 56}
        | {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 24}
        | {"kv_lora_rank": 28, "v_head_dim": 24, "qk_nope_head_dim": 18, "qk_rope_head_dim": 8}
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
        | {"max_position_embeddings": 512, "routed_scaling_factor": 1.8},
        length=31,
        bias=(0.4, 0.3),
        extra=prediction_layer,
        written={
            "rope_scaling": None,
            "rope_theta": 1e4,
            "partial_rotary_factor": 1.0,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 1,
            "topk_method": "noaux_tc",
        },
        dropped=("rope_parameters", "mlp_layer_types"),
        leniency=0.5,
    ),
    # DeepSeek-V3.2's shape of things, with a budget of 8 positions. Every input width is a multiple
    # of 64, so that this one can be quantised in any way.
    "deepseek_v32_yarn40": Case(
        "deepseek_v32",
        {"vocab_size": 81, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 128}
        | {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 64}
        | {"kv_lora_rank": 64, "v_head_dim": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 16}
        | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 64, "first_k_dense_replace": 1, "norm_topk_prob": True}
        | {"max_position_embeddings": 1280}
        | {"index_topk": 8, "index_n_heads": 8, "index_head_dim": 64}
        | {"rope_parameters": yarn(rope_type="yarn", factor=40.0, mscale=1.0, mscale_all_dim=0.8)},
        length=39,
        bias=(-0.4, 0.3),
        extra=prediction_layer,
        written={
            "rope_scaling": {k: v for k, v in yarn().items() if k != "rope_theta"}
            | {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.8},
            "rope_theta": 10000,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 1,
        },
        dropped=("rope_parameters", "mlp_layer_types", "layer_types"),
        leniency=0.3,
    ),
    # GLM-5.2's shape of things: two layers share the indexer of the second one.
    "glm_moe_dsa_shared": Case(
        "glm_moe_dsa",
        {"vocab_size": 71, "hidden_size": 40, "num_hidden_layers": 5, "intermediate_size": 56}
        | {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 24}
        | {"kv_lora_rank": 28, "v_head_dim": 24, "qk_nope_head_dim": 18, "qk_rope_head_dim": 8}
        | {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"max_position_embeddings": 512, "first_k_dense_replace": 2}
        | {"index_topk": 6, "index_n_heads": 10, "index_head_dim": 20}
        | {"indexer_types": ["full", "full", "shared", "shared", "full"]}
        | plain_rope({"rope_theta": 1e6}),
        length=31,
        bias=(0.4, 0.3),
        written={
            "index_topk_freq": 3,
            "index_skip_topk_offset": 2,
            "indexer_rope_interleave": True,
            "num_nextn_predict_layers": 0,
            "topk_method": "noaux_tc",
        },
        leniency=0.2,
    ),
    # gpt-oss: YaRN on all dimensions, windows in layers 0 and 2, activations beyond the clamp.
    "gpt_oss_sinks": Case(
        "gpt_oss",
        {"vocab_size": 93, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 64}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
        | {"num_local_experts": 6, "num_experts_per_tok": 2, "max_position_embeddings": 256}
        | {"sliding_window": 7, "swiglu_limit": 1.5}
        | {"rope_parameters": yarn(rope_type="yarn", factor=8.0, truncate=False)},
        length=37,
        dtype=torch.float32,
        fused=True,
        written={"experts_per_token": 2, "initial_context_length": 32},
        leniency=0.3,
    ),
    # Rows of n-grams in two layers; some tokens stop a context.
    "qwen4_exp_rows": Case(
        "qwen4_exp_text",
        hybrid(V=83, C=32, L=4, E=5, K=2, F=16, shared=24, Hq=4, Hkv=2, Dh=24)
        | hybrid(Hk=2, Hv=4, Dk=16, Dv=12, interval=3, tied=False)
        | plain_rope({"rope_theta": 1e4, "partial_rotary_factor": 0.5})
        | streams(streams=3, rank=6, heads=8, width=16, budget=8, ratio=4)
        | {"ple_layer_ids": [1, 4], "ple_embed_dim": 24, "ngram_size": 3, "heads_per_ngram": 2}
        | {"ple_conv_kernel_size": 3, "ngram_vocab_size_base": 53, "split_ngram_parts": 4}
        | {"make_ngram_vocab_size_divisible_by": 8, "seed": 7, "eos_token_id": [5, 9]}
        | {"output_gate_type": "sigmoid"},
        length=37,
        stops=5,
        gain=1.5,
        leniency=0.2,
    ),
    # Gemma-4-26B-A4B's shape of things: the keys of global layers are their values too. Every input
    # width is a multiple of 64, so that this one can be quantised in any way.
    "gemma4_shared": Case(
        "gemma4_text",
        GEMMA
        | {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 5}
        | {"num_global_key_value_heads": 1, "global_head_dim": 64, "attention_k_eq_v": True}
        | {"top_k_experts": 2, "moe_intermediate_size": 64, "sliding_window": 7}
        | {"layer_types": ["sliding_attention"] * 2 + ["full_attention"]}
        | {"final_logit_softcapping": 30.0, "tie_word_embeddings": True},
        length=37,
        fused=True,
        written={"global_head_dim": 64, "num_global_key_value_heads": 1},
        dropped=("per_layer_config",),
        leniency=0.3,
    ),
    # In a wrapper with images, heads of global layers as transformers 5.24 writes them, values and
    # a head of their own, no cap, a rope that turns three of eight pairs.
    "gemma4_vision": Case(
        "gemma4",
        GEMMA
        | {"vocab_size": 85, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 3}
        | {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 24, "num_experts": 7}
        | {"global_head_dim": 16, "top_k_experts": 3, "moe_intermediate_size": 24}
        | {"sliding_window": 5, "tie_word_embeddings": False}
        | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 5e4,
                    "partial_rotary_factor": 0.4,
                },
            }
        },
        length=33,
        vision=GEMMA_VISION,
        reserved=4,
        leniency=0.3,
    ),
    # In a wrapper with images, without n-grams, experts in transformers' fused tensors; an odd
    # ratio, and most tokens are below the budget.
    "qwen4_exp_vision": Case(
        "qwen4_exp",
        hybrid(V=97, C=24, L=3, E=6, K=2, F=16, shared=16, Hq=2, Hkv=1, Dh=16)
        | hybrid(Hk=2, Hv=4, Dk=12, Dv=16, interval=2, tied=True)
        | plain_rope({"rope_theta": 1e5, "partial_rotary_factor": 0.5})
        | streams(streams=2, rank=4, heads=8, width=8, budget=15, ratio=5),
        length=33,
        vision=VISION,
        reserved=4,
        fused=True,
        gain=1.5,
        leniency=0.2,
    ),
    # Laguna's shape of things: a dense layer without a window, then windows with more heads and a
    # rope of their own; YaRN on half a head's dimensions. Names as the originals have them.
    "laguna_heads": Case(
        "laguna",
        {"vocab_size": 91, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 128}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 7}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "sliding_window": 7}
        | {"shared_expert_intermediate_size": 64, "moe_routed_scaling_factor": 2.5}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
        | {"num_attention_heads_per_layer": [4, 6, 4], "max_position_embeddings": 256}
        | {
            "rope_parameters": {
                "full_attention": yarn(rope_type="yarn", factor=8.0, partial_rotary_factor=0.5),
                "sliding_attention": {
                    "rope_type": "default",
                    "rope_theta": 2e3,
                    "partial_rotary_factor": 1.0,
                },
            }
        },
        length=37,
        bias=(0.4, 0.3),
        leniency=0.3,
    ),
}
