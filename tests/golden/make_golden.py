"""Write the golden twins: tiny random checkpoints, and their logits by transformers.

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
was measured: the error of transformers itself in float32, how far wrong epsilons of Qwen3.5's
q/k L2 norm and reversed parameters move the logits, and the smallest gap between a chosen and a
refused expert.

Every parameter is random and none is 0 or 1. In delta nets some q and k heads are so small that the
epsilon matters; one head per layer decays to exactly 0 in one step and one hardly decays. A seed
that leaves something invisible, or where float32 might choose other experts, is passed over.
"""

import argparse
import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from golden_cases import CASES, Case
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling

HERE = Path(__file__).resolve().parent
REPORT = HERE / "golden.json"
SMALL = 2.0**-7  # a power of two: exact in bfloat16
MIN_MARGIN = 1e-4  # float32 must not choose other experts than float64
MIN_SENSITIVITY = 1e-3  # a wrong epsilon, or a parameter in the wrong order, must show


def classes(case: Case):
    """The config and model class of a case's model_type."""
    config = transformers.CONFIG_MAPPING[case.family]
    images, text = transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM
    return config, (images if case.vision else text)._model_mapping[config]


def build(case: Case) -> torch.nn.Module:
    config, kind = classes(case)
    if case.vision is None:
        return kind(config(**case.text))
    special = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return kind(
        config(
            text_config=case.text,
            vision_config=case.vision | {"out_hidden_size": case.text["hidden_size"]},
            tie_word_embeddings=case.text["tie_word_embeddings"],
            **{name: case.text["vocab_size"] - 1 - i for i, name in enumerate(special)},
        )
    )


def randomise_delta(model: torch.nn.Module, case: Case, generator: torch.Generator) -> None:
    """Fill every parameter; small q and k heads, one head of no memory and one of a long one."""

    def normal(shape, scale, mean=0.0):
        return mean + scale * torch.randn(shape, generator=generator)

    text = case.text
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
        elif name.endswith(("embed_tokens.weight", "ngram_embedding.weight")):
            value = normal(shape, 1.0)
        else:
            value = normal(shape, case.gain * shape[-1] ** -0.5)
        if name.endswith("in_proj_qkv.weight"):
            heads = value[: 2 * key_width].view(2, -1, text["linear_key_head_dim"], shape[1])
            heads[0, ::2] *= SMALL
            heads[1, -1] *= SMALL
        parameter.data.copy_(value)


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
            value = normal(shape, case.gain * shape[-1] ** -0.5)
        else:
            continue
        parameter.data.copy_(value)


