"""Hit rates of every policy at every budget, with Belady's bound and baselines without order.

    python benchmarks/hit_rates.py [--tokens N] [--out docs/hit-rates.md]

Traces: the bundled model reads a held-out file token by token and writes text of its own; routers
that never were (Zipf popularity, persistence) have the shape of a real model.
"""

from __future__ import annotations

import argparse
import hashlib
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx

import mlx_moeflux
from mlx_moeflux.experts.bounds import compulsory, independent, shuffled
from mlx_moeflux.experts.evictions import EVICTIONS
from mlx_moeflux.experts.simulate import simulate
from mlx_moeflux.experts.synthetic import zipf_trace
from mlx_moeflux.experts.trace import Trace
from mlx_moeflux.loading import BUNDLED_MODEL

BUDGETS = ("20%", "30%", "50%", "75%")


def held_out() -> Iterator[str]:
    """What examples/train_tiny.py sets aside of the standard library."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library).as_posix()
        digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
        if int.from_bytes(digest, "big") % 25 == 0 and "-packages" not in name:
            yield path.read_text(encoding="utf-8", errors="ignore")[:2000]


def read_text(folder: Path, tokens: int) -> Trace:
    """The bundled model reads files that it was not trained on, one token a call."""
    text = "".join(held_out())
    model, tokenizer = mlx_moeflux.load(BUNDLED_MODEL)
    with model, model.trace(folder / "read"):
        cache = model.make_cache()
        for token in tokenizer.encode(text)[:tokens]:
            mx.eval(model(mx.array([[token]]), cache))
    return Trace.open(folder / "read")


def write_text(folder: Path, tokens: int) -> Trace:
    """It continues ten beginnings, drawing from its predictions."""
    model, tokenizer = mlx_moeflux.load(BUNDLED_MODEL)
    beginnings = ("def ", "class ", "import ", "    def __init__(self, ", "for ", "if ", "try:\n")
    with model, model.trace(folder / "write"):
        for seed, beginning in enumerate(beginnings):
            mlx_moeflux.generate(
                model, tokenizer, beginning, temp=0.8, seed=seed,
                max_tokens=tokens // len(beginnings),
            )  # fmt: skip
    return Trace.open(folder / "write")


def table(trace: Trace) -> list[str]:
    """Lines of markdown: hit rates in percent."""
    lines = ["| | " + " | ".join(BUDGETS) + " |", "| --- |" + " ---: |" * len(BUDGETS)]

    def row(name: str, source: Trace, eviction: str) -> None:
        rates = (simulate(source, budget, eviction=eviction).hit_rate for budget in BUDGETS)
        lines.append(f"| {name} | " + " | ".join(f"{100 * rate:.1f}" for rate in rates) + " |")

    for name in EVICTIONS:
        row(name, trace, name)
    row("Belady", trace, "belady")
    mixed = shuffled(trace)
    row("lru, tokens shuffled", mixed, "lru")
    row("lfu, tokens shuffled", mixed, "lfu")
    row("lfu, tokens drawn by popularity", independent(trace), "lfu")
    row("lfu, tokens drawn at random", independent(trace, uniform=True), "lfu")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="write the tables between the marks of this file")
    args = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for what, trace in (
            ("The bundled model reads Python (32 experts, 4 a token)",
             read_text(Path(folder), args.tokens)),
            ("The bundled model writes Python",
             write_text(Path(folder), args.tokens)),
            ("Zipf 0.8, persistence 0.3 (256 experts, 8 a token, 8 layers)",
             zipf_trace(num_experts=256, experts_per_token=8, layers=8, tokens=args.tokens,
                        skew=0.8, persistence=0.3)),
            ("Zipf 0.4, persistence 0.5 (256 experts, 8 a token, 8 layers)",
             zipf_trace(num_experts=256, experts_per_token=8, layers=8, tokens=args.tokens,
                        skew=0.4, persistence=0.5)),
        ):  # fmt: skip
            lookups = simulate(trace, "100%").total.lookups
            ceiling = 100 * (1 - compulsory(trace) / lookups)
            lines += [f"### {what}", "", *table(trace), ""]
            lines += [f"{lookups} look-ups; no bank hits more than {ceiling:.1f} %.", ""]
            print(f"{what}: done", flush=True)
    print("\n".join(lines))
    if args.out:
        before, mark, rest = args.out.read_text().partition("<!-- tables -->\n")
        _, end, after = rest.partition("<!-- end -->")
        args.out.write_text(before + mark + "\n".join(lines) + end + after)


if __name__ == "__main__":
    main()
