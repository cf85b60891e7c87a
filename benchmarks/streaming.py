"""What pays when experts come from disk: interleaved pairs of one change against the base.

    mlx_moeflux synthesize --like qwen3.5-35b-a3b --layers 8 --out DIR
    mlx_moeflux convert --model DIR --out PACKED
    python benchmarks/streaming.py PACKED [--budgets 50% 25% 12.5%] [--repeats 5] [--tokens 32]
        [--prompt 2048]

Base: cached reads (pread), 8 threads, no prefetch, hits not computed before misses arrive. Before
every run the banks are empty and the page cache has forgotten the experts; every run decodes the
same tokens. Printed: medians of the base and the change, the median of their ratios, the spread of
the ratios, hit rate, milliseconds a token waited for reads, gigabytes from the disk a token.

Each budget ends with what a token may take: the time of the same model when every slot is filled,
1.15 times what its missed bytes take from the disk and into a GPU's memory, and 0.1 ms a layer.
Before each of these tokens the page cache forgets: what is missed again is read again. And with a
prompt's time, cold, against the longer of what its bytes take from the disk and what the filled
model takes; a first one compiles what the process or the machine has not compiled yet.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

import mlx.core as mx
import numpy as np

from mlx_moeflux.checkpoint.source import open_checkpoint
from mlx_moeflux.errors import MoefluxError
from mlx_moeflux.experts.io.native_pool import open_pool
from mlx_moeflux.experts.io.read_pool import HostSlots
from mlx_moeflux.experts.io.readers import make_reader
from mlx_moeflux.experts.streaming.store import StreamedStore
from mlx_moeflux.loading import load_model
from mlx_moeflux.measure.benchmark.pages import bytes_from_disk, evict
from mlx_moeflux.models import map_checkpoint

BASE = {"reader": "pread", "threads": 8, "prefetch": "none"}
CHANGES = {
    "again": {},
    "look-ahead": {"prefetch": "ahead"},
    "last token": {"prefetch": "last"},
    "direct": {"reader": "direct"},
    "lru": {"eviction": "lru"},
    **{f"{n} threads": {"threads": n} for n in (1, 2, 4, 16, 32)},
}
WARM = 8
INTO_GPU = 12.9e9
PER_LAYER = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--budgets", nargs="+", default=["50%", "25%", "12.5%"])
    parser.add_argument("--changes", nargs="+", choices=CHANGES, default=list(CHANGES))
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a prompt, 0 for none")
    args = parser.parse_args()
    experts = map_checkpoint(open_checkpoint(args.model)).experts
    with load_model(args.model, expert_memory="100%") as model:
        full = median(decode(model, args.tokens)[0] for _ in range(args.repeats))
        filled = min(prompt(model, args.prompt)[0] for _ in range(3)) if args.prompt else 0.0
    for budget in args.budgets:
        with load_model(args.model, expert_memory=budget) as model:
            slots = dict(model.plan.slots)
            print(f"\n{budget}: {model.plan}", flush=True)
            model.store.close()
            bench = Bench(model, experts, slots, args.tokens)
            bench.compare(args.changes, args.repeats)
            for reader in ("pread", "direct"):
                bench.allowed(full, reader=reader)
            for reader in ("pread", "direct", "direct") if args.prompt else ():
                bench.prompt(args.prompt, filled, reader=reader)


class Bench:
    """One model at one budget. slots: For each layer."""

    def __init__(self, model, experts: Mapping, slots: Mapping[int, int], tokens: int):
        self.model, self.experts, self.slots, self.tokens = model, experts, slots, tokens

    def compare(self, changes: Sequence[str], repeats: int) -> None:
        """Print a line for each change."""
        print(f"{'change':12} {'base':>7} {'change':>7} tok/s {'ratio':>6} {'spread':>13} "
              f"{'hits':>6} {'stall':>8} {'disk':>9}", flush=True)  # fmt: skip
        self.run({})
        for name in changes:
            try:
                line(name, [(self.run({}), self.run(CHANGES[name])) for _ in range(repeats)])
            except MoefluxError as error:
                print(f"{name:12} {error}", flush=True)

    def run(self, change: dict, forgets: bool = False) -> tuple[float, ...]:
        """See :func:`decode`; cold. forgets: Before each token."""

        def measure(reader) -> tuple[float, ...]:
            return decode(self.model, self.tokens, lambda: forgets and evict(reader.ranges.files))

        return self._cold(change, measure)

    def prompt(self, tokens: int, filled: float, **change: object) -> None:
        """Print what a prompt takes, cold; `filled`: seconds with every slot filled."""
        before = disk_speed(self.experts)
        seconds, stall, needed, read = self._cold(change, lambda _: prompt(self.model, tokens))
        disk = (before + disk_speed(self.experts)) / 2
        least = max(needed / disk, filled)
        print(
            f"{', '.join(map(str, change.values()))}: a prompt of {tokens} takes {seconds:.3f} s, "
            f"{seconds / least:.2f} times the longer of {filled:.3f} s without reading and "
            f"{needed / disk:.3f} s for {needed / 1e9:.2f} GB ({100 * read / needed:.0f} % of them "
            f"from the disk, {disk / 1e9:.2f} GB/s); waited {stall:.3f} s",
            flush=True,
        )

    def _cold(
        self, change: Mapping, measure: Callable[..., tuple[float, ...]]
    ) -> tuple[float, ...]:
        """What `measure` gives of a reader, with an empty bank and nothing in the page cache."""
        options = BASE | change | {"mix": self.model.kernels.expert_mix}
        reader = make_reader(options.pop("reader"), self.experts)
        store = StreamedStore(reader, self.slots, **options)
        evict(reader.ranges.files)
        self.model.set_store(store)
        try:
            return measure(reader)
        finally:
            store.close()

    def allowed(self, full: float, repeats: int = 3, **change: object) -> None:
        """Print what a token takes and may take; `full`: tokens per second of a filled bank. The
        disk is measured before and behind every run: it changes within a minute."""
        speeds, runs = [disk_speed(self.experts)], []
        for _ in range(repeats):
            runs.append(self.run(change, forgets=True))
            speeds.append(disk_speed(self.experts))
        disk, (speed, hits, stall, read) = median(speeds), map(median, zip(*runs, strict=True))
        block = block_bytes(self.experts)
        lookups = self.model.router.num_experts_per_tok * len(self.slots)
        missed = (1 - hits) * lookups * block
        layers = sum(n < self.model.config.num_experts for n in self.slots.values())
        most = 1 / full + 1.15 * missed * (1 / disk + 1 / INTO_GPU) + PER_LAYER * layers
        print(
            f"{', '.join(map(str, change.values()))}: {1e3 / speed:.2f} ms a token, may "
            f"take {1e3 * most:.2f}: {1e3 / full:.2f} + {missed / 1e6:.1f} MB missed "
            f"({100 * read / missed if missed else 0:.0f} % of them from the disk) + "
            f"{1e3 * PER_LAYER * layers:.1f}, {disk / 1e9:.2f} GB/s; waited {1e3 * stall:.2f}",
            flush=True,
        )


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


def decode(
    model, tokens: int, between: Callable[[], object] = lambda: None
) -> tuple[float, float, float, float]:
    """Tokens per second, hit rate, seconds of stall a token, bytes from the disk a token. `between`
    is called before each, outside the time."""
    ids = np.random.default_rng(1).integers(0, model.config.vocab_size, WARM + tokens)
    cache, stats, seconds, before = model.make_cache(), model.store.stats(), 0.0, 0
    for i, token in enumerate(ids.tolist()):
        if i == WARM:
            stats.reset()
            seconds, before = 0.0, disk_bytes()
        between()
        start = perf_counter()
        mx.eval(model(mx.array([[token]]), cache, last_only=True))
        seconds += perf_counter() - start
    read, total = disk_bytes() - before, stats.total
    return tokens / seconds, total.hit_rate, total.stall_seconds / tokens, read / tokens


def prompt(model, tokens: int) -> tuple[float, float, float, float]:
    """Seconds that a prompt takes, those of them that waited for reads, bytes that were needed from
    files, bytes from the disk."""
    ids = np.random.default_rng(2).integers(0, model.config.vocab_size, (1, tokens))
    cache, before, start = model.make_cache(), disk_bytes(), perf_counter()
    mx.eval(model(mx.array(ids), cache, last_only=True))
    seconds, total = perf_counter() - start, model.store.stats().total
    return seconds, total.stall_seconds, total.bytes_read, disk_bytes() - before


def disk_speed(experts: Mapping, blocks: int = 64) -> float:
    """Bytes a second that the disk gives when nothing but reading happens: random blocks of a
    layer, past the page cache, the best of several numbers of threads."""
    reader, random, speeds = make_reader("direct", experts), np.random.default_rng(0), []
    try:
        for count in (4, 8, 16) * 2:
            threads, layer = open_pool(reader, count, None), int(random.choice(reader.layers))
            chosen = random.choice(reader.num_experts, min(blocks, reader.num_experts), False)
            layout = reader.layout(layer)
            slots, start = HostSlots(layout, len(chosen)), perf_counter()
            fetch = threads.fetch(layer, slots, [(int(e), i) for i, e in enumerate(chosen)])
            fetch.start()
            error = fetch.wait()
            speeds.append(len(chosen) * layout.nbytes / (perf_counter() - start))
            threads.close()
            if error is not None:
                raise error
    finally:
        reader.close()
    return max(speeds)


def block_bytes(experts: Mapping) -> int:
    """Bytes of one expert of the first layer."""
    return sum(refs[0].nbytes for refs in experts[min(experts)].values())


def disk_bytes() -> int:
    """What this process has had the disk read, 0 where nobody counts."""
    return bytes_from_disk() or 0


if __name__ == "__main__":
    main()
