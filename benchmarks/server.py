"""Speed of the server and of its batch generator on one model, in turns.

    python -m benchmarks.server --like qwen3.5-35b-a3b
    python -m benchmarks.server --like qwen3.5-tiny --streams 1 4 --prompt 32 --tokens 16
    python -m benchmarks.server --model DIR --expert-memory 100% 25%

For each memory of the experts and number of streams: tokens a second of ``BatchGenerator`` and of
the server, from the start until the last token; their ratio; the time to the first token; the bytes
of experts read a request. Clients run in a process of their own and read server-sent events. Which
of the two is first changes from round to round; medians are printed.

With ``--like`` the weights are random. Resident ones are made in the GPU's memory, with all layers;
those that are streamed are written to a temporary directory, ``--streamed-layers`` of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_moeflux.backend import set_device_variables
from mlx_moeflux.conversion.synthesize import synthesize
from mlx_moeflux.generation.batch import BatchGenerator
from mlx_moeflux.loading import load_model
from mlx_moeflux.models.shapes import SHAPES
from mlx_moeflux.server.app import make_app
from mlx_moeflux.server.engine import EngineOptions
from mlx_moeflux.server.guard import Limits
from mlx_moeflux.server.http import Server, listen
from mlx_moeflux.server.request import Defaults
from mlx_moeflux.server.service import Service, ServiceOptions

RESIDENT = "100%"
CLIENTS = Path(__file__).with_name("server_clients.py")


class PlainTokens:
    """Tokenizer of the ids themselves, for weights that no tokenizer belongs to."""

    byte_level = False
    chat_template = tool_template = bos_token = bos_token_id = None
    eos_token_id, eos_token_ids, all_special_ids = 0, {0}, [0]

    def convert_ids_to_tokens(self, i: int) -> str:
        return f" {i}"

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[None]:
        return [None] * len(tokens)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(word) for word in text.split() if word.isdecimal()]

    def decode(self, ids: list[int]) -> str:
        return "".join(f" {i}" for i in ids)

    def detokenizer(self) -> PlainTokens:
        return self

    def add(self, token: int) -> str:
        return f" {token}"

    def finish(self) -> str:
        return ""


class Clients:
    """The process of server_clients.py."""

    def __init__(self):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process: Any = subprocess.Popen([sys.executable, str(CLIENTS)], **pipes)

    def measured(self, port: int, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        order = {"port": port, "prompts": prompts, "tokens": tokens}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@contextlib.contextmanager
def serving(model: Any, tokens: int, options: EngineOptions) -> Iterator[int]:
    """The port of a server that is ready."""
    named = ServiceOptions(name="model", defaults=Defaults(max_tokens=tokens))
    service, limits, started = Service(model, PlainTokens(), named, options), Limits(), []
    with listen("127.0.0.1", 0) as bound:
        server = Server(make_app(service, limits), limits, lambda: started.append(True))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([bound])))
        thread.start()
        try:
            while not (started and service.ready):  # its warm-up
                time.sleep(0.01)
                if started and not service.engine.alive:
                    raise RuntimeError("the engine ended; the log says why")
            yield bound.getsockname()[1]
        finally:
            server.handle_exit(0, None)
            thread.join()


def own_speed(
    model: Any, prompts: list[list[int]], tokens: int, options: EngineOptions
) -> dict[str, Any]:
    """Tokens a second of the batch generator alone."""
    began, count = time.perf_counter(), 0
    with BatchGenerator(
        model,
        max_tokens=tokens,
        stop_ids=PlainTokens.eos_token_ids,
        completion_batch_size=options.concurrency,
        prefill_batch_size=options.prompts,
        prefill_step_size=options.prefill_step_size,
    ) as generator:
        generator.insert(prompts)
        while replies := generator.next():
            count += len(replies)
    return {"speed": count / (time.perf_counter() - began)}


class Run(NamedTuple):
    """Results and bytes read of both sides in one round."""

    own: dict[str, Any]
    served: dict[str, Any]
    own_bytes: int
    served_bytes: int


def measure(model: Any, args: argparse.Namespace, tokens: int, rounds: int) -> dict[int, list[Run]]:
    options = EngineOptions(prefill_step_size=None if model.store.streaming else 2048, warm_up=True)
    random, clients = np.random.default_rng(0), Clients()
    found: dict[int, list[Run]] = {streams: [] for streams in args.streams}
    with contextlib.closing(clients), serving(model, tokens, options) as port:
        for turn in range(rounds + 1):  # the first one compiles kernels
            for streams in args.streams:
                results = {}
                for side in ("own", "served") if turn % 2 else ("served", "own"):
                    shape = (streams, args.prompt)
                    prompts = random.integers(1, model.config.vocab_size, shape).tolist()
                    before = model.store.stats().total.bytes_read
                    results[side] = (
                        own_speed(model, prompts, tokens, options)
                        if side == "own"
                        else clients.measured(port, prompts, tokens)
                    )
                    results[f"{side}_bytes"] = model.store.stats().total.bytes_read - before
                if turn:
                    found[streams].append(Run(**results))
    return found


@contextlib.contextmanager
def model_of(args: argparse.Namespace, memory: str) -> Iterator[Any]:
    """The model with so much memory for its experts."""
    if args.like and memory == RESIDENT:
        from benchmarks.full_shape import ours

        yield ours(SHAPES[args.like])[0]
        return
    with tempfile.TemporaryDirectory() as directory:
        path = args.model or Path(directory) / "model"
        if args.like:
            synthesize(args.like, path, layers=args.streamed_layers)
        with load_model(path, expert_memory=memory) as model:
            yield model


def lines(memory: str, found: dict[int, list[Run]]) -> Iterator[str]:
    for streams, runs in found.items():
        own = statistics.median(run.own["speed"] for run in runs)
        served = statistics.median(run.served["speed"] for run in runs)
        ratio = statistics.median(run.served["speed"] / run.own["speed"] for run in runs)
        firsts = [first for run in runs for first in run.served["firsts"]]
        p50, p95 = np.quantile(firsts, (0.5, 0.95))
        read = (
            f"{statistics.median(getattr(run, side) for run in runs) / streams / 1e6:.0f}"
            for side in ("own_bytes", "served_bytes")
        )
        yield (
            f"{memory:>6} | {streams:7d} | {own:9.1f} | {served:9.1f} | {ratio:5.3f} "
            f"| {p50:6.3f} | {p95:6.3f} | {', '.join(read)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path)
    source.add_argument("--like", choices=SHAPES)
    parser.add_argument("--expert-memory", nargs="+", default=[RESIDENT, "25%"])
    parser.add_argument("--streamed-layers", type=int, default=8)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--streamed-tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streamed-rounds", type=int, default=2)
    args = parser.parse_args()
    set_device_variables()
    device = mx.device_info().get("device_name", mx.default_device())
    print(f"{args.like or args.model}; {device}, MLX {mx.__version__}", flush=True)
    table = []
    for memory in args.expert_memory:
        streamed, began = memory != RESIDENT, time.perf_counter()
        with model_of(args, memory) as model:
            print(f"{memory}: model made in {time.perf_counter() - began:.0f} s", flush=True)
            tokens = args.streamed_tokens if streamed else args.tokens
            rounds = args.streamed_rounds if streamed else args.rounds
            found = measure(model, args, tokens, rounds)
        table += lines(memory, found)
        print(
            f"{memory}: done in {time.perf_counter() - began:.0f} s", *table, sep="\n", flush=True
        )
        mx.clear_cache()
    print(
        "\nmemory | streams | generator |    server | ratio | first token p50, p95 s | MB a request"
    )
    print(*table, sep="\n")


if __name__ == "__main__":
    main()
