"""What pays when experts come from disk: interleaved pairs of one change against the base.

    mlx_moeflux synthesize --like qwen3.5-35b-a3b --layers 8 --out DIR
    mlx_moeflux convert --model DIR --out PACKED
    python benchmarks/streaming.py PACKED [--budgets 50% 25% 12.5%] [--repeats 5] [--tokens 32]

Base: cached reads (pread), 8 threads, no prefetch, hits not computed before misses arrive. Before
every run the banks are empty and the page cache has forgotten the experts; every run decodes the
same tokens. Printed: medians of the base and the change, the median of their ratios, the spread of
the ratios, hit rate, milliseconds a token waited for reads, gigabytes from the disk a token.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from statistics import median
from time import perf_counter

import mlx.core as mx
import numpy as np

from mlx_moeflux.checkpoint.source import open_checkpoint
from mlx_moeflux.errors import MoefluxError
from mlx_moeflux.experts.readers import make_reader
from mlx_moeflux.experts.streamed import StreamedStore
from mlx_moeflux.loading import load_model
from mlx_moeflux.models import model_class

BASE = {"reader": "pread", "threads": 8, "prefetch": "none", "overlap": False}
CHANGES = {
    "again": {},
    "look-ahead": {"prefetch": "ahead"},
    "last token": {"prefetch": "last"},
    "hits first": {"overlap": True},
    "both": {"prefetch": "ahead", "overlap": True},
    "direct": {"reader": "direct"},
    "lru": {"eviction": "lru"},
    **{f"{n} threads": {"threads": n} for n in (1, 2, 4, 16, 32)},
}
WARM = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--budgets", nargs="+", default=["50%", "25%", "12.5%"])
    parser.add_argument("--changes", nargs="+", choices=CHANGES, default=list(CHANGES))
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    checkpoint = open_checkpoint(args.model)
    rules = model_class(checkpoint.config.get("model_type")).NAME_RULES
    experts = checkpoint.mapped(rules).experts
    for budget in args.budgets:
        with load_model(args.model, expert_memory=budget) as model:
            slots, ffn = dict(model.plan.slots), model.kernels.expert_ffn
            print(f"\n{budget}: {model.plan}", flush=True)
            model.store.close()
            print(f"{'change':12} {'base':>7} {'change':>7} tok/s {'ratio':>6} {'spread':>13} "
                  f"{'hits':>6} {'stall':>8} {'disk':>9}", flush=True)  # fmt: skip

            def run(change: dict, model=model, slots=slots, ffn=ffn) -> tuple[float, ...]:
                options = BASE | change
                reader = make_reader(options.pop("reader"), experts)
                store = StreamedStore(reader, slots, ffn=ffn, **options)
                forget(reader)
                model.set_store(store)
                try:
                    return decode(model, args.tokens)
                finally:
                    store.close()

            run({})
            for name in args.changes:
                try:
                    line(name, [(run({}), run(CHANGES[name])) for _ in range(args.repeats)])
                except MoefluxError as error:
                    print(f"{name:12} {error}", flush=True)


def line(name: str, pairs: list[tuple[tuple[float, ...], tuple[float, ...]]]) -> None:
    """Print one row; a run is (tokens per second, hit rate, stall, bytes)."""
    ratios = sorted(change[0] / base[0] for base, change in pairs)
    hits, stall, disk = (median(change[i] for _, change in pairs) for i in (1, 2, 3))
    print(
        f"{name:12} {median(b[0] for b, _ in pairs):7.2f} {median(c[0] for _, c in pairs):7.2f}"
        f"       {median(ratios):6.3f} {ratios[0]:6.3f}-{ratios[-1]:6.3f} {100 * hits:5.1f}% "
        f"{1e3 * stall:6.2f}ms {disk / 1e9:7.4f}GB",
        flush=True,
    )


def decode(model, tokens: int) -> tuple[float, float, float, float]:
    """Tokens per second, hit rate, seconds of stall a token, bytes from the disk a token."""
    ids = np.random.default_rng(1).integers(0, model.config.vocab_size, WARM + tokens)
    cache, stats, start, before = model.make_cache(), model.store.stats(), 0.0, 0
    for i, token in enumerate(ids.tolist()):
        if i == WARM:
            stats.reset()
            start, before = perf_counter(), disk_bytes()
        mx.eval(model(mx.array([[token]]), cache, last_only=True))
    seconds, read = perf_counter() - start, disk_bytes() - before
    total = stats.total
    return tokens / seconds, total.hit_rate, total.stall_seconds / tokens, read / tokens


def forget(reader) -> None:
    """Drop the reader's files from the page cache, where the system can be asked to."""
    for fd in reader._fds if hasattr(os, "posix_fadvise") else ():
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def disk_bytes() -> int:
    """What this process has had the disk read, 0 where nobody counts."""
    try:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    except OSError:
        return 0
    return int(fields["read_bytes"])


if __name__ == "__main__":
    main()
