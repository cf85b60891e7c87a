"""Replay a trace on 1 to 8 machines: what each reads, and how long a token takes on paper.

    python benchmarks/machines.py [--trace FILE] [--memory 24GB] [--disk 3GB] [--tokens 300]

Without a trace one is drawn: popularity after Zipf (exponent 0.8), 0.3 of a token's experts again
at the next. Sizes are those of Qwen3.5-397B-A17B in 4 bits: 60 layers of 512 experts of 7.08 MB,
10 a token, hidden width 4096; a drawn trace has 4 layers, whose times are multiplied. Memory is
that of the experts on each machine. Links: see LINKS; a ring of N machines sends 2 (N - 1) messages
a layer.
"""

from __future__ import annotations

import argparse

import numpy as np

from mlx_moeflux.distributed.placement import ById, ByPopularity
from mlx_moeflux.distributed.replay import Link, replay_machines
from mlx_moeflux.experts.budget import parse_budget
from mlx_moeflux.experts.telemetry.simulate import simulate
from mlx_moeflux.experts.telemetry.trace import Call, Trace, TraceInfo

LAYERS, E, K, HIDDEN, BLOCK = 60, 512, 10, 4096, 7_077_888
DRAWN_LAYERS = 4
# Bytes per second, and seconds of a message: assumed, none is measured here.
LINKS = {
    "Thunderbolt 5, RDMA": Link(6e9, 2e-5),
    "Thunderbolt, TCP": Link(2.5e9, 1e-4),
    "10 Gb Ethernet": Link(1.15e9, 1e-4),
}


def drawn(tokens: int) -> Trace:
    """Return a trace of decode steps of a router that never was."""
    random = np.random.default_rng(0)
    odds = -0.8 * np.log(np.arange(1, E + 1))
    info = TraceInfo(E, K, tuple(range(DRAWN_LAYERS)), dict.fromkeys(range(DRAWN_LAYERS), BLOCK))
    ranks = [random.permutation(E) for _ in range(DRAWN_LAYERS)]
    before: list[np.ndarray] = [np.zeros(0, int)] * DRAWN_LAYERS
    weights, calls = np.ones((1, K), np.float16), []
    for token in range(tokens):
        for layer in range(DRAWN_LAYERS):
            noisy = odds[ranks[layer]] + random.gumbel(size=E)
            noisy[before[layer][random.random(len(before[layer])) < 0.3]] = np.inf
            before[layer] = np.sort(np.argpartition(-noisy, K - 1)[:K])
            calls.append(Call(layer, token, before[layer][None].astype(np.uint16), weights))
    return Trace(info, calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace")
    parser.add_argument("--memory", default="24GB")
    parser.add_argument("--disk", default="3GB", help="a second")
    parser.add_argument("--tokens", type=int, default=300)
    args = parser.parse_args()
    trace = Trace.open(args.trace) if args.trace else drawn(args.tokens)
    scale = LAYERS / len(trace.info.layers)
    memory, disk = (parse_budget(text, 0) for text in (args.memory, args.disk))
    assert memory is not None
    assert disk is not None
    columns = [
        "machines",
        "placement",
        "hits",
        "read a token",
        "one machine, N x memory",
        "wait for",
    ]
    columns += [f"exchange, {name}" for name in LINKS]
    print(f"| {' | '.join(columns)} |\n|{' ---: |' * len(columns)}")
    tokens = sum(len(call.ids) for call in trace) / len(trace.info.layers)
    whole = sum(trace.info.block_bytes.values()) * trace.info.num_experts
    for count in range(1, 9):
        together = simulate(trace, min(count * memory / scale, whole)).total.bytes_read
        for placement in (ById(), ByPopularity(trace))[: 1 if count == 1 else 2]:
            budgets = [memory / scale] * count
            options = {"hidden_size": HIDDEN, "disk": disk}
            found = {
                name: replay_machines(trace, placement, budgets, link=link, **options)
                for name, link in LINKS.items()
            }
            any_one = next(iter(found.values()))
            totals = [one.total for one in any_one.ranks]
            hits = sum(t.hits for t in totals) / sum(t.lookups for t in totals)
            read = sum(any_one.bytes_read) * scale / tokens
            exchanges = " | ".join(
                f"{1e3 * scale * f.exchange_seconds:.0f} ms" for f in found.values()
            )
            print(
                f"| {count} | {placement.name} | {100 * hits:.0f} % | {read / 1e9:.2f} GB | "
                f"{together * scale / tokens / 1e9:.2f} GB | "
                f"{1e3 * scale * any_one.read_seconds:.0f} ms | {exchanges} |"
            )


if __name__ == "__main__":
    main()
