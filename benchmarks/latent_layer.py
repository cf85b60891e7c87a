"""Decode and prefill time of a layer of DeepSeek-V3, here and in mlx-lm, against the limits.

    python benchmarks/latent_layer.py --out layers                 # writes 9 GB once
    python benchmarks/latent_layer.py --out tiny --like deepseek-tiny --tokens 64

A checkpoint of random 4-bit weights with the full shape's three dense layers and one MoE layer is
loaded resident by both. Both then run models that have its layers, or one of them, several times,
as their own generation loops run models (one token ahead of the device); a layer's time is the
difference between models of --many and --few layers (of a prompt: of --prompt-layers), divided:
many, since where few layers wait for the host the difference flatters. The last column has no such
difference: how often the time of the larger model of ours is in mlx-lm's, embedding and logits
included. A layer's weights are more than a GPU's cache, so no layer finds its own there. Each
trial has all four models, one after the other; medians of the trials' differences.

Limits: bytes of all weights and latents that the call reads by --bandwidth, or its multiplications
by --compute (an H100's 989 TFLOP/s of dense bfloat16), whichever is longer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_moeflux.loading import load_model
from mlx_moeflux.synthesize import synthesize


def limits(config, layer, tokens: int, seen: int, args) -> float:
    """Seconds that the weights' bytes, or the multiplications, take at least."""
    parts = dict(tree_flatten(layer.parameters()))
    trunk = sum(a.nbytes for n, a in parts.items() if "switch_mlp" not in n)
    E, K, C = config.num_experts, config.num_experts_per_tok, config.hidden_size
    H, R = config.num_attention_heads, config.kv_lora_rank
    Dn, Dr, Dv = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    q = config.q_lora_rank or C
    products = C * q + q * H * (Dn + Dr) + C * (R + Dr) + H * (Dn + Dv) * R + H * Dv * C
    read = trunk + 2 * seen * (R + Dr)
    if "shared_experts" in layer.mlp:
        experts = sum(a.nbytes for n, a in parts.items() if "switch_mlp" in n)
        read += experts * (1 - (1 - K / E) ** tokens)
        products += 3 * C * config.moe_intermediate_size * (K + (config.n_shared_experts or 0))
    else:
        products += 3 * C * config.intermediate_size
    attention = H * (Dn + Dr + Dv) * (seen + tokens / 2)
    return max(read / args.bandwidth, 2 * tokens * (products + attention) / args.compute)


def split_heads(model) -> None:
    """``embed_q`` and ``unembed_out`` of random numbers in the place of ``kv_b_proj``: the form of
    published checkpoints, which the synthetic ones do not have."""
    dtype = model.model.norm.weight.dtype
    for layer in model.layers:
        attention = layer.self_attn
        if "kv_b_proj" not in attention:
            continue
        spec = attention.kv_b_proj.group_size, attention.kv_b_proj.bits
        attention.use_split_heads()
        for name in ("embed_q", "unembed_out"):
            attention[name].weight = attention[name].weight.astype(dtype)
            attention[name] = attention[name].to_quantized(*spec)
    mx.eval(model.parameters())


class Side:
    """A model with some of its layers several times; `layers`: where its layers are."""

    def __init__(self, model, layers, new_cache: Callable[[], list], **prefill):
        self.model, self.holder, self.prefill_options = model, layers, prefill
        self.own, self.new_cache = list(layers.layers), new_cache

    def repeat(self, layers: list[int], count: int) -> None:
        """`layers` one after the other until there are `count`."""
        self.holder.layers = [self.own[i] for i in islice(cycle(layers), count)]
        forget = getattr(self.model, "forget_steps", None)
        if forget is not None:
            forget()

    def decode(self, seen: int, steps: int) -> float:
        """Seconds a token after `seen` positions."""
        config, cache = self.config, self.new_cache()
        for entry in cache:
            rows = [
                mx.random.normal((1, 1, seen, width)).astype(self.dtype)
                for width in (config.kv_lora_rank, config.qk_rope_head_dim)
            ]
            entry.update_and_fetch(*rows)
        token = mx.array([[5]])
        for i in range(steps + 4):
            if i == 4:
                mx.eval(token)
                start = time.perf_counter()
            token = mx.argmax(self.model(token, cache=cache)[:, -1], axis=-1)[None]
            mx.async_eval(token)
        mx.eval(token)
        return (time.perf_counter() - start) / steps

    def prefill(self, tokens: int) -> float:
        """Seconds of a prompt."""
        ids, cache = mx.random.randint(0, 1000, (1, tokens)), self.new_cache()
        mx.eval(ids)
        start = time.perf_counter()
        mx.eval(self.model(ids, cache=cache, **self.prefill_options))
        return time.perf_counter() - start


