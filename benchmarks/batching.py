"""Tokens a second of many sequences at once, decode alone.

    python -m benchmarks.batching --model DIR --sizes 1 8 32

Prompts of random ids; every sequence replies with as many tokens; the first steps are not counted.
"""

from __future__ import annotations

import argparse
import time

import mlx.core as mx
import numpy as np

from mlx_moeflux.batching import BatchGenerator
from mlx_moeflux.loading import BUNDLED_MODEL, load_model

WARM_STEPS = 4


def decode_rate(model, *, size: int, prompt: int, tokens: int, pool: int | None) -> tuple:
    """(tokens a second, milliseconds a step, expert bytes read a step)."""
    random = np.random.default_rng(size)
    prompts = random.integers(0, model.config.vocab_size, (size, prompt)).tolist()
    with BatchGenerator(
        model,
        max_tokens=tokens + WARM_STEPS + 1,
        completion_batch_size=size,
        prefill_batch_size=size,
        kv_pool_bytes=pool,
    ) as generator:
        generator.insert(prompts)
        for _ in range(WARM_STEPS):
            generator.next()
        before, start = model.store.stats().total.bytes_read, time.perf_counter()
        for _ in range(tokens):
            assert len(generator.next()) == size
        seconds = time.perf_counter() - start
        read = model.store.stats().total.bytes_read - before
    return size * tokens / seconds, 1000 * seconds / tokens, read / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument("--expert-memory", default="auto")
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--pool", type=int, help="bytes of paged keys and values besides")
    args = parser.parse_args()
    with load_model(args.model, expert_memory=args.expert_memory, verbose=True) as model:
        print(f"{mx.default_device()}; prompts of {args.prompt}, {args.tokens} steps")
        print(f"{'sequences':>9} {'cache':>10} {'tok/s':>9} {'ms/step':>8} {'MB/step':>8}")
        for size in args.sizes:
            for pool in [None, args.pool][: 1 + (args.pool is not None)]:
                rate, step, read = decode_rate(
                    model, size=size, prompt=args.prompt, tokens=args.tokens, pool=pool
                )
                kind = "contiguous" if pool is None else "paged"
                print(f"{size:9} {kind:>10} {rate:9.1f} {step:8.2f} {read / 1e6:8.1f}", flush=True)


if __name__ == "__main__":
    main()