def write_checkpoint(path: Path, case: Case, generator: torch.Generator) -> None:
    model = build(case)
    if case.family.startswith(("qwen3_5", "qwen3_next", "qwen4")):
        randomise_delta(model, case, generator)
    else:
        randomise(model, case, generator)
    model.to(case.dtype)
    for name, parameter in model.named_parameters():
        if name.endswith(case.float32_parts or ("\0",)):
            parameter.data = parameter.data.float()
    options = {"max_shard_size": case.shard_bytes} if case.shard_bytes else {}
    model.save_pretrained(path, save_original_format=not case.fused, **options)
    config = json.loads((path / "config.json").read_text())
    text = config["text_config"] if case.vision else config
    for key in case.dropped:
        text.pop(key, None)
    text.update(case.written)
    if case.old_rope:
        rope = text.pop("rope_parameters")
        text["rope_theta"] = rope.pop("rope_theta")
        text["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        text["rope_scaling"] = rope
    (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if case.extra is not None:
        tensors = load_file(path / "model.safetensors")
        tensors |= case.extra(tensors, generator)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


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
    model, report = classes(case)[1].from_pretrained(
        path,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    assert not report["missing_keys"], report
    assert case.extra or not report["unexpected_keys"], report
    return model.eval()


def to_float64(model: torch.nn.Module) -> None:
    model.double()
    text = model.model.language_model if hasattr(model.model, "language_model") else model.model
    with all_float64():
        rotary = text.rotary_emb
        if isinstance(rotary.rope_type, dict):
            for kind, name in rotary.rope_type.items():
                config, compute = rotary.config, rotary.compute_default_rope_parameters
                if hasattr(rotary, "rope_init_fns"):  # Gemma-4's
                    config, compute = config.per_layer_config[kind], rotary.rope_init_fns[kind]
                elif name != "default":
                    compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[name]
                found = compute(config, torch.device("cpu"), layer_type=kind)[0]
                assert found.dtype == torch.float64
                setattr(rotary, f"{kind}_inv_freq", found)
            return
        if rotary.rope_type == "default":
            rotary.inv_freq = rotary.compute_default_rope_parameters(rotary.config)[0]
        else:
            compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[rotary.rope_type]
            rotary.inv_freq = compute(rotary.config, torch.device("cpu"))[0]
        assert rotary.inv_freq.dtype == torch.float64


@torch.no_grad()
def logits(model: torch.nn.Module, tokens, left_padding=None) -> torch.Tensor:
    mask = None
    if left_padding is not None:
        mask = (torch.arange(tokens.shape[1]) >= left_padding[:, None]).long()
    return model(input_ids=tokens, attention_mask=mask, use_cache=False).logits


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


@torch.no_grad()
def router_margin(model: torch.nn.Module, run: Callable[[], object]) -> tuple[float, int]:
    """Call `run`. Smallest gap between the least chosen and the best refused score in `model`, of
    groups and blocks too, and how many choices would differ if a group that lost counted as 0, not
    minus infinity."""
    gaps, different = [1.0], [0]

    def gap(scores, kept):
        if kept < scores.shape[-1]:
            ordered = scores.sort(-1, descending=True).values
            gaps.append(float((ordered[:, kept - 1] - ordered[:, kept]).min()))

    def look(module, inputs, outputs):
        if hasattr(module, "per_expert_scale"):  # Gemma-4's returns probabilities
            return gap(outputs[0], module.config.top_k_experts)
        if not hasattr(module, "num_group"):
            # MiniMax-M2 passes its bias to the router.
            bias = getattr(module, "e_score_correction_bias", (*inputs, None)[1])
            biased = bias is not None
            scores = outputs[0].sigmoid() + bias if biased else outputs[0].softmax(-1)
            return gap(scores, module.top_k)
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

    topk = torch.Tensor.topk

    def look_at_indexers(scores, k, dim=-1):
        """An indexer's choice of blocks for a query, or of positions for all queries."""
        if scores.ndim == 1:
            gap(scores[None] / scores.max().clamp_min(1e-9), k)
        for row in scores.flatten(0, 1) if scores.ndim == 3 else ():
            seen = row[row > -1e30]
            if len(seen) > k:
                gap(seen[None] / seen.abs().max(), k)
        return topk(scores, k, dim=dim)

    names = ("topkrouter", "textrouter")
    routers = [m for m in model.modules() if type(m).__name__.lower().endswith(names)]
    assert routers
    hooks = [router.register_forward_hook(look) for router in routers]
    torch.Tensor.topk = look_at_indexers
    run()
    torch.Tensor.topk = topk
    for hook in hooks:
        hook.remove()
    return min(gaps), different[0]


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
    biases = [b for b in model.named_buffers() if b[0].endswith("e_score_correction_bias")]
    for name, parameter in [*model.named_parameters(), *biases]:
        images = any(part in name for part in ("visual", "vision"))
        if not images and parameter.shape[0] > 1:
            original = parameter.data
            parameter.data = original.flip(0)
            moved[name] = relative(logits(model, tokens), truth)
            parameter.data = original
    return min(moved.items(), key=lambda item: item[1])


def disguise(path: Path, case: Case) -> None:
    """Write the model_type of a class that transformers does not load, and its wrapper."""
    file = path / "config.json"
    content = json.loads(file.read_text())
    if case.prefix:
        tensors = load_file(path / "model.safetensors")
        tensors = {case.prefix + name: tensor for name, tensor in tensors.items()}
        tensors["vision_tower.patch_embed.proj.weight"] = torch.ones(4, 3, 2, 2)
        tensors["mm_projector.pre_norm.weight"] = torch.ones(4)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        content = {"text_config": content, "tie_word_embeddings": False} | case.wrapper
    content["model_type"] = case.model_type
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def make(name: str, seed: int) -> dict:
    case, path = CASES[name], HERE / name
    if path.exists():
        shutil.rmtree(path)
    generator = torch.Generator().manual_seed(seed)
    write_checkpoint(path, case, generator)
    vocabulary = case.text["vocab_size"] - case.reserved
    tokens = torch.randint(vocabulary, (2, case.length), generator=generator)
    padded = torch.randint(vocabulary, (3, 21), generator=generator)
    if case.stops is not None:
        for ids in (tokens, padded):
            ids[torch.rand(ids.shape, generator=generator) < 0.15] = case.stops
    padding = torch.tensor([6, 0, 1])

    model = load(path, case)
    single = logits(model, tokens).double()
    to_float64(model)
    with all_float64():
        truth = logits(model, tokens)
        padded_truth = logits(model, padded, padding)
        margin, different = router_margin(model, lambda: logits(model, tokens))
        margin = min(margin, router_margin(model, lambda: logits(model, padded))[0])
        hybrid = case.family.startswith("qwen3_5")
        sensitivity = epsilon_sensitivity(model, tokens, truth) if hybrid else {}
        weakest = weakest_parameter(model, tokens, truth)
        for b, start in enumerate(padding.tolist()):
            alone = logits(model, padded[b : b + 1, start:])
            assert relative(padded_truth[b : b + 1, start:], alone) < 1e-12
    assert truth.dtype == torch.float64
    assert torch.isfinite(truth).all()
    if case.bias[0] < -1 and not different:
        return make(name, seed + 1)
    shown = min([weakest[1], *sensitivity.values()])
    if margin < MIN_MARGIN * case.leniency or shown < MIN_SENSITIVITY * case.leniency:
        print(name, "passes over seed", seed, margin, weakest, sensitivity)
        return make(name, seed + 1)
    golden = {
        "tokens": tokens.int(),
        "logits": truth.to(torch.float32),
        "padded_tokens": padded.int(),
        "left_padding": padding.int(),
        "padded_logits": padded_truth.to(torch.float32),
    }
    save_file(golden, path / "golden.safetensors")
    if case.model_type is not None:
        disguise(path, case)
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
        "choices_that_zero_would_change": different,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    known = json.loads(REPORT.read_text())["cases"] if REPORT.exists() else {}
    for name in args.cases or CASES:
        known[name] = make(name, CASES[name].seed) | {"made_with": versions}
        print(name, json.dumps(known[name]))
    content = {"cases": {k: known[k] for k in CASES if k in known}}
    REPORT.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
