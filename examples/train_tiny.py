"""Train a small Qwen3.5-MoE on Python's standard library, optionally with another router.

    python examples/train_tiny.py --out tiny                    # the bundled model's settings
    python examples/train_tiny.py --preset smoke --out tiny     # a minute on a CPU
    python examples/train_tiny.py --preset smoke --router sigmoid --out other

The model is the package's `mlx.nn` class. Its experts run through a store for training
(`DenseExperts`), because a training batch uses every expert; `--router` replaces the router. The
result is rounded to 4 bits (groups of 64), which costs 1 to 2 %, and written in mlx-lm's layout.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import math
import sysconfig
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from mlx_moeflux.experts.store import ExpertStore
from mlx_moeflux.experts.telemetry.stats import ExpertStats
from mlx_moeflux.kernels.moe.router import top_k_ids
from mlx_moeflux.models.moe import SwitchGLU
from mlx_moeflux.models.qwen3_5_moe import Config, Model

END = "<|endoftext|>"
# As in Qwen's pattern: single digits, and runs of spaces whose last one belongs to the word.
WORDS = r"(?:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\w]?\w+|\d| ?[^\s\w]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GROUP = 64


@dataclass(frozen=True)
class Preset:
    layers: int
    hidden: int
    experts: int
    vocabulary: int
    steps: int
    batch: int
    length: int
    files: int | None
    held_out: int | None


PRESETS = {
    "bundled": Preset(6, 256, 32, 4096, 700, 32, 1024, None, None),
    "smoke": Preset(3, 64, 8, 512, 12, 4, 64, 12, 4000),
}


def corpus(limit: int | None, characters: int | None) -> tuple[list[str], list[str]]:
    """Read the standard library; return texts for training and held-out texts (1 in 25 by hash).

    limit: Number of files to consider. characters: Length to which held-out files are cut.
    """
    root = Path(sysconfig.get_path("stdlib"))
    train, held_out = [], []
    for path in sorted(root.rglob("*.py"))[:limit]:
        name = path.relative_to(root).as_posix()
        if "site-packages" in name or "dist-packages" in name:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")
        (held_out if number % 25 == 0 else train).append(text)
    return train, [text[:characters] for text in held_out or train[:1]]


def train_tokenizer(texts: list[str], vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    end = tokenizer.token_to_id(END)
    return [np.array([end, *e.ids], dtype=np.int32) for e in tokenizer.encode_batch(texts)]


def make_config(preset: Preset) -> Config:
    return Config(
        vocab_size=preset.vocabulary,
        hidden_size=preset.hidden,
        num_hidden_layers=preset.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=128 if preset.hidden > 64 else 64,
        num_experts=preset.experts,
        num_experts_per_tok=4 if preset.experts > 8 else 2,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        partial_rotary_factor=0.25,
        max_position_embeddings=8192,
        full_attention_interval=3,
        tie_word_embeddings=True,
    )


class DenseExperts(ExpertStore):
    """A store for training that computes every expert for every token, with weight 0 where the
    router did not choose it. The result is a sparse store's, in a few large matrix products."""

    def __init__(self, blocks: dict[int, SwitchGLU], num_experts: int):
        self.blocks, self.layers, self.num_experts = blocks, tuple(blocks), num_experts
        self.account = ExpertStats(self.layers)  # empty: every expert computes every token
        self.load = []  # per layer: (mean probability, share of choices), for the balance loss

    def experts(self, layer: int, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        switch = self.blocks[layer]
        N, E = x.shape[0], self.num_experts
        gates = mx.put_along_axis(mx.zeros((N, E)), ids, weights, axis=1)  # [N, E]
        wide = [p.weight.reshape(-1, x.shape[1]) for p in (switch.gate_proj, switch.up_proj)]
        hidden = nn.silu(x @ wide[0].T) * (x @ wide[1].T)  # [N, E F]
        hidden = hidden.reshape(N, E, -1) * gates[..., None].astype(x.dtype)
        down = switch.down_proj.weight.transpose(0, 2, 1).reshape(-1, x.shape[1])
        chosen = mx.stop_gradient((gates > 0).astype(mx.float32).mean(axis=0))
        self.load.append((gates.mean(axis=0), chosen))
        return (hidden.reshape(N, -1) @ down).astype(mx.float32)

    def stats(self) -> ExpertStats:
        return self.account

    def balance_loss(self) -> mx.array:
        """Return Switch Transformer's auxiliary loss (arXiv:2101.03961, equation 4), a mean."""
        total = sum(self.num_experts * (p * f).sum() for p, f in self.load)
        count, self.load = len(self.load), []
        return total / count

    def close(self) -> None:
        self.blocks = {}


class SigmoidRouter:
    """A router with sigmoid scores, of which the K largest are normalised, as in DeepSeek-V3."""

    def __init__(self, num_experts_per_tok: int):
        self.num_experts_per_tok = num_experts_per_tok

    def __call__(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        scores = mx.sigmoid(logits.astype(mx.float32))
        ids = mx.stop_gradient(mx.sort(top_k_ids(scores, self.num_experts_per_tok), axis=-1))
        weights = mx.take_along_axis(scores, ids, axis=-1)
        return ids.astype(mx.uint32), weights / weights.sum(axis=-1, keepdims=True)


def build(preset: Preset, router: str) -> tuple[Model, DenseExperts]:
    config = make_config(preset)
    swapped = SigmoidRouter(config.num_experts_per_tok) if router == "sigmoid" else None
    model = Model(config, router=swapped)
    for block in model.moe_blocks().values():
        block.switch_mlp = SwitchGLU(
            config.num_experts, config.hidden_size, config.moe_intermediate_size
        )
    store = DenseExperts(
        {i: block.switch_mlp for i, block in model.moe_blocks().items()}, config.num_experts
    )
    model.set_store(store)
    model.model.embed_tokens.weight = model.model.embed_tokens.weight * 0.5
    model.train()
    mx.eval(model.parameters())
    return model, store


def stored_bits(path: str, shape: tuple[int, ...]) -> int | None:
    """Return 8 for router matrices, 4 for other matrices, None for parameters kept as floats."""
    if len(shape) < 2 or "conv1d" in path or shape[-1] % GROUP:
        return None
    return 8 if path.endswith(("mlp.gate.weight", "shared_expert_gate.weight")) else 4


def cast(parameters: dict, dtype: mx.Dtype) -> dict:
    """Cast parameters to `dtype`, except those that the forward pass requires in float32."""
    return tree_map_with_path(
        lambda path, w: w if path.endswith(("A_log", "dt_bias")) else w.astype(dtype), parameters
    )


def rounded(parameters: dict) -> dict:
    """Return the parameters with the rounding of :func:`export`, in float32."""

    def view(path: str, w: mx.array) -> mx.array:
        bits = stored_bits(path, w.shape)
        if bits is None:
            return w
        parts = mx.quantize(w.reshape(-1, w.shape[-1]).astype(mx.bfloat16), GROUP, bits)
        return mx.dequantize(*parts, GROUP, bits).reshape(w.shape).astype(mx.float32)

    return tree_map_with_path(view, parameters)


def batches(files: list[np.ndarray], preset: Preset, seed: int):
    """Yield random windows [B, T + 1] of the shuffled, concatenated files, without end."""
    random = np.random.default_rng(seed)
    width = preset.length + 1
    while True:
        stream = np.concatenate([files[i] for i in random.permutation(len(files))])
        stream = stream[random.integers(preset.length) :]
        rows = stream[: len(stream) // width * width].reshape(-1, width)
        if len(rows) < preset.batch:
            rows = np.tile(rows, (preset.batch // len(rows) + 1, 1))
        rows = rows[random.permutation(len(rows))]
        for start in range(0, len(rows) - preset.batch + 1, preset.batch):
            yield mx.array(rows[start : start + preset.batch])


def train(model: Model, store: DenseExperts, files: list[np.ndarray], args) -> None:
    preset = args.preset
    # A rate that falls makes the model memorise a text this small: held-out loss rises.
    schedule = optim.linear_schedule(1e-6, args.learning_rate, min(200, preset.steps))
    optimizer = optim.AdamW(schedule, betas=[0.9, 0.95], weight_decay=0.1, bias_correction=True)
    optimizer.init(model.trainable_parameters())
    start = resume(model, optimizer, args.out)
    dtype = mx.float32 if mx.default_device().type == mx.cpu else mx.bfloat16

    def loss_of(parameters: dict, batch: mx.array) -> mx.array:
        model.update(cast(parameters, dtype))
        logits = model(batch[:, :-1]).astype(mx.float32)
        text = nn.losses.cross_entropy(logits, batch[:, 1:], reduction="mean")
        return text + args.balance * store.balance_loss(), text

    @mx.compile
    def step(parameters: dict, state: dict, batch: mx.array):
        optimizer.state = state
        (_, text), gradients = mx.value_and_grad(loss_of)(parameters, batch)
        gradients, norm = optim.clip_grad_norm(gradients, 1.0)
        return optimizer.apply_gradients(gradients, parameters), optimizer.state, text, norm

    parameters, state = model.trainable_parameters(), optimizer.state
    source, began, seen = batches(files, preset, args.seed + start), time.perf_counter(), []
    for i in range(start, preset.steps):
        parameters, state, text, norm = step(parameters, state, next(source))
        mx.eval(parameters, state, text, norm)
        seen.append(text.item())
        if (i + 1) % args.report == 0 or i + 1 == preset.steps:
            seconds = (time.perf_counter() - began) / (i + 1 - start)
            print(
                f"step {i + 1}/{preset.steps}  loss {np.mean(seen[-args.report :]):.4f}  "
                f"gradient {norm.item():.2f}  {seconds:.3f} s/step",
                flush=True,
            )
        stop = args.minutes and time.perf_counter() - began > args.minutes * 60
        if (i + 1) % args.checkpoint_every == 0 or stop:
            checkpoint(args.out, parameters, state, i + 1)
        if stop:
            print(f"stopped after {args.minutes} minutes; the same command goes on from here")
            break
    model.update(parameters)
    mx.eval(model.parameters())


def checkpoint(out: Path, parameters: dict, state: dict, step: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    flat = {f"p.{k}": v for k, v in tree_flatten(parameters)}
    flat |= {f"s.{k}": v for k, v in tree_flatten(state)} | {"step_count": mx.array(step)}
    mx.save_safetensors(str(out / "training.tmp.safetensors"), flat)
    (out / "training.tmp.safetensors").replace(out / "training.safetensors")


def resume(model: Model, optimizer: optim.Optimizer, out: Path) -> int:
    """Load the checkpoint in `out` if there is one; return the next step."""
    if not (out / "training.safetensors").exists():
        return 0
    flat = mx.load(str(out / "training.safetensors"))
    step = flat.pop("step_count").item()
    model.update(tree_unflatten([(k[2:], v) for k, v in flat.items() if k.startswith("p.")]))
    optimizer.state = tree_unflatten([(k[2:], v) for k, v in flat.items() if k.startswith("s.")])
    print(f"going on at step {step}")
    return step


def bits_per_byte(model: Model, files: list[np.ndarray], texts: list[str]) -> float:
    """Return the loss on held-out files, each in windows of 2048 tokens from its beginning."""
    model.eval()
    bits = 0.0
    for ids in files:
        for start in range(0, len(ids) - 1, 2048):
            window = mx.array(ids[start : start + 2049])[None]
            logits = model(window[:, :-1]).astype(mx.float32)
            loss = nn.losses.cross_entropy(logits, window[:, 1:], reduction="sum")
            mx.eval(loss)
            bits += loss.item() / math.log(2)
            if hasattr(model.store, "load"):
                model.store.load = []
    return bits / sum(len(t.encode()) for t in texts)


def export(model: Model, tokenizer: Tokenizer, out: Path) -> None:
    """Write mlx-lm's layout: 4-bit weights, 8-bit router, tokenizer, config."""
    out.mkdir(parents=True, exist_ok=True)
    weights, overrides = {}, {}
    for name, w in tree_flatten(model.parameters()):
        bits, name = stored_bits(name, w.shape), f"language_model.{name}"
        if bits is None:
            dtype = mx.float32 if name.endswith("A_log") else mx.bfloat16
            weights[name] = w.astype(dtype)
            continue
        base = name.removesuffix(".weight")
        parts = mx.quantize(w.astype(mx.bfloat16), GROUP, bits)
        weights |= zip((name, f"{base}.scales", f"{base}.biases"), parts, strict=True)
        if bits != 4:
            overrides[base] = {"group_size": GROUP, "bits": bits}
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "mlx"})
    text = asdict(model.config)
    text |= {
        "model_type": "qwen3_5_moe_text",
        "layer_types": ["linear_attention" if model.config.is_linear(i) else "full_attention"
                        for i in range(model.config.num_hidden_layers)],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": text.pop("rope_theta"),
            "partial_rotary_factor": text.pop("partial_rotary_factor"),
        },
    }  # fmt: skip
    end = tokenizer.token_to_id(END)
    quantization = {"group_size": GROUP, "bits": 4, "mode": "affine", **overrides}
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "eos_token_id": end,
        "tie_word_embeddings": True,
        "text_config": text,
        "quantization": quantization,
        "quantization_config": quantization,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    special = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "model_max_length": model.config.max_position_embeddings,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(special, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory for the result")
    parser.add_argument("--preset", choices=PRESETS, default="bundled")
    parser.add_argument("--router", choices=["softmax", "sigmoid"], default="softmax")
    parser.add_argument("--steps", type=int, help="instead of the preset's")
    parser.add_argument("--minutes", type=float, help="stop and save after this time")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the balance loss")
    parser.add_argument("--checkpoint-every", type=int, default=1000)
    parser.add_argument("--report", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.preset = PRESETS[args.preset]
    if args.steps:
        args.preset = replace(args.preset, steps=args.steps)
    mx.random.seed(args.seed)

    train_texts, held_texts = corpus(args.preset.files, args.preset.held_out)
    tokenizer = train_tokenizer(train_texts, args.preset.vocabulary)
    train_files, held_files = encode(tokenizer, train_texts), encode(tokenizer, held_texts)
    raw = "".join(held_texts).encode()
    print(
        f"{sum(map(len, train_files)):,} tokens to train on, {len(raw):,} bytes held out, "
        f"{len(raw) / sum(map(len, held_files)):.2f} bytes a token",
        flush=True,
    )
    model, store = build(args.preset, args.router)
    print(f"{sum(p.size for _, p in tree_flatten(model.parameters())):,} parameters", flush=True)
    train(model, store, train_files, args)
    plain = bits_per_byte(model, held_files, held_texts)
    model.update(rounded(model.parameters()))
    stored = bits_per_byte(model, held_files, held_texts)
    squeezed = 8 * len(lzma.compress(raw, preset=9)) / len(raw)
    export(model, tokenizer, args.out)
    size = sum(p.stat().st_size for p in args.out.iterdir() if p.name != "training.safetensors")
    print(
        f"held-out bits per byte: {plain:.4f} before rounding, {stored:.4f} as stored, "
        f"xz -9 {squeezed:.4f}; {size / 1e6:.2f} MB in {args.out}"
    )


if __name__ == "__main__":
    main()