def a_layer(
    sides: list[Side],
    layers: list[int],
    counts: tuple[int, int],
    repeats: int,
    call: Callable[[Side], float],
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds a layer on each side, from models of so many; seconds of the larger models.

    A trial has both models of both sides, one after the other: hosts get faster and slower within
    seconds, and what is between two trials is not a layer's.
    """
    times = np.zeros((1 + repeats, 2, len(sides)))
    for trial in times:
        for count, row in zip(counts, trial, strict=True):
            for i, side in enumerate(sides):
                side.repeat(layers, count)
                row[i] = call(side)
    few, many = times[1:].swapaxes(0, 1)  # the first trial compiles
    return np.median(many - few, axis=0) / (counts[1] - counts[0]), np.median(many, axis=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="checkpoint, written if missing")
    parser.add_argument("--like", default="deepseek-v3")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--few", type=int, default=12, help="layers of the smaller models")
    parser.add_argument("--many", type=int, default=36, help="layers of the larger models")
    parser.add_argument("--prompt-layers", type=int, nargs=2, default=[4, 8])
    parser.add_argument("--tokens", type=int, nargs="*", default=[512, 2048], help="of prompts")
    parser.add_argument(
        "--seen", type=int, nargs="+", default=[2048], help="positions in the cache of a decode"
    )
    parser.add_argument("--steps", type=int, default=24, help="tokens of a trial of decoding")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bandwidth", type=float, default=3.0e12, help="bytes a second")
    parser.add_argument("--compute", type=float, default=989e12, help="operations a second")
    parser.add_argument("--kernels", default=None, help="such as latent_attention=reference")
    args = parser.parse_args()
    if not args.out.exists():
        synthesize(args.like, args.out, layers=args.layers)
    from mlx_lm.models.cache import KVCache
    from mlx_lm.utils import load_model as mlx_lm_load

    ours = load_model(args.out, expert_memory="100%", kernels=args.kernels)
    split_heads(ours)
    theirs, _ = mlx_lm_load(args.out)
    mx.eval(theirs.parameters())
    compare(ours, theirs, lambda: [KVCache() for _ in theirs.model.layers], args)


def compare(ours, theirs, their_cache: Callable[[], list], args) -> None:
    """Print the table for two models of the same layers."""
    own = list(ours.layers)
    sides = [
        Side(ours, ours.model, ours.make_cache, last_only=True),
        Side(theirs, theirs.model, their_cache),
    ]
    for side in sides:
        side.config, side.dtype = ours.config, ours.model.norm.weight.dtype
    sparse = [i for i, layer in enumerate(own) if "shared_experts" in layer.mlp]
    dense = [i for i in range(len(own)) if i not in sparse]
    kinds = {"dense": dense[:1], "MoE": sparse[:1], f"{len(dense)}+{len(sparse)}": dense + sparse}
    print("layer  call          ours ms  mlx-lm ms   times  limit ms  of limit  whole model, times")
    for kind, layers in ((k, v) for k, v in kinds.items() if v):
        calls = [(f"decode {S}", 1, S, lambda s, S=S: s.decode(S, args.steps)) for S in args.seen]
        calls += [(f"prefill {T}", T, 0, lambda s, T=T: s.prefill(T)) for T in args.tokens]
        for label, T, seen, call in calls:
            counts = (args.few, args.many) if T == 1 else tuple(args.prompt_layers)
            (mine, its), whole = a_layer(sides, layers, counts, args.repeats, call)
            each = [limits(ours.config, own[i], T, seen, args) for i in layers]
            limit = statistics.mean(each)
            print(
                f"{kind:<6} {label:<12} {1e3 * mine:>8.3f} {1e3 * its:>10.3f} {its / mine:>7.2f} "
                f"{1e3 * limit:>9.3f} {100 * limit / mine:>8.1f}% {whole[1] / whole[0]:>19.2f}",
                flush=True,
            )
    for side in sides:
        side.holder.layers = side.own


if __name__ == "__main__":
    main()
