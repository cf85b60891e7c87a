"""Ranks beside one process, in turns: rank 0's child alone, while all ranks wait, then the ranks.

    mlx_moeflux synthesize --like qwen3.5-35b-a3b --measure 0 --out DIR
    mlx.launch -n 2 --backend nccl -- python -m benchmarks.ranks DIR
    mlx.launch -n 2 --backend ring -- python -m benchmarks.ranks DIR --budget 25%

--budget is of a rank's own experts, and of all of the one process. A first reply, to a prompt of
one exact call, must have the same tokens alone and together. Printed: medians of tokens per second
alone and together, the median of the ratios turn by turn and their spread; with experts on disk
milliseconds a token waited for reads and gigabytes read a token, too. A first turn is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moeflux.generation.batch import BatchGenerator
from mlx_moeflux.generation.loop import generate_step
from mlx_moeflux.loading import load_model

EXACT, CONTEXT, PROMPT, SEQUENCES, STREAM = 60, 512, 2048, 32, 64
# One takes a tenth of a second on a GPU, in which a delay of the host's counts.
PROMPTS = 4
# What makes a process one of a group.
OF_GROUPS = ("MLX_RANK", "MLX_WORLD_SIZE", "MLX_HOSTFILE", "NCCL_HOST_IP", "NCCL_PORT")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--budget", default="100%")
    parser.add_argument("--jobs", nargs="+", choices=TIMED, default=TIMED)
    parser.add_argument("--tokens", type=int, default=64, help="of each reply")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--handshake", action="store_true", help="of the one process")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        with load_model(args.model, expert_memory=args.budget, handshake=args.handshake) as model:
            for name in map(str.strip, sys.stdin):
                print(json.dumps(JOBS[name](model, args)), flush=True)
        return
    alone = Alone() if os.environ.get("MLX_RANK", "0") == "0" else None
    with load_model(args.model, distributed=True, expert_memory=args.budget) as together:
        if alone is not None:
            print(f"{mx.device_info()['device_name']}, {args.budget} of the experts", flush=True)
        for name in ("reply", *args.jobs):
            pairs = []
            for turn in range(1 if name == "reply" else args.turns + 1):
                one = in_turns(together.store.ranks, alone, name)
                many = JOBS[name](together, args)
                if alone is not None and (turn or name == "reply"):
                    pairs.append((one, many))
            if pairs and name == "reply":
                print(f"the same tokens: {pairs[0][0] == pairs[0][1]}", flush=True)
            elif pairs:
                line(name, pairs)


class Alone:
    """One process with the same arguments and none of a group's variables."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.ranks", *sys.argv[1:], "--alone"],
            env={name: value for name, value in os.environ.items() if name not in OF_GROUPS},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, name: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def in_turns(ranks: Any, alone: Alone | None, name: str) -> Any:
    """Return what a job gives alone; the other ranks wait for its end."""
    if alone is None:
        ranks.receive()
        return None
    found = alone.run(name)
    ranks.send("together")
    return found


def measured(model: Any, tokens: int, run: Callable[[], Any]) -> tuple[float, float, float]:
    """Tokens a second; milliseconds waited for reads and gigabytes read, a token."""
    mx.synchronize()
    before, start = model.store.stats().total, perf_counter()
    stall, read = before.stall_seconds, before.bytes_read
    run()
    seconds, total = perf_counter() - start, model.store.stats().total
    waited, got = total.stall_seconds - stall, total.bytes_read - read
    return tokens / seconds, 1e3 * waited / tokens, 1e-9 * got / tokens


def ids(model: Any, *shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, model.config.vocab_size, shape)


def tokens_of(model: Any, prompt: int, tokens: int) -> list[int]:
    steps = generate_step(mx.array(ids(model, prompt)), model, max_tokens=tokens)
    return [int(token) for token, _ in steps]


def reply(model: Any, args: Any) -> list[int]:
    return tokens_of(model, EXACT, args.tokens)


def decode(model: Any, args: Any) -> tuple[float, float, float]:
    """From the third token on; a first reply wakes a GPU that waited."""

    def one() -> tuple[float, float, float]:
        steps = generate_step(mx.array(ids(model, CONTEXT)), model, max_tokens=args.tokens + 2)
        next(steps), next(steps)
        return measured(model, args.tokens, lambda: list(steps))

    one()
    return one()


def prompt(model: Any, args: Any) -> tuple[float, float, float]:
    """To the first token, one after another; a first one wakes a GPU that waited."""

    def run() -> None:
        for _ in range(PROMPTS):
            tokens_of(model, PROMPT, 1)

    tokens_of(model, PROMPT, 1)
    return measured(model, PROMPTS * PROMPT, run)


def batch(model: Any, args: Any) -> tuple[float, float, float]:
    """Replies and the prompts before them; first ones wake a GPU that waited."""

    def run() -> None:
        options = dict.fromkeys(("completion_batch_size", "prefill_batch_size"), SEQUENCES)
        with BatchGenerator(model, max_tokens=args.tokens, **options) as generator:
            generator.insert(ids(model, SEQUENCES, STREAM).tolist())
            while generator.next():
                pass

    run()
    return measured(model, SEQUENCES * args.tokens, run)


JOBS: dict[str, Callable[[Any, Any], Any]] = {
    job.__name__: job for job in (decode, prompt, batch, reply)
}
TIMED = ("decode", "prompt", "batch")


def line(name: str, pairs: list[tuple[tuple[float, ...], tuple[float, ...]]]) -> None:
    ratios = sorted(many[0] / one[0] for one, many in pairs)
    (one, *of_one), (many, *of_many) = (
        [median(values) for values in zip(*side, strict=True)] for side in zip(*pairs, strict=True)
    )
    print(
        f"{name:8} {one:9.1f} alone {many:9.1f} together, {median(ratios):.3f} "
        f"[{ratios[0]:.3f}, {ratios[-1]:.3f}]; waited {of_one[0]:.2f} and {of_many[0]:.2f} ms, "
        f"read {of_one[1]:.4f} and {of_many[1]:.4f} GB a token",
        flush=True,
    )


if __name__ == "__main__":
    main()
