"""Measure two curves that papers on expert caching show, and draw them.

    python examples/published_curves.py [MODEL] [--plot FILE.png]

Left: hit rate of LRU, LFU and Belady's optimum by the share of experts in memory, replayed from one
recorded run. Right: how many of a layer's experts the router names when it reads the hidden state
of an earlier layer, by the number of layers in between. Both are in figure 2 of Eliseev and Mazur,
"Fast Inference of Mixture-of-Experts Language Models with Offloading" (arXiv 2312.17238), for LRU
and Mixtral-8x7B; the optimum is Belady's (IBM Systems Journal 5, 1966).
"""

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path

import mlx.core as mx
import numpy as np

import mlx_moeflux
from mlx_moeflux.experts.telemetry.simulate import simulate
from mlx_moeflux.experts.telemetry.trace import Trace
from mlx_moeflux.loading import BUNDLED_MODEL
from mlx_moeflux.measure import plots

PROMPT = "class Queue:\n    def __init__(self, maxsize=0):\n"
TOKENS = 300
SHARES = (12.5, 25, 37.5, 50, 62.5, 75, 87.5, 100)
POLICIES = ("lru", "lfu", "belady")


# MoE layer -> its router's logits [T, E] on the hidden states of each MoE layer.
Logits = dict[int, dict[int, np.ndarray]]


def record(path: str, file: Path) -> tuple[Logits, dict[int, np.ndarray]]:
    """Write a trace of a reply; return logits, and the experts ``[T, K]`` that each layer chose."""
    model, tokenizer = mlx_moeflux.load(path, expert_memory="25%")
    hidden = {layer: [] for layer in model.store.layers}
    chosen = {layer: [] for layer in model.store.layers}
    with model, model.trace(file), ExitStack() as hooks:
        for layer in model.store.layers:
            hooks.enter_context(model.hook(layer, "after_mixer", keep(hidden[layer])))
            hooks.enter_context(model.hook(layer, "after_router", keep(chosen[layer])))
        mlx_moeflux.generate(model, tokenizer, PROMPT, max_tokens=TOKENS)
        states = {i: mx.concatenate(parts, axis=1)[0] for i, parts in hidden.items()}
        logits = {
            i: {j: np.array(block.gate(model.layers[i].router_norm(states[j]))) for j in states}
            for i, block in model.moe_blocks().items()
        }
    return logits, {i: np.array(mx.concatenate(ids)) for i, ids in chosen.items()}


def keep(parts: list[mx.array]):
    """Return a hook that keeps the first array of each call, and replaces nothing."""

    def function(first: mx.array, *_: mx.array) -> None:
        mx.eval(first)
        parts.append(first)

    return function


def hit_rates(trace: Trace) -> dict[str, list[float]]:
    """Return for each policy the hit rate in percent at each of SHARES."""
    return {
        name: [100 * simulate(trace, f"{share}%", eviction=name).hit_rate for share in SHARES]
        for name in POLICIES
    }


def found_ahead(logits: Logits, chosen: dict[int, np.ndarray], guesses: int) -> list[float]:
    """Return what share of the chosen experts, in percent, is among so many guesses of the router
    on the hidden state 1, 2, 3, ... MoE layers before."""
    layers, found = list(logits), []
    for depth in range(1, len(layers)):
        hits = []
        for before, layer in zip(layers, layers[depth:], strict=False):
            order = np.argsort(-logits[layer][before], axis=-1)[:, :guesses]
            hits.append((chosen[layer][:, :, None] == order[:, None, :]).any(axis=-1).mean())
        found.append(100 * float(np.mean(hits)))
    return found


def draw(file: str, trace: Trace, ahead: dict[int, list[float]], chance: float) -> None:
    """Draw both curves side by side."""

    def draw_ahead(axes) -> None:
        for i, (guesses, row) in enumerate(ahead.items()):
            style = {"color": plots.COLOURS[i], "marker": plots.MARKERS[i]}
            axes.plot(range(1, len(row) + 1), row, label=f"{guesses} guesses", **style)
        axes.axhline(chance, color="0.4", linestyle=":", label="by chance")
        axes.set(xlabel="layers ahead", ylabel="chosen experts found, %", ylim=(0, 101))
        axes.set_title("Guesses of a later router")
        axes.legend(loc="upper right")

    def draw_policies(axes) -> None:
        plots.draw_hit_rates(axes, trace)
        axes.set_title("Hit rate by budget")

    Path(file).write_bytes(plots.picture(draw_policies, draw_ahead))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=BUNDLED_MODEL)
    parser.add_argument("--plot", metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.trace"
        logits, chosen = record(args.model, file)
        trace = Trace.open(file)
    K, E = trace.info.experts_per_token, trace.info.num_experts
    rates = hit_rates(trace)
    print("in memory " + "".join(f"{share:7g}%" for share in SHARES))
    for name, row in rates.items():
        print(f"{name:10}" + "".join(f"{rate:8.1f}" for rate in row))
    ahead = {n: found_ahead(logits, chosen, n) for n in (K, 2 * K)}
    print("\nlayers ahead" + "".join(f"{d:8}" for d in range(1, len(logits))))
    for n, row in ahead.items():
        print(f"{n:3} guesses " + "".join(f"{share:8.1f}" for share in row))
    print(f"by chance, {K} guesses find {100 * K / E:.1f} %")
    if args.plot:
        draw(args.plot, trace, ahead, 100 * K / E)


if __name__ == "__main__":
    main()
