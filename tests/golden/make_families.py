"""Write the golden twins of the families beside Qwen3.5-MoE.

    pip install "mlx_moeflux[parity]"
    python tests/golden/make_families.py                    # rewrite every case
    python tests/golden/make_families.py qwen3_moe_window   # or some of them

Form, precision and care are those of make_golden.py: published layouts, random parameters none
of which is 0 or 1, logits of transformers' own classes in float64; a seed that leaves a parameter
invisible, or where float32 might choose other experts, is passed over. families.json keeps
versions and what was measured.
"""

import argparse
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import transformers
from make_golden import GAIN, HERE, MIN_MARGIN, MIN_SENSITIVITY, all_float64, logits, relative
from safetensors.torch import load_file, save_file

REPORT = HERE / "families.json"


@dataclass(frozen=True)
class Case:
    """One twin. `text` are keys of transformers' config, `written` of the config.json beside."""

    family: str
    text: dict
    length: int
    seed: int = 1
    leniency: float = 1.0  # times the two minima
    fused: bool = False  # experts.gate_up_proj / down_proj, else one tensor per expert
    dtype: torch.dtype = torch.bfloat16
    written: dict = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    extra: Callable[[dict, torch.Generator], dict] | None = None  # tensors -> more of them
    bias: tuple[float, float] = (0.0, 0.3)  # mean and deviation of a router's bias


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


def yarn(**more) -> dict:
    """Of an original context so short that all pairs differ."""
    keys = {"original_max_position_embeddings": 32, "beta_fast": 4, "beta_slow": 1}
    return keys | {"rope_theta": 1e4} | more


QWEN3 = {"max_position_embeddings": 512, "use_cache": True}

CASES = {
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
}


def classes(family: str):
    name = {"qwen3_moe": "Qwen3Moe", "deepseek_v3": "DeepseekV3"}[family]
    return getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}ForCausalLM")


def randomise(model: torch.nn.Module, case: Case, generator: torch.Generator) -> None:
    """Fill every parameter and the buffers that are saved."""

    def normal(shape, scale, mean=0.0):
        return mean + scale * torch.randn(shape, generator=generator)

    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        shape = parameter.shape
        if name.endswith("e_score_correction_bias"):
            value = normal(shape, case.bias[1], mean=case.bias[0])
        elif name.endswith(".bias"):
            value = normal(shape, 0.3)
        elif parameter.ndim == 1 and "inv_freq" not in name:
            value = normal(shape, 0.3, mean=1.1)
        elif name.endswith("embed_tokens.weight"):
            value = normal(shape, 1.0)
        elif parameter.ndim > 1:
            value = normal(shape, GAIN * shape[-1] ** -0.5)
        else:
            continue
        parameter.data.copy_(value)


