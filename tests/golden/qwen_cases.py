"""The golden twins of Qwen3.5-MoE; see make_golden.py."""

from dataclasses import dataclass, field

import torch

VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 2,
    "num_position_embeddings": 16,
}


@dataclass(frozen=True)
class Case:
    """One twin. `text` are keys of the text config; sizes are chosen to differ from each other."""

    text: dict
    length: int
    rope: dict
    vision: bool = False
    leniency: float = 1.0  # times the two minima above
    fused: bool = True  # experts.gate_up_proj / down_proj, else one tensor per expert
    dtype: torch.dtype = torch.bfloat16
    float32_parts: tuple[str, ...] = ()  # suffixes kept in float32 in a bfloat16 checkpoint
    shard_bytes: int | None = None
    mtp: bool = False  # add a multi-token-prediction layer, which nobody reads
    text_config: dict = field(default_factory=dict)  # keys as published, beside those written
    drop_keys: tuple[str, ...] = ()
    old_rope: bool = False  # rope_theta + rope_scaling instead of rope_parameters


def _text(**kwargs) -> dict:
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


CASES = {
    # Every input width is a multiple of 64, so that this one can be quantised in any way.
    "text_top3": Case(
        _text(V=101, C=64, L=4, E=6, K=3, F=64, shared=64, Hq=4, Hkv=2, Dh=32)
        | _text(Hk=2, Hv=4, Dk=24, Dv=16, interval=2, tied=False),
        length=37,
        rope={"rope_theta": 1e4, "partial_rotary_factor": 0.25},
    ),
    "text_tied_top1": Case(
        _text(V=113, C=48, L=6, E=7, K=1, F=16, shared=24, Hq=3, Hkv=1, Dh=24)
        | _text(Hk=1, Hv=3, Dk=12, Dv=20, interval=3, tied=True),
        length=29,
        rope={"rope_theta": 1e7, "partial_rotary_factor": 0.5},
        fused=False,
        float32_parts=("linear_attn.A_log", "linear_attn.norm.weight"),
        # With one expert a token its weight is always 1: less shows, still ten times the limit.
        leniency=0.1,
    ),
    "text_top_all": Case(
        _text(V=97, C=40, L=4, E=5, K=5, F=16, shared=24, Hq=4, Hkv=2, Dh=20)
        | _text(Hk=2, Hv=6, Dk=20, Dv=12, interval=4, tied=False),
        length=70,
        rope={"rope_theta": 5e5, "partial_rotary_factor": 0.4},
        fused=False,
        dtype=torch.float32,
        shard_bytes=150_000,
        text_config={"full_attention_interval": 4},
        drop_keys=("layer_types",),
        old_rope=True,
    ),
    "vision_top2": Case(
        _text(V=131, C=56, L=4, E=8, K=2, F=16, shared=24, Hq=4, Hkv=2, Dh=32)
        | _text(Hk=2, Hv=6, Dk=16, Dv=24, interval=4, tied=False),
        length=33,
        rope={
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        vision=True,
        mtp=True,
        text_config={
            "attn_output_gate": True,
            "full_attention_interval": 4,
            "mamba_ssm_dtype": "float32",
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "mlp_only_layers": [],
        },
    ),
    "vision_tied_top3": Case(
        _text(V=103, C=32, L=4, E=6, K=3, F=8, shared=24, Hq=2, Hkv=1, Dh=16)
        | _text(Hk=2, Hv=4, Dk=8, Dv=12, interval=2, tied=True),
        length=23,
        rope={"rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
        vision=True,
        fused=False,
    ),
}
