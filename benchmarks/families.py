"""Layers of several families, all resident, beside mlx-lm on the same arrays, in turns.

    python -m benchmarks.families
    python -m benchmarks.families --like gpt-oss-tiny glm-tiny --prompts 32 --context 40 --steps 4

Each model has the published shape of a layer and as many layers as fit into --gigabytes, in random
4-bit weights (gpt-oss: experts in MXFP4, as published). A round times both programs one after the
other, decoding first; a ratio is of one round, above 1 where mlx-lm takes longer.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx

from benchmarks.full_shape import SPEC, Side, our_side, ours, prompt, their_side, theirs
from mlx_moeflux.backend import describe_backend, set_device_variables
from mlx_moeflux.conversion.synthesize import random_weights
from mlx_moeflux.models import model_class
from mlx_moeflux.models.shapes import SHAPES

# Two of the three dense layers of GLM-4.6 and 5.2 would stand for MoE layers that do not fit; and
# mlx-lm gives every layer an indexer.
ONE_DENSE = {"first_k_dense_replace": 1}
CHANGES = {"glm-4.6": ONE_DENSE, "glm-5.2": {**ONE_DENSE, "indexer_types": ()}}


def fitting(like: str, gigabytes: float) -> Any:
    """The config of a shape with as many layers as fit, two at least."""
    found, kind = None, model_class(SHAPES[like].published()["model_type"])
    for layers in range(2, SHAPES[like].num_hidden_layers + 1):
        config = replace(SHAPES[like], num_hidden_layers=layers, **CHANGES.get(like, {}))
        weights = random_weights(kind(config), SPEC)
        if found is not None and sum(w.tensor.nbytes for w in weights) > 1e9 * gigabytes:
            break
        found = config
    return found


def measured(side: Side, other: Side, args: argparse.Namespace, vocabulary: int) -> Iterator[str]:
    """A row of the table for each call."""

    def row(call: str, times: list[tuple[float, float]], tokens: int) -> str:
        cells = [
            f"{1e3 * statistics.median(t):.2f} [{1e3 * min(t):.2f}, {1e3 * max(t):.2f}]"
            for t in zip(*times, strict=True)
        ]
        ratios = [b / a for a, b in times]
        speed = tokens / statistics.median(a for a, _ in times)
        cells += [f"{speed:,.0f}", f"{statistics.median(ratios):.2f} [{min(ratios):.2f}]"]
        return f"{call} | {' | '.join(cells)}"

    ids = prompt(args.context, vocabulary)
    caches = [(one, one.read(ids)[1]) for one in (side, other)]
    for one, cache in caches:
        # Both reach the next step of a growing buffer before they are timed.
        one.decode(cache, args.warm)
    steps = [
        tuple(one.decode(cache, args.steps) for one, cache in caches) for _ in range(args.rounds)
    ]
    yield row(f"decode, {args.context} positions", steps, 1)
    for n in args.prompts:
        ids = prompt(n, vocabulary)
        times = [(side.read(ids)[0], other.read(ids)[0]) for _ in range(args.rounds + 1)]
        yield row(f"prefill {n}", times[1:], n)


def agreement(side: Side, other: Side, vocabulary: int) -> float:
    """Difference of the logits of a short prompt, by the largest."""
    ids = prompt(16, vocabulary)
    a, b = (one.last(ids, one.new_cache()).astype(mx.float32) for one in (side, other))
    return (mx.abs(a - b).max() / mx.abs(b).max()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    shapes = ["gpt-oss-120b", "glm-4.6", "minimax-m2"]
    parser.add_argument("--like", nargs="+", choices=SHAPES, default=shapes)
    parser.add_argument("--gigabytes", type=float, default=9.0, help="of a model's arrays")
    parser.add_argument("--context", type=int, default=1000, help="positions before decoding")
    parser.add_argument("--prompts", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--steps", type=int, default=32, help="of a round")
    parser.add_argument("--warm", type=int, default=32, help="steps before the first round")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    set_device_variables()
    print(
        f"{describe_backend()}; medians of {args.rounds} rounds, the extremes in brackets",
        flush=True,
    )
    print("| model | call | ours ms | mlx-lm ms | ours tok/s | times mlx-lm [least] |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for like in args.like:
        begun = time.perf_counter()
        config = fitting(like, args.gigabytes)
        model, arrays, specs = ours(config)
        size = sum(array.nbytes for array in arrays.values()) / 1e9
        side, other = our_side(model), their_side(theirs(config, arrays, specs))
        del arrays
        name = f"{like}, {config.num_hidden_layers} layers, {size:.1f} GB"
        for line in measured(side, other, args, config.vocab_size):
            print(f"| {name} | {line} |", flush=True)
        off, seconds = agreement(side, other, config.vocab_size), time.perf_counter() - begun
        refused = "; ".join(model.kernels.fallbacks()) or "none"
        print(
            f"<!-- logits differ by {off:.3g}; {seconds:.0f} s; fallbacks: {refused} -->",
            flush=True,
        )
        model.close()
        del side, other, model
        gc.collect()
        mx.clear_cache()
    print(f"peak memory {mx.get_peak_memory() / 1e9:.1f} GB, both programs' arrays included")


if __name__ == "__main__":
    main()