def write_checkpoint(path, case: Case, generator: torch.Generator) -> None:
    config, kind = classes(case.family)
    model = kind(config(**case.text))
    randomise(model, case, generator)
    model.to(case.dtype)
    model.save_pretrained(path, save_original_format=not case.fused)
    file = path / "config.json"
    content = {k: v for k, v in json.loads(file.read_text()).items() if k not in case.dropped}
    file.write_text(json.dumps(content | case.written, indent=2, sort_keys=True) + "\n")
    if case.extra is not None:
        tensors = load_file(path / "model.safetensors")
        tensors |= case.extra(tensors, generator)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def load(path, case: Case) -> torch.nn.Module:
    model, report = classes(case.family)[1].from_pretrained(
        path,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    assert not report["missing_keys"], report
    return model.eval()


def to_float64(model: torch.nn.Module) -> None:
    model.double()
    with all_float64():
        rotary = model.model.rotary_emb
        if rotary.rope_type == "default":
            rotary.inv_freq = rotary.compute_default_rope_parameters(rotary.config)[0]
        else:
            compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[rotary.rope_type]
            rotary.inv_freq = compute(rotary.config, torch.device("cpu"))[0]
        assert rotary.inv_freq.dtype == torch.float64


@torch.no_grad()
def router_margin(model: torch.nn.Module, tokens) -> tuple[float, int]:
    """Smallest gap between the least chosen and the best refused score, of groups too; and how
    many choices would differ if a group that lost counted as 0 instead of minus infinity."""
    gaps, different = [1.0], [0]

    def gap(scores, kept):
        if kept < scores.shape[-1]:
            ordered = scores.sort(-1, descending=True).values
            gaps.append(float((ordered[:, kept - 1] - ordered[:, kept]).min()))

    def look(module, _inputs, outputs):
        if not hasattr(module, "num_group"):
            return gap(outputs[0].softmax(-1), module.top_k)
        scores = outputs[0].sigmoid() + module.e_score_correction_bias
        groups = scores.view(len(scores), module.num_group, -1)
        best = groups.topk(2, dim=-1).values.sum(-1)
        gap(best, module.topk_group)
        kept = torch.zeros_like(best).scatter(1, best.topk(module.topk_group).indices, 1.0)
        kept = kept[..., None].expand_as(groups).reshape(scores.shape) > 0
        right = scores.masked_fill(~kept, float("-inf"))
        gap(right, module.top_k)
        chosen = [s.topk(module.top_k).indices.sort().values
                  for s in (right, scores.masked_fill(~kept, 0.0))]  # fmt: skip
        assert torch.equal(chosen[0], outputs[2].sort().values)
        different[0] += int((chosen[0] != chosen[1]).any(-1).sum())
        return None

    routers = [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]
    assert routers
    hooks = [router.register_forward_hook(look) for router in routers]
    logits(model, tokens)
    for hook in hooks:
        hook.remove()
    return min(gaps), different[0]


@torch.no_grad()
def weakest_parameter(model: torch.nn.Module, tokens, truth: torch.Tensor) -> tuple[str, float]:
    """The parameter whose reversal along its first axis moves the logits least, and how far."""
    moved = {}
    biases = [b for b in model.named_buffers() if b[0].endswith("e_score_correction_bias")]
    for name, parameter in [*model.named_parameters(), *biases]:
        if parameter.shape[0] > 1:
            original = parameter.data
            parameter.data = original.flip(0)
            moved[name] = relative(logits(model, tokens), truth)
            parameter.data = original
    return min(moved.items(), key=lambda item: item[1])


def make(name: str, seed: int) -> dict:
    case, path = CASES[name], HERE / name
    if path.exists():
        shutil.rmtree(path)
    generator = torch.Generator().manual_seed(seed)
    write_checkpoint(path, case, generator)
    vocabulary = case.text["vocab_size"]
    tokens = torch.randint(vocabulary, (2, case.length), generator=generator)
    padded = torch.randint(vocabulary, (3, 21), generator=generator)
    padding = torch.tensor([6, 0, 1])

    model = load(path, case)
    single = logits(model, tokens).double()
    to_float64(model)
    with all_float64():
        truth = logits(model, tokens)
        padded_truth = logits(model, padded, padding)
        margin, different = router_margin(model, tokens)
        margin = min(margin, router_margin(model, padded)[0])
        weakest = weakest_parameter(model, tokens, truth)
        for b, start in enumerate(padding.tolist()):
            alone = logits(model, padded[b : b + 1, start:])
            assert relative(padded_truth[b : b + 1, start:], alone) < 1e-12
    assert truth.dtype == torch.float64
    assert torch.isfinite(truth).all()
    if case.bias[0] < -1 and not different:
        return make(name, seed + 1)
    if margin < MIN_MARGIN * case.leniency or weakest[1] < MIN_SENSITIVITY * case.leniency:
        print(name, "passes over seed", seed, margin, weakest)
        return make(name, seed + 1)
    golden = {
        "tokens": tokens.int(),
        "logits": truth.to(torch.float32),
        "padded_tokens": padded.int(),
        "left_padding": padding.int(),
        "padded_logits": padded_truth.to(torch.float32),
    }
    save_file(golden, path / "golden.safetensors")
    for file in path.iterdir():
        file.chmod(0o644)
    return {
        "seed": seed,
        "bytes": sum(f.stat().st_size for f in path.iterdir()),
        "largest_logit": float(truth.abs().max()),
        "transformers_float32_error": relative(single, truth),
        "weakest_parameter": weakest,
        "router_margin": margin,
        "choices_that_zero_would_change": different,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    known = json.loads(REPORT.read_text())["cases"] if REPORT.exists() else {}
    for name in args.cases or CASES:
        known[name] = make(name, CASES[name].seed)
        print(name, json.dumps(known[name]))
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    content = {"made_with": versions, "cases": {k: known[k] for k in CASES if k in known}}
    REPORT.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
