"""``mlx_moeflux server``: mlx-lm's OpenAI-compatible server on our loader, caches and experts."""

from __future__ import annotations

import _thread
import argparse
import contextlib
import io
import json
import logging
import math
import signal
import socket
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING
from unittest import mock

from mlx_moeflux.cli.generate import (
    add_cache_arguments,
    add_expert_arguments,
    load_options,
    prompt_cache,
    refuse,
)
from mlx_moeflux.errors import (
    CacheError,
    CheckpointError,
    InputError,
    MoefluxError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from mlx_moeflux.cache.prompt.cache import PromptCache

REFUSED = ("--adapter-path", "--draft-model", "--num-draft-tokens", "--quantized-kv-start")
REFUSED += ("--pipeline", "--trust-remote-code")

# Flags that mlx-lm's server reads itself, with its own defaults.
PASSED = ("--allowed-origins", "--log-level", "--chat-template", "--temp", "--top-p", "--top-k")
PASSED += ("--min-p", "--max-tokens", "--chat-template-args", "--decode-concurrency")
PASSED += ("--prompt-concurrency", "--prefill-step-size", "--prompt-cache-size")
PASSED += ("--prompt-cache-bytes",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", help="directory or Hugging Face id (default: the bundled model)")
    add("--host", default="127.0.0.1", help="default %(default)s: this machine alone")
    add("--port", type=int, default=8080, help="default %(default)s")
    add("--use-default-chat-template", action="store_true", help="see mlx_lm.server")
    for flag in PASSED:
        add(flag, help="see mlx_lm.server")
    add_cache_arguments(parser)
    add_expert_arguments(parser)
    refuse(parser, REFUSED)


def run(args: argparse.Namespace) -> int:
    from mlx_moeflux import loading
    from mlx_moeflux.mlx_lm_plugin import register_with_mlx_lm

    options = load_options(args) | {"verbose": True}
    check_address(args.host, args.port)
    register_with_mlx_lm(**options)
    try:
        from mlx_lm import server
    except ImportError as error:
        raise UnsupportedError(
            f"the server needs the extra 'server' ({error}); pip install 'mlx_moeflux[server]'."
        ) from error
    given = ["--model", str(args.model or loading.BUNDLED_MODEL), "--host", args.host]
    given += ["--port", str(args.port)]
    given += ["--use-default-chat-template"] if args.use_default_chat_template else []
    for flag in PASSED:
        value = getattr(args, flag[2:].replace("-", "_"))
        given += [] if value is None else [flag, value]
    # SIGTERM must unwind too, so that pending states are written.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with prompt_cache(args) as prompts:
        serve(server, given, prompts)
    return 0


def serve(server, arguments: Sequence[str], prompts: PromptCache | None = None) -> None:
    """Run mlx-lm's server with an additional ``GET /metrics`` until it is interrupted. prompts:
    Replaces its own cache."""
    from mlx_moeflux.mlx_lm_plugin import SharedPrompts

    http, generator = server._run_http_server, server.ResponseGenerator
    failures: list[Exception] = []

    def with_prompts(provider, cache):
        provider.load_default = partial(_load_or_stop, provider.load_default, failures)
        provider.load = partial(_load_with_one_line, provider.load)
        shared = cache if prompts is None else SharedPrompts(provider, prompts)
        return lasting(generator)(provider, shared)

    def with_metrics(host, port, responses):
        http(host, port, responses, handler_class=handler_with_metrics(server.APIHandler))

    with (
        mock.patch.object(server, "_run_http_server", with_metrics),
        mock.patch.object(server, "ResponseGenerator", with_prompts),
        mock.patch.object(sys, "argv", ["mlx_moeflux.server", *arguments]),
    ):
        try:
            server.main()
        except KeyboardInterrupt:
            # The loading thread interrupts the main one after a failure.
            if not failures:
                raise
    if failures:
        raise failures[0]


def _load_or_stop(load: Callable[[], None], failures: list[Exception]) -> None:
    """Load the model in mlx-lm's loading thread; after a failure interrupt the main thread."""
    try:
        load()
    except MoefluxError as error:
        failures.append(error)
        # Not SIGINT, which background processes of scripts ignore; run() handles SIGTERM.
        _thread.interrupt_main(signal.SIGTERM)
        sys.exit()  # ends this thread silently


def _load_with_one_line(load: Callable, *arguments: object) -> object:
    """Load any model; put the hub's errors of several lines on one."""
    try:
        return load(*arguments)
    except MoefluxError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the model cannot be loaded: {_line(error)}") from error


def lasting(generator: type) -> type:
    """Extend mlx-lm's reply generator: refuse prompts beyond the context and survive failures.

    A failure ends the pending requests with an error; later requests are answered.
    """

    class Generator(generator):
        def __init__(self, *arguments):
            self._pending: weakref.WeakSet = weakref.WeakSet()
            super().__init__(*arguments)

        def _next_request(self, timeout=None):
            request = super()._next_request(timeout)
            if request is not None:
                self._pending.add(request[0])
            return request

        def _tokenize(self, tokenizer, request, args):
            prompt, *rest = super()._tokenize(tokenizer, request, args)
            if not len(prompt):
                raise InputError("the prompt is empty; give at least one token.")
            left = getattr(self.model_provider.model, "context_left", lambda: math.inf)()
            if len(prompt) > left:
                raise CacheError(
                    f"the prompt has {len(prompt)} tokens, the context room for {left}; shorten it."
                )
            args.max_tokens = min(args.max_tokens, left - len(prompt) + 1)
            return prompt, *rest

        def _run_generate(self):
            while True:
                try:
                    self._generate()
                    break
                except Exception as error:
                    logging.exception("A reply failed; the server goes on.")
                    for queue in list(self._pending):
                        queue.put(RuntimeError(f"the reply failed: {_line(error)}"))

    return Generator


def _line(message: object) -> str:
    return " ".join(str(message).split())


def check_address(host: str, port: int) -> None:
    """Check that a server can listen on an address.

    Raises:
        InputError: It cannot.
    """
    if not 0 <= port <= 65535:  # getaddrinfo would take the lowest 16 bits
        raise InputError(f"port is {port}; give 1 to 65535, or 0 for any that is free.")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            # As the server does: recently closed connections do not block the port.
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except OSError as error:
        why = error.strerror or error
        raise InputError(
            f"nothing can listen on {host}, port {port} ({why}); choose another --host or --port."
        ) from error


def handler_with_metrics(handler: type) -> type:
    """Extend mlx-lm's request handler: answer ``/metrics`` with expert statistics, and invalid
    requests with status 400 and one line."""

    class Handler(handler):
        began = False

        def send_response(self, *arguments) -> None:
            self.began = True
            super().send_response(*arguments)

        def handle(self) -> None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client left
                super().handle()

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._answer(200, metrics(self.response_generator.model_provider))
            elif self.path.rstrip("/") == "/v1/models":
                self._answer(200, models(self.response_generator.cli_args.model))
            else:
                super().do_GET()

        def _answer(self, status: int, body: dict) -> None:
            self._set_completion_headers(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def do_POST(self) -> None:
            try:
                size = int(self.headers.get("Content-Length") or 0)
                raw = self.rfile.read(max(size, 0))
                body = json.loads(raw, parse_constant=_no_constant)
                fault = complaint(body, self.response_generator.model_provider.model)
                self.rfile = io.BytesIO(raw)
                if fault is None:
                    super().do_POST()
                    return
            except (TypeError, ValueError, AttributeError, KeyError, RecursionError) as error:
                if self.began:
                    raise
                fault = str(error)
            self._answer(400, {"error": _line(f"The request cannot be used: {fault}")})

    return Handler


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON.")


# Field -> type; mlx-lm's server checks the other fields before it generates.
TYPES = {
    "messages": list,
    "prompt": str,
    "tools": list,
    "chat_template_kwargs": dict,
    "stream_options": dict,
    "logit_bias": dict,
}


def complaint(body: object, model: object) -> str | None:
    """Return the first fault of a request's body that mlx-lm would find only during generation, or
    None."""
    if not isinstance(body, dict):
        return "it is no JSON object."
    for name, kind in TYPES.items():
        value = body.get(name)
        if value is not None and not isinstance(value, kind):
            return f"'{name}' is a {type(value).__name__}, expected {kind.__name__}."
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or any(not isinstance(s, str) or not s for s in stops):
        return "'stop' must be a text or a list of texts that are not empty."
    for message in body.get("messages") or []:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return "each of 'messages' needs a 'role'."
    if any(not isinstance(tool, dict) for tool in body.get("tools") or []):
        return "each of 'tools' must be an object."
    seed = body.get("seed")
    if isinstance(seed, int) and not 0 <= seed < 2**64:
        return f"'seed' is {seed}; give 0 to 2**64 - 1."
    if body.get("prompt") == "":
        return "the prompt is empty; give at least one token."
    limit = getattr(getattr(model, "config", None), "vocab_size", None)
    for i in body.get("logit_bias") or {}:
        if not i.isdecimal() or (limit is not None and int(i) >= limit):
            return f"'logit_bias' names {i!r}, which is no token id below {limit}."
    return None


def models(path: str) -> dict:
    """Return the body of ``/v1/models``."""
    named = {"id": str(path), "object": "model", "created": int(time.time())}
    return {"object": "list", "data": [named]}


def metrics(provider) -> dict:
    """Return the model's name and its expert statistics since loading."""
    model = provider.model
    if model is None:
        return {"model": None}
    return {"model": provider.model_key[0], "experts": model.store.stats().as_dict()}


def main() -> int:
    """Run the script ``mlx_moeflux.server``."""
    from mlx_moeflux.cli import run_command

    return run_command("server")
