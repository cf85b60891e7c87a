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

import torch
import transformers
from family_cases import CASES, Case
from make_golden import GAIN, HERE, MIN_MARGIN, MIN_SENSITIVITY, all_float64, logits, relative
from make_golden import randomise as randomise_delta
from safetensors.torch import load_file, save_file

REPORT = HERE / "families.json"


def classes(family: str):
    """The config and model class of a model_type."""
    config = transformers.CONFIG_MAPPING[family]
    return config, transformers.AutoModelForCausalLM._model_mapping[config]


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
    if case.family == "qwen3_next":
        randomise_delta(model, case.text, generator)
    else:
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

    def look(module, inputs, outputs):
        if not hasattr(module, "num_group"):
            # MiniMax-M2 passes its bias to the router.
            biased = len(inputs) > 1
            scores = outputs[0].sigmoid() + inputs[1] if biased else outputs[0].softmax(-1)
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


def disguise(path, case: Case) -> None:
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
    if case.model_type is not None:
        disguise(path, case)
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
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    known = json.loads(REPORT.read_text())["cases"] if REPORT.exists() else {}
    for name in args.cases or CASES:
        known[name] = make(name, CASES[name].seed) | {"made_with": versions}
        print(name, json.dumps(known[name]))
    content = {"cases": {k: known[k] for k in CASES if k in known}}
    REPORT.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
