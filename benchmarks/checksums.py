"""Measure the cost of checksums: tokens of two models of one packed directory alternate.

python benchmarks/checksums.py DIR [--budget 25%] [--reader pread] [--cold]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter

import mlx.core as mx
import numpy as np

from mlx_moeflux.checkpoint.source import open_checkpoint
from mlx_moeflux.checkpoint.tensors import Blocks
from mlx_moeflux.experts.io.readers import make_reader
from mlx_moeflux.loading import load_model
from mlx_moeflux.measure.benchmark.pages import cached_share, evict
from mlx_moeflux.models import map_checkpoint

WARM = 8


def load(path: str, budget: str, reader: str, *, verified: bool):
    """Load a model whose reader verifies what it reads, or does not."""
    experts = map_checkpoint(open_checkpoint(path)).experts
    for parts in experts.values():
        if not (isinstance(parts, Blocks) and parts.checksums):
            raise SystemExit(f"{path} has no checksums; convert a checkpoint.")
        if not verified:
            parts.checksums = ()
    return load_model(path, expert_memory=budget, reader=make_reader(reader, experts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--budget", default="25%")
    parser.add_argument("--reader", default="pread", choices=("pread", "direct", "mmap"))
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--cold", action="store_true", help="empty the page cache before a token")
    args = parser.parse_args()
    models = {
        name: load(args.model, args.budget, args.reader, verified=name == "verified")
        for name in ("verified", "not verified")
    }
    files = sorted((Path(args.model) / "experts").glob("*.bin"))
    caches = {name: model.make_cache() for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    waiting: dict[str, list[float]] = {name: [] for name in models}
    vocabulary = models["verified"].config.vocab_size
    ids = np.random.default_rng(0).integers(0, vocabulary, WARM + args.tokens)
    for i, token in enumerate(ids.tolist()):
        # Both get the same token, and each begins every second time.
        for name in sorted(models, reverse=bool(i % 2)):
            stats = models[name].store.stats()
            if args.cold:
                evict(files)
                assert (cached_share(files) or 0) < 0.02, "pages stayed in memory"
            stalled, start = stats.total.stall_seconds, perf_counter()
            mx.eval(models[name](mx.array([[token]]), caches[name], last_only=True))
            if i >= WARM:
                seconds[name].append(perf_counter() - start)
                waiting[name].append(stats.total.stall_seconds - stalled)
    print(f"{models['verified'].store.stats().total.bytes_read / len(ids) / 1e6:.2f} MB a token")
    for what, times in (("token", seconds), ("waiting for reads", waiting)):
        for share in (0.1, 0.5):
            a, b = (float(np.quantile(times[name], share)) for name in models)
            label = f"{what}, {'median' if share == 0.5 else 'lowest tenth'}"
            print(f"{label:32} {1e3 * a:8.3f} ms, {1e3 * b:8.3f} without: {a / b:.3f}")


if __name__ == "__main__":
    main()
