"""Time a streamed token without its reads: what the store and the step cost by themselves.

    mlx_moeflux synthesize --like qwen3.5-35b-a3b --layers 4 --experts 64 --measure 0 --out DIR
    python benchmarks/streamed_floor.py DIR [--budget 25%] [--tokens 64] [--repeats 5]

This script's reader returns immediately and touches no byte: the tokens mean nothing, and the time
that is left is the package's own. Three models run in turns: a resident one; a streamed one that
misses nothing (all experts but one have a slot, and every token is the same); a streamed one at
--budget. The table has medians over the repeats: milliseconds a token by the clock, and
microseconds of CPU time that the calling thread spends on a MoE layer beyond the resident model's.
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter, thread_time

import mlx.core as mx
import numpy as np

from mlx_moeflux.checkpoint.source import open_checkpoint
from mlx_moeflux.experts.io.file_readers import PreadReader
from mlx_moeflux.experts.io.native_pool import NativePool
from mlx_moeflux.loading import load_model
from mlx_moeflux.models import map_checkpoint

WARM = 8


def without_reads(path: str, budget: str):
    """Load a model whose native threads read nothing and leave the buffers as they are."""
    reader = PreadReader(map_checkpoint(open_checkpoint(path)).experts)
    if not NativePool.serves(reader):
        raise SystemExit("this benchmark needs a C compiler.")
    places = reader.places

    def nowhere(layer):
        where, offsets, order = places(layer)
        return np.full_like(where, -1), offsets, order

    reader.places = nowhere
    return load_model(path, expert_memory=budget, reader=reader)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--budget", default="25%")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    resident = load_model(args.model, expert_memory="100%")
    experts = resident.config.num_experts
    most = f"{100 * (experts - 1) / experts + 0.01:.3f}%"
    models = {
        "resident": (resident, False),
        "no miss": (without_reads(args.model, most), False),
        args.budget: (without_reads(args.model, args.budget), True),
    }
    runs = {name: [] for name in models}
    for model, _ in models.values():
        model.compile_steps = True
    for _ in range(args.repeats):
        for name, (model, varied) in models.items():
            runs[name].append(decode(model, args.tokens, varied))
    layers = len(resident.moe_blocks())
    base = median(host for _, host, _ in runs["resident"])
    print(f"{'':10} {'ms/token':>9} {'host us/layer':>14} {'misses/layer':>13}")
    for name, rows in runs.items():
        clock, host, misses = (median(row[i] for row in rows) for i in range(3))
        print(
            f"{name:10} {1e3 * clock:9.2f} {1e6 * (host - base) / layers:14.1f} "
            f"{misses / layers:13.2f}"
        )


def decode(model, tokens: int, varied: bool) -> tuple[float, float, float]:
    """Seconds a token by the clock, of the calling thread's work, and misses a token."""
    ids = np.random.default_rng(1).integers(0, model.config.vocab_size, WARM + tokens)
    cache, stats = model.make_cache(), model.store.stats()
    for i, token in enumerate(ids.tolist()):
        if i == WARM:
            stats.reset()
            clock, host = perf_counter(), thread_time()
        mx.eval(model(mx.array([[token if varied else 7]]), cache, last_only=True))
    clock, host = perf_counter() - clock, thread_time() - host
    return clock / tokens, host / tokens, stats.total.misses / tokens


if __name__ == "__main__":
    main()
