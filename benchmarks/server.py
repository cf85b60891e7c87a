"""The server beside the batch generator that it stands on: same model, same prompts, one process.

    python -m benchmarks.server --like qwen3.5-35b-a3b --streams 1 8 32
    python -m benchmarks.server --model DIR --expert-memory 25% --streams 1 8
    python -m benchmarks.server --like qwen3.5-tiny --streams 1 4 --tokens 16 --prompt 32

For each number of streams: tokens a second of ``BatchGenerator`` and of the server, from the start
until the last token, and the time to the first token. Clients run in a process of their own and
read server-sent events; both sides run ``--repeats`` times in turns and the medians are printed.
With ``--like`` the weights are random and resident, in the GPU's memory.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np

from mlx_moeflux.backend import set_device_variables
from mlx_moeflux.generation.batch import BatchGenerator
from mlx_moeflux.loading import load_model
from mlx_moeflux.models.shapes import SHAPES


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


def prompts_of(streams: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(1, vocabulary, length).tolist() for _ in range(streams)]


def own_speed(model: Any, prompts: list[list[int]], tokens: int, options: Any) -> float:
    """Tokens a second of the batch generator alone."""
    began, count = time.perf_counter(), 0
    with BatchGenerator(
        model,
        max_tokens=tokens,
        completion_batch_size=options.concurrency,
        prefill_batch_size=options.prompts,
        prefill_step_size=options.prefill_step_size,
    ) as generator:
        generator.insert(prompts)
        while replies := generator.next():
            count += len(replies)
    return count / (time.perf_counter() - began)


def clients(port: int, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Tokens a second of all streams, and each one's time to the first token in seconds."""
    firsts, counts = [0.0] * len(prompts), [0] * len(prompts)
    start = threading.Barrier(len(prompts) + 1)

    def stream(i: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.connect()
        body = {"prompt": prompts[i], "max_tokens": tokens, "stream": True}
        body["stream_options"] = {"include_usage": True}
        start.wait()
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body))
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                firsts[i] = firsts[i] or time.perf_counter() - began
                if usage := json.loads(line[6:])["usage"]:
                    counts[i] = usage["completion_tokens"]
        connection.close()

    threads = [threading.Thread(target=stream, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    start.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    return {"speed": sum(counts) / (time.perf_counter() - began), "firsts": firsts}


def run_clients(port: int, streams: int, args: argparse.Namespace, vocabulary: int, seed: int):
    """:func:`clients` in a process of its own."""
    numbers = (port, streams, args.prompt, args.tokens, vocabulary, seed)
    command = [sys.executable, "-m", "benchmarks.server", "--clients", *map(str, numbers)]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--like", choices=SHAPES)
    parser.add_argument("--expert-memory", default="auto")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clients", type=int, nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.clients:
        port, streams, length, tokens, vocabulary, seed = args.clients
        print(json.dumps(clients(port, prompts_of(streams, length, vocabulary, seed), tokens)))
        return
    set_device_variables()
    with model_of(args) as model:
        measure(model, args)


def model_of(args: argparse.Namespace) -> Any:
    if args.model:
        return load_model(args.model, expert_memory=args.expert_memory)
    from benchmarks.full_shape import ours

    return ours(SHAPES[args.like])[0]


def measure(model: Any, args: argparse.Namespace) -> None:
    from mlx_moeflux.server.app import make_app
    from mlx_moeflux.server.engine import EngineOptions
    from mlx_moeflux.server.guard import Limits
    from mlx_moeflux.server.http import Server, listen
    from mlx_moeflux.server.request import Defaults
    from mlx_moeflux.server.service import Service, ServiceOptions

    options = EngineOptions(prefill_step_size=None if model.store.slots else 2048)
    named = ServiceOptions(name="model", defaults=Defaults(max_tokens=args.tokens))
    vocabulary, results = model.config.vocab_size, {}
    for repeat in range(args.repeats + 1):  # the first one compiles kernels
        for streams in args.streams:
            seed = 1000 * repeat + streams
            prompts = prompts_of(streams, args.prompt, vocabulary, seed)
            own = own_speed(model, prompts, args.tokens, options)
            before = model.store.stats().total.bytes_read
            with listen("127.0.0.1", 0) as bound:
                port = bound.getsockname()[1]
                service = Service(model, PlainTokens(), named, options)
                limits, ready = Limits(), threading.Event()
                server = Server(make_app(service, limits), limits, ready.set)
                run = lambda s=server, b=bound: asyncio.run(s.serve([b]))  # noqa: E731
                thread = threading.Thread(target=run)
                thread.start()
                ready.wait()
                while not service.ready:  # its warm-up
                    time.sleep(0.01)
                before = model.store.stats().total.bytes_read
                found = run_clients(port, streams, args, vocabulary, seed)
                server.handle_exit(0, None)
                thread.join()
            read = model.store.stats().total.bytes_read - before
            if repeat:
                results.setdefault(streams, []).append((own, found, read))
    report(results)


def report(results: dict[int, list[tuple[float, dict[str, Any], int]]]) -> None:
    print(
        "streams | generator tok/s | server tok/s | ratio | first token p50, p95 s | MB a request"
    )
    for streams, runs in results.items():
        own = statistics.median(own for own, _, _ in runs)
        served = statistics.median(found["speed"] for _, found, _ in runs)
        ratio = statistics.median(found["speed"] / own for own, found, _ in runs)
        firsts = np.array([first for _, found, _ in runs for first in found["firsts"]])
        read = statistics.median(read for _, _, read in runs) / streams / 1e6
        p50, p95 = np.quantile(firsts, (0.5, 0.95))
        print(
            f"{streams:7d} | {own:15.1f} | {served:12.1f} | {ratio:5.3f} | {p50:10.3f}, {p95:9.3f}"
            f" | {read:.1f}"
        )


if __name__ == "__main__":
    main()
