"""Train the bundled model's head of multi-token prediction, on a CPU.

    python examples/train_head.py --out with_head
    mlx_moeflux generate --model with_head --drafts mtp --stats -p "def insert(self, index):"

The model does not change. Its hidden states are computed once, over files of
examples/train_tiny.py and over texts that it writes itself, which are what drafts are for. The head
is the class that drafts. It begins with the weights of the model's last layer, and learns which
token the model takes after next. The result is a copy of the checkpoint with ``mtp.*``, rounded as
the model is.
"""

from __future__ import annotations

import argparse
import ast
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten
from train_tiny import GROUP, corpus, stored_bits

from mlx_moeflux import batch_generate, generate, load, load_model
from mlx_moeflux.checkpoint.names import stored_head_name
from mlx_moeflux.experts.store import ExpertStore
from mlx_moeflux.experts.telemetry.stats import ExpertStats
from mlx_moeflux.kernels.linear.project import project
from mlx_moeflux.kernels.linear.weight import Weight
from mlx_moeflux.kernels.moe.add_shared import add_shared
from mlx_moeflux.loading import BUNDLED_MODEL
from mlx_moeflux.models.moe import SwitchGLU
from mlx_moeflux.models.mtp import PredictionHead

# Tokens of a row, and of the beginning of one that the model writes.
WIDTH, PROMPT = 256, 24
# Temperatures at which the model writes, in equal parts.
TEMPERATURES = (0.0, 0.7, 1.0)


