"""Write the golden twins: tiny random Qwen3.5-MoE checkpoints and their logits by transformers.

    pip install "mlx_moeflux[parity]"
    python tests/golden/make_golden.py            # rewrite every case
    python tests/golden/make_golden.py text_top3  # or some of them

Each case is a directory in the published form (config.json, safetensors) beside
golden.safetensors:

    tokens         [2, T] int32, logits [2, T, V] float32
    padded_tokens  [3, T'] int32, left_padding [3] int32, padded_logits [3, T', V] float32
                   (row b: only positions from left_padding[b] on mean anything)

The logits are those of transformers' own classes, loaded from the very files, with every
number in float64 and rounded to float32 at the end. golden.json keeps the versions and what
was measured: the error of transformers itself in float32, how far wrong epsilons of the q/k
L2 norm and reversed parameters move the logits, and the smallest gap between a chosen and a
refused expert.

Every parameter is random and none is 0 or 1. Some q and k heads are so small that the epsilon
matters; one head per layer decays to exactly 0 in one step and one hardly decays. A seed that
leaves something invisible is passed over.
"""

import argparse
import contextlib
import json
import shutil
from pathlib import Path

import torch
import transformers
from qwen_cases import CASES, VISION, Case
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
)
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling

HERE = Path(__file__).resolve().parent
SMALL = 2.0**-7  # a power of two: exact in bfloat16
GAIN = 0.5  # keeps transformers in float32 within 1e-6 of float64
MIN_MARGIN = 1e-4  # float32 must not choose other experts than float64
MIN_SENSITIVITY = 1e-3  # a wrong epsilon, or a parameter in the wrong order, must show


def build(case: Case) -> torch.nn.Module:
    text = case.text | {"rope_parameters": {"rope_type": "default", **case.rope}}
    if not case.vision:
        return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**text))
    vocab = text["vocab_size"]
    special = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    config = Qwen3_5MoeConfig(
        text_config=text,
        vision_config=VISION | {"out_hidden_size": text["hidden_size"]},
        tie_word_embeddings=text["tie_word_embeddings"],
        **{name: vocab - 1 - i for i, name in enumerate(special)},
    )
    return Qwen3_5MoeForConditionalGeneration(config)


def randomise(model: torch.nn.Module, text: dict, generator: torch.Generator) -> None:
    """Fill every parameter; small q and k heads, one head of no memory and one of a long one."""

    def normal(shape, scale, mean=0.0):
        return mean + scale * torch.randn(shape, generator=generator)

    key_width = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    for name, parameter in model.named_parameters():
        shape = parameter.shape
        if name.endswith("A_log"):
            value = normal(shape, 1.0, mean=-1.0)
            value[0], value[-1] = -5.3, 6.2
        elif name.endswith("dt_bias"):
            value = normal(shape, 1.0, mean=0.5)
        elif name.endswith("linear_attn.norm.weight"):
            value = normal(shape, 0.3, mean=1.1)
        elif name.endswith("conv1d.weight"):
            value = normal(shape, 0.6)
        elif parameter.ndim == 1:
            value = normal(shape, 0.3, mean=0.1)
        elif name.endswith("embed_tokens.weight"):
            value = normal(shape, 1.0)
        else:
            value = normal(shape, GAIN * shape[-1] ** -0.5)
        if name.endswith("in_proj_qkv.weight"):
            heads = value[: 2 * key_width].view(2, -1, text["linear_key_head_dim"], shape[1])
            heads[0, ::2] *= SMALL
            heads[1, -1] *= SMALL
        parameter.data.copy_(value)


@contextlib.contextmanager
def all_float64():
    """Make transformers' own casts to float32 casts to float64."""
    saved = torch.float32, torch.float, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = saved


