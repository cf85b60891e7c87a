"""Decode and prefill time of a layer of DeepSeek-V3, here and in mlx-lm, against the limits.

    python benchmarks/latent_layer.py --out layers                 # writes 9 GB once
    python benchmarks/latent_layer.py --out tiny --like deepseek-tiny --tokens 64

A checkpoint of random 4-bit weights with the full shape's three dense layers and one MoE layer is
loaded resident by both. Times are medians of calls that are evaluated one by one, so they hold the
host's part too. Limits: bytes of all weights that the call reads by --bandwidth, or its
multiplications by --compute, whichever is longer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_moeflux.loading import load_model
from mlx_moeflux.synthesize import synthesize


def median_seconds(call, repeats: int) -> float:
    for _ in range(3):
        mx.eval(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        mx.eval(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def limits(config, layer, tokens: int, seen: int, args) -> float:
    """Seconds that the weights' bytes, or the multiplications, take at least."""
    trunk = sum(a.nbytes for n, a in tree_flatten(layer.parameters()) if "switch_mlp" not in n)
    E, K, C, F = config.num_experts, config.num_experts_per_tok, config.hidden_size, 0
    H, R = config.num_attention_heads, config.kv_lora_rank
    Dn, Dr, Dv = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    q = config.q_lora_rank or C
    products = C * q + q * H * (Dn + Dr) + C * (R + Dr) + H * (Dn + Dv) * R + H * Dv * C
    if "shared_experts" in layer.mlp:
        F = config.moe_intermediate_size
        experts = sum(a.nbytes for n, a in tree_flatten(layer.parameters()) if "switch_mlp" in n)
        asked = E * (1 - (1 - K / E) ** tokens)
        read = trunk + experts / E * asked
        products += 3 * C * F * (K + (config.n_shared_experts or 0))
    else:
        read = trunk
        products += 3 * C * config.intermediate_size
    attention = H * (Dn + Dr + Dv) * (seen + tokens / 2)
    return max(read / args.bandwidth, 2 * tokens * (products + attention) / args.compute)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="checkpoint, written if missing")
    parser.add_argument("--like", default="deepseek-v3")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--seen", type=int, default=2048, help="positions in the cache of a decode")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--bandwidth", type=float, default=3.0e12, help="bytes a second")
    parser.add_argument("--compute", type=float, default=600e12, help="operations a second")
    parser.add_argument("--kernels", default=None, help="such as latent_attention=fused")
    args = parser.parse_args()
    if not args.out.exists():
        synthesize(args.like, args.out, layers=args.layers)
    from mlx_lm.models.base import create_attention_mask
    from mlx_lm.models.cache import KVCache
    from mlx_lm.utils import load_model as mlx_lm_load

    ours = load_model(args.out, expert_memory="100%", kernels=args.kernels)
    theirs, _ = mlx_lm_load(args.out)
    mx.eval(theirs.parameters())
    config, dtype = ours.config, ours.model.norm.weight.dtype
    hidden = np.random.default_rng(0).standard_normal((1, max(*args.tokens, args.seen), 1))
    hidden = mx.array(hidden).astype(dtype) + mx.random.normal((1, 1, config.hidden_size)).astype(
        dtype
    )

    def call_ours(i: int, x: mx.array, cache):
        def call():
            entry = ours.make_cache()[i] if cache is None else cache
            columns = entry.columns
            y = ours.layers[i](x, entry, chunk=ours.prefill_chunk)
            entry.columns = columns
            return y

        return call

    def call_theirs(i: int, x: mx.array, cache):
        def call():
            entry = KVCache() if cache is None else cache
            offset = entry.offset
            y = theirs.layers[i](x, create_attention_mask(x, entry, return_array=True), entry)
            entry.offset = offset
            return y

        return call

    print("layer  call           ours ms  mlx-lm ms  times  limit ms")
    for i in sorted({0, len(ours.layers) - 1}):
        name = "MoE" if i in ours.moe_blocks() else "dense"
        own, other = ours.make_cache()[i], KVCache()
        mx.eval(call_ours(i, hidden[:, : args.seen], own)())
        mx.eval(call_theirs(i, hidden[:, : args.seen], other)())
        own.columns = other.offset = args.seen
        cases = [("decode", 1, own, other, args.seen)]
        cases += [(f"prefill {T}", T, None, None, 0) for T in args.tokens]
        for label, T, mine, its, seen in cases:
            x = hidden[:, :T]
            seconds = [
                median_seconds(call_ours(i, x, mine), args.repeats),
                median_seconds(call_theirs(i, x, its), args.repeats),
            ]
            limit = limits(config, ours.layers[i], T, seen, args)
            print(
                f"{name:<6} {label:<12} {1e3 * seconds[0]:>9.3f} {1e3 * seconds[1]:>10.3f} "
                f"{seconds[1] / seconds[0]:>6.2f} {1e3 * limit:>9.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