def rows_of(texts: list[list[int]]) -> np.ndarray:
    """Return the concatenated ids as rows ``[N, WIDTH]``; the rest is left out."""
    stream = np.concatenate([np.array(ids, np.uint32) for ids in texts])
    return stream[: len(stream) // WIDTH * WIDTH].reshape(-1, WIDTH)


def written(model, tokenizer, rows: np.ndarray, seed: int) -> list[list[int]]:
    """Return texts that go on from the beginnings of rows of ids."""
    prompts, texts = [row[:PROMPT].tolist() for row in rows], []
    for i, temp in enumerate(TEMPERATURES):
        some = prompts[i :: len(TEMPERATURES)]
        replies = batch_generate(
            *(model, tokenizer, some),
            max_tokens=WIDTH - PROMPT,
            return_token_ids=True,
            temp=temp,
            seed=seed,
        ).token_ids
        texts += [a + b for a, b in zip(some, replies, strict=True)]
    return texts


def hidden_states(model, rows: np.ndarray) -> np.ndarray:
    """Return the last layer's output for rows of ids ``[N, T]``, ``[N, T, C]`` in float16."""
    parts = []
    for start in range(0, len(rows), 8):
        with model.collect_hidden() as found:
            mx.eval(model(mx.array(rows[start : start + 8]), last_only=True))
        parts.append(np.array(found[0].astype(mx.float16)))
    return np.concatenate(parts)


def floats_of(directory: Path) -> dict[str, mx.array]:
    """Return the parameters of a checkpoint as floats, under the model's names."""
    stored = mx.load(str(directory / "model.safetensors"))
    floats = {}
    for name, w in stored.items():
        base, _, part = name.rpartition(".")
        if f"{base}.scales" in stored:
            if part != "weight":
                continue
            scales, biases = stored[f"{base}.scales"], stored[f"{base}.biases"]
            bits = 32 * w.shape[-1] // (GROUP * scales.shape[-1])
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
            w = mx.dequantize(w, scales, biases, GROUP, bits)
        floats[name.removeprefix("language_model.")] = w.astype(mx.float32)
    return floats


@mx.custom_function
def product(x: mx.array, w: mx.array) -> mx.array:
    """Return x ``[..., N, in]`` times the transpose of w ``[..., out, in]``, through numpy's BLAS:
    MLX's own products on a CPU take ten times as long. Evaluates both."""
    return mx.array(np.array(x) @ np.array(w).swapaxes(-1, -2))


@product.vjp
def product_gradients(primals, cotangent, _):
    x, w, g = (np.array(array) for array in (*primals, cotangent))
    return mx.array(g @ w), mx.array(g.swapaxes(-1, -2) @ x)


@dataclass(frozen=True)
class Product:
    """A matrix as ``project`` and ``add_shared`` take it."""

    weight: Weight
    precise: ClassVar[bool] = False

    @property
    def outs(self) -> tuple[int, ...]:
        return self.weight.outs

    def matmul(self, x: mx.array) -> mx.array:
        rows = product(x.reshape(-1, x.shape[-1]), self.weight.dense(x.dtype))
        return rows.reshape(*x.shape[:-1], -1)


def project_blas(x, weights, **options):
    """The operation ``project`` with gradients, through :func:`product`."""
    return project(x, [Product(weight) for weight in weights], **options)


def add_shared_blas(residual, experts, gate, up, down, **options):
    """The operation ``add_shared`` with gradients, through :func:`product`."""
    return add_shared(residual, experts, gate, up, Product(down), **options)


KERNELS = {"project": project_blas, "add_shared": add_shared_blas}


class TrainedExperts(ExpertStore):
    """A store for training that computes the chosen experts, one after another."""

    def __init__(self, switch: SwitchGLU, num_experts: int):
        self.switch, self.num_experts, self.layers = switch, num_experts, (0,)
        self.account = ExpertStats(self.layers)

    def experts(self, layer: int, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        chosen, y = np.array(ids), mx.zeros(x.shape)
        parts = (self.switch.gate_proj, self.switch.up_proj, self.switch.down_proj)
        matrices = zip(*(mx.split(part.weight, self.num_experts) for part in parts), strict=True)
        for expert, (gate, up, down) in enumerate(matrices):
            rows, columns = map(mx.array, np.nonzero(chosen == expert))
            if rows.size:
                tokens = x[rows]
                inner = nn.silu(product(tokens, gate[0])) * product(tokens, up[0])
                share = weights[rows, columns][:, None]
                y = y.at[rows].add(product(inner, down[0]) * share)
        return y

    def stats(self) -> ExpertStats:
        return self.account

    def close(self) -> None:
        """Do nothing: the experts are the head's parameters."""


@mx.custom_function
def loss_of_choices(read: mx.array, matrix: mx.array, ids: mx.array) -> mx.array:
    """Return the mean cross-entropy of ids ``[N]`` under the logits of read ``[N, C]`` and the
    output matrix ``[V, C]``, which does not learn. Evaluates all."""
    p, ids = probabilities(read, matrix), np.array(ids)
    return mx.array(-np.log(p[np.arange(len(ids)), ids] + 1e-30).mean())


@loss_of_choices.vjp
def loss_gradients(primals, cotangent, _):
    read, matrix, ids = primals
    g = probabilities(read, matrix)
    g[np.arange(len(g)), np.array(ids)] -= 1
    g *= cotangent.item() / len(g)
    return mx.array(g @ np.array(matrix)), mx.zeros_like(matrix), mx.zeros_like(ids)


def probabilities(read: mx.array, matrix: mx.array) -> np.ndarray:
    """Return the softmax ``[N, V]`` of the logits of read ``[N, C]``."""
    logits = np.array(read) @ np.array(matrix).T
    logits = np.exp(logits - logits.max(axis=1, keepdims=True))
    return logits / logits.sum(axis=1, keepdims=True)


def likeliest(read: mx.array, matrix: mx.array) -> mx.array:
    """Return the ids ``[N]`` of the largest logits of ``[..., C]``."""
    rows = np.array(read).reshape(-1, read.shape[-1])
    return mx.array((rows @ np.array(matrix).T).argmax(axis=1))


def build(model, directory: Path) -> tuple[PredictionHead, mx.array]:
    """Return a head with the weights of the model's last layer, for training, and the output
    matrix ``[V, C]``."""
    floats, config = floats_of(directory), model.config
    model.train()
    head = model.HEAD(model)
    experts = SwitchGLU(config.num_experts, config.hidden_size, config.moe_intermediate_size)
    head.body.moe_blocks()[0].switch_mlp = experts
    head.body.set_store(TrainedExperts(experts, config.num_experts))
    last = f"model.layers.{config.num_hidden_layers - 1}."
    own = {n.replace(last, "model.layers.0."): w for n, w in floats.items() if n.startswith(last)}
    own["model.norm.weight"] = floats["model.norm.weight"]
    # Hidden states pass; the embedding comes in as it proves useful.
    C = config.hidden_size
    own["fc.weight"] = mx.concatenate([mx.zeros((C, C)), mx.eye(C)], axis=1)
    head.load_weights(list(own.items()), strict=False)
    return head, floats["model.embed_tokens.weight"]


def loss_of(head: PredictionHead, matrix: mx.array, tokens: mx.array, hidden: mx.array):
    """Return the loss of the drafts after tokens ``[B, T]`` but the first, against what the model
    takes there. hidden: The last layer's output, ``[B, T, C]``."""
    cache, own = head.make_cache(), head.entering(hidden)
    for entry in cache:
        entry.scratch = True
    read = head(own[:, :-1], tokens[:, 1:], cache)
    ids = likeliest(own[:, 1:], matrix)
    return loss_of_choices(read.reshape(-1, read.shape[-1]), matrix, ids)


def train(head: PredictionHead, matrix: mx.array, rows: np.ndarray, hidden: np.ndarray, args):
    """Update the head by `args.steps` steps on random rows of ids ``[N, T]``."""
    rate, first = args.learning_rate, max(args.steps // 12, 1)
    rises, falls = optim.linear_schedule(0.0, rate, first), optim.cosine_decay(rate, args.steps)
    optimizer = optim.AdamW(optim.join_schedules([rises, falls], [first]), betas=[0.9, 0.95])
    parameters, random = head.trainable_parameters(), np.random.default_rng(args.seed)
    began, seen = time.perf_counter(), []

    def loss(parameters, tokens, hidden):
        head.update(parameters)
        return loss_of(head, matrix, tokens, hidden)

    for i in range(args.steps):
        some = random.choice(len(rows), args.batch, replace=False)
        batch = mx.array(rows[some]), mx.array(hidden[some]).astype(mx.float32)
        value, gradients = mx.value_and_grad(loss)(parameters, *batch)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        parameters = optimizer.apply_gradients(gradients, parameters)
        mx.eval(parameters, optimizer.state)
        seen.append(value.item())
        if (i + 1) % 20 == 0 or i + 1 == args.steps:
            seconds = (time.perf_counter() - began) / (i + 1)
            mean = np.mean(seen[-20:])
            print(f"step {i + 1}/{args.steps}  loss {mean:.4f}  {seconds:.2f} s/step", flush=True)
    head.update(parameters)


def save(head: PredictionHead, directory: Path, out: Path) -> int:
    """Write a copy of a checkpoint with the head; return the bytes of the head."""
    rules, weights, router = head.body.config.name_rules(), {}, {}
    for path, w in tree_flatten(head.parameters()):
        bits, name = stored_bits(path, w.shape), stored_head_name(path, rules)
        if bits is None:
            weights[name] = w.astype(mx.bfloat16)
            continue
        base = name.removesuffix(".weight")
        parts = mx.quantize(w.astype(mx.bfloat16), GROUP, bits)
        weights |= zip((name, f"{base}.scales", f"{base}.biases"), parts, strict=True)
        if bits != 4:
            router[base] = {"group_size": GROUP, "bits": bits}
    kept = mx.load(str(directory / "model.safetensors"))
    shutil.copytree(directory, out, dirs_exist_ok=True)
    file = out / "model.safetensors"
    mx.save_safetensors(str(file), kept | weights, metadata={"format": "mlx"})
    config = json.loads((out / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    for key in ("quantization", "quantization_config"):
        config[key] |= router
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return sum(w.nbytes for w in weights.values())


def held_out_prompts(texts: list[str], count: int) -> dict[str, list[str]]:
    """Return `count` beginnings of at most 200 characters of methods and of docstrings, each of
    another held-out text, the longest ones."""
    methods, docstrings = [], []
    for text in sorted(texts, key=len, reverse=True):
        if (start := text.find("\n    def ", len(text) // 2)) >= 0:
            methods.append(text[start:][:200])
        if len(docstring := ast.get_docstring(ast.parse(text)) or "") > 100:
            docstrings.append(f'"""{docstring[:200]}')
    return {"code": methods[:count], "prose": docstrings[:count]}


def accepted(directory: Path, prompts: list[str], temp: float) -> float:
    """Return the accepted share of one draft a step, in replies of 100 tokens."""
    model, tokenizer = load(directory, drafts=1)
    with model:
        for i, prompt in enumerate(prompts):
            generate(model, tokenizer, prompt, max_tokens=100, temp=temp, seed=i)
        counts = model.store.stats().drafts
    return counts.accepted / counts.proposed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory for the result")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=8, help="rows of a step")
    parser.add_argument(
        "--rows", type=int, default=3000, help="of tokens; the model writes four in ten"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--prompts", type=int, default=12, help="of each kind, to measure with")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    mx.random.seed(args.seed)

    train_texts, held_out = corpus(None, None)
    model, tokenizer = load(BUNDLED_MODEL)
    files = rows_of([[tokenizer.eos_token_id, *tokenizer.encode(text)] for text in train_texts])
    files = files[np.random.default_rng(args.seed).permutation(len(files))[: args.rows]]
    begun, files = np.split(files, [args.rows * 4 // 10])
    rows = np.concatenate([rows_of(written(model, tokenizer, begun, args.seed)), files])
    hidden = hidden_states(model, rows)
    model.close()

    model = load_model(BUNDLED_MODEL, kernels=KERNELS)
    head, matrix = build(model, BUNDLED_MODEL)
    train(head, matrix, rows, hidden, args)
    nbytes = save(head, BUNDLED_MODEL, args.out)
    print(f"{nbytes / 1e6:.2f} MB of mtp.* in {args.out}")
    for kind, prompts in held_out_prompts(held_out, args.prompts).items():
        for temp in (0.0, 0.7):
            share = accepted(args.out, prompts, temp)
            print(f"{kind}, temperature {temp}: {share:.1%} of the drafts accepted", flush=True)


if __name__ == "__main__":
    main()