def load(path: Path, case: Case) -> torch.nn.Module:
    cls = Qwen3_5MoeForConditionalGeneration if case.vision else Qwen3_5MoeForCausalLM
    model, report = cls.from_pretrained(
        path,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    unread = [k for k in report["unexpected_keys"] if not k.startswith("mtp.")]
    assert not [*report["missing_keys"], *unread], report
    return model.eval()


def to_float64(model: torch.nn.Module) -> None:
    model.double()
    text = model.model.language_model if hasattr(model.model, "language_model") else model.model
    with all_float64():
        text.rotary_emb.inv_freq = text.rotary_emb.compute_default_rope_parameters(text.config)[0]


@torch.no_grad()
def logits(model: torch.nn.Module, tokens, left_padding=None) -> torch.Tensor:
    mask = None
    if left_padding is not None:
        mask = (torch.arange(tokens.shape[1]) >= left_padding[:, None]).long()
    return model(input_ids=tokens, attention_mask=mask, use_cache=False).logits


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


@torch.no_grad()
def router_margin(model: torch.nn.Module, tokens) -> float:
    """Smallest gap between the least chosen and the best refused probability."""
    gaps = [1.0]

    def look(module, _inputs, outputs):
        if module.top_k < module.num_experts:
            ordered = outputs[0].softmax(-1).sort(-1, descending=True).values
            gaps.append(float((ordered[:, module.top_k - 1] - ordered[:, module.top_k]).min()))

    routers = [m for m in model.modules() if isinstance(m, modeling.Qwen3_5MoeTopKRouter)]
    hooks = [router.register_forward_hook(look) for router in routers]
    logits(model, tokens)
    for hook in hooks:
        hook.remove()
    return min(gaps)


def epsilon_sensitivity(model: torch.nn.Module, tokens, truth: torch.Tensor) -> dict[str, float]:
    """How far the logits move, relative to the largest, for wrong readings of the L2 norm."""

    def inside_the_mean(x, dim=-1, eps=1e-6):
        return x * torch.rsqrt((x * x).sum(dim, keepdim=True) + eps * x.shape[dim])

    def none(x, dim=-1, eps=1e-6):
        return x * torch.rsqrt((x * x).sum(dim, keepdim=True) + 1e-30)

    original, moved = modeling.l2norm, {}
    for wrong in (inside_the_mean, none):
        modeling.l2norm = wrong
        moved[wrong.__name__] = relative(logits(model, tokens), truth)
    modeling.l2norm = original
    return moved


@torch.no_grad()
def weakest_parameter(model: torch.nn.Module, tokens, truth: torch.Tensor) -> tuple[str, float]:
    """The parameter whose reversal along its first axis moves the logits least, and how far."""
    moved = {}
    for name, parameter in model.named_parameters():
        if "visual" not in name and parameter.shape[0] > 1:
            original = parameter.data
            parameter.data = original.flip(0)
            moved[name] = relative(logits(model, tokens), truth)
            parameter.data = original
    return min(moved.items(), key=lambda item: item[1])


def write_checkpoint(path: Path, case: Case, generator: torch.Generator) -> None:
    model = build(case)
    randomise(model, case.text, generator)
    model.to(case.dtype)
    for name, parameter in model.named_parameters():
        if name.endswith(case.float32_parts or ("\0",)):
            parameter.data = parameter.data.float()
    options = {"max_shard_size": case.shard_bytes} if case.shard_bytes else {}
    model.save_pretrained(path, save_original_format=not case.fused, **options)
    config = json.loads((path / "config.json").read_text())
    text = config["text_config"] if case.vision else config
    text.update(case.text_config)
    for key in case.drop_keys:
        del text[key]
    if case.old_rope:
        rope = text.pop("rope_parameters")
        text["rope_theta"] = rope.pop("rope_theta")
        text["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        text["rope_scaling"] = rope
    (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if case.mtp:
        add_mtp(path / "model.safetensors", case, generator)


def add_mtp(file: Path, case: Case, generator: torch.Generator) -> None:
    """The names of a published multi-token-prediction layer, of the last layer's shapes."""
    tensors = load_file(file)
    last = f"model.language_model.layers.{case.text['num_hidden_layers'] - 1}."
    width = case.text["hidden_size"]
    shapes = {f"mtp.layers.0.{k[len(last) :]}": t.shape for k, t in tensors.items() if last in k}
    shapes["mtp.fc.weight"] = (width, 2 * width)
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        shapes[f"mtp.{norm}.weight"] = (width,)
    for name, shape in shapes.items():
        tensors[name] = torch.randn(shape, generator=generator).to(case.dtype)
    save_file(tensors, file, metadata={"format": "pt"})


def make(name: str, seed: int) -> dict:
    case, path = CASES[name], HERE / name
    if path.exists():
        shutil.rmtree(path)
    generator = torch.Generator().manual_seed(seed)
    write_checkpoint(path, case, generator)
    allowed = case.text["vocab_size"] - 4  # the last four are images' and videos'
    tokens = torch.randint(allowed, (2, case.length), generator=generator)
    padded = torch.randint(allowed, (3, 21), generator=generator)
    padding = torch.tensor([6, 0, 1])

    model = load(path, case)
    single = logits(model, tokens).double()
    to_float64(model)
    with all_float64():
        truth = logits(model, tokens)
        padded_truth = logits(model, padded, padding)
        margin = min(router_margin(model, tokens), router_margin(model, padded))
        sensitivity = epsilon_sensitivity(model, tokens, truth)
        weakest = weakest_parameter(model, tokens, truth)
        for b, start in enumerate(padding.tolist()):
            alone = logits(model, padded[b : b + 1, start:])
            assert relative(padded_truth[b : b + 1, start:], alone) < 1e-12
    assert truth.dtype == torch.float64
    assert torch.isfinite(truth).all()
    ratio = CASES[name].leniency
    shown = min(*sensitivity.values(), weakest[1])
    if margin < MIN_MARGIN * ratio or shown < MIN_SENSITIVITY * ratio:
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
        "epsilon_sensitivity": sensitivity,
        "weakest_parameter": weakest,
        "router_margin": margin,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    report = HERE / "golden.json"
    known = json.loads(report.read_text())["cases"] if report.exists() else {}
    for name in args.cases or CASES:
        known[name] = make(name, args.seed)
        print(name, json.dumps(known[name]))
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    content = {"made_with": versions, "cases": {k: known[k] for k in CASES if k in known}}
    report.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
