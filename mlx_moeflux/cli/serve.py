"""``mlx_moeflux serve``: OpenAI's and Anthropic's protocols over HTTP."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import re
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_moeflux.awake import Awake
from mlx_moeflux.cli.common import (
    LOADING,
    PROMPT_SHARE,
    RANKS,
    add_cache_arguments,
    add_load_arguments,
    add_memory_arguments,
    add_model_arguments,
    add_sampling_arguments,
    given_sampling,
    hint_speed,
    json_object,
    leads,
    load_options,
    memory_pressure,
    prompt_cache,
    refuse,
)
from mlx_moeflux.cli.messages import Trying, write_line
from mlx_moeflux.errors import InputError, UnsupportedError
from mlx_moeflux.generation.sampling_fields import SAMPLING_FIELDS
from mlx_moeflux.installation import install_command

if TYPE_CHECKING:
    from mlx_moeflux.models.protocol import LoadedModel

WAITS = True
SAMPLING = tuple(name for name, field in SAMPLING_FIELDS.items() if field.serve)
REFUSED = ("--adapter-path", "--draft-model", "--num-draft-tokens", "--quantized-kv-start")
REFUSED += ("--pipeline", "--trust-remote-code")
KEY_VARIABLE = "MOEFLUX_API_KEY"
LOCAL = ("127.0.0.1", "localhost", "::1")
HOST = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\sA-Z]+")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model_arguments(parser)
    add("--host", default="127.0.0.1", help="default %(default)s: this machine alone")
    add("--port", type=int, default=8080, help="default %(default)s; 0: any that is free")
    add("--api-key", help=f"key that requests must have (default: ${KEY_VARIABLE})")
    add("--allowed-host", action="append", default=[], help="name of this server; repeatable")
    add("--allowed-origins", nargs="*", default=[], help="web pages that may use this server")
    add("--model-name", metavar="NAME", help="id of the model (default: its folder, or hub id)")
    add("--strict-model", action="store_true", help="refuse requests that name another model")
    add("--chat-template", help="template, or file of it, instead of the model's own")
    add("--chat-template-args", default="{}", help="JSON object of template variables")
    add("--tool-parser", help="syntax of tool calls (default: by the chat template)")
    add("--reasoning-parser", help="syntax of reasoning (default: by the vocabulary)")
    add_sampling_arguments(parser, *SAMPLING, when="if a request has none")
    add("--max-tokens", type=int, default=-1, help="if a request has none, default: no limit (-1)")
    add("--decode-concurrency", type=int, default=32, help="replies at once, default %(default)s")
    add("--prompt-concurrency", type=int, default=8, help="prompts at once, default %(default)s")
    add("--prefill-step-size", type=int, help="tokens a call (default: 2048, streamed: all)")
    pause = "longest wait of replies for a prompt, default %(default)s"
    add("--max-pause", type=float, default=0.3, metavar="SECONDS", help=pause)
    add("--no-warm-up", action="store_true", help="serve before kernels have run once")
    add("--max-waiting", type=int, default=128, help="requests that wait, default %(default)s")
    add(
        "--kv-memory",
        default="auto",
        metavar="SIZE",
        help="of the states of all replies; auto (default): half of what the other parts leave",
    )
    seconds = {"type": float, "metavar": "SECONDS"}
    add("--timeout", default=3600.0, help="of one request, default %(default)s", **seconds)
    add("--shutdown-timeout", default=30.0, help="to finish, default %(default)s", **seconds)
    levels = ("DEBUG", "INFO", "WARNING", "ERROR")
    add("--log-level", default="INFO", choices=levels, help="of stderr, default %(default)s")
    held = "of prompts' states in memory, or a share of what models may fill; default %(default)s"
    add("--prompt-cache-bytes", default=PROMPT_SHARE, metavar="SIZE", help=held)
    add_memory_arguments(parser)
    add_cache_arguments(parser)
    add_load_arguments(parser, *LOADING, *RANKS)
    refuse(parser, REFUSED)


def run(args: argparse.Namespace) -> int:
    try:
        import llguidance  # noqa: F401
        import pydantic  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f"the server needs the extra 'server' ({error}); install it with "
            f"{install_command('mlx_moeflux[server]')}."
        ) from error
    from mlx_moeflux import loading
    from mlx_moeflux.server.app import make_app
    from mlx_moeflux.server.http import Server, listen
    from mlx_moeflux.server.memory import ServerMemory
    from mlx_moeflux.server.service import Service

    # All flags are checked before the model is read, which may take minutes.
    path = args.model or loading.BUNDLED_MODEL
    limits, service_options = _limits(args), _service_options(args, path)
    engine_options, template = _engine_options(args), _template(args)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(message)s", level="WARNING")
    logging.getLogger("mlx_moeflux.server").setLevel(args.log_level)
    if args.log_level != "DEBUG":
        logging.getLogger("uvicorn").setLevel("CRITICAL")  # it logs tracebacks
    if args.distributed and not leads():
        return _follow(args, path)
    awake = Awake(allow_sleep=args.allow_sleep)
    with listen(args.host, args.port) as bound, awake, _prompt_cache(args) as states:
        model, tokenizer = _load(args, path)
        hint_speed(model)
        with model, states:
            _set_template(tokenizer, template)
            memory = ServerMemory.of(model, engine_options.state_bytes)
            sys.stderr.write(f"{memory}\n")
            states.memory_bytes = memory.prompt_cache
            engine_options = _for_model(engine_options, model, memory)
            if not args.distributed:  # a rank that sleeps is lost to the others
                engine_options = replace(engine_options, awake=awake)
            service = Service(model, tokenizer, service_options, engine_options, states, memory)
            host, port = bound.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            url = f"http://{shown}:{port}"
            with Trying() as trying:

                def listening() -> None:
                    if engine_options.warm_up:
                        write_line(f"warming up, as {url}/health says; --no-warm-up leaves it out")

                def ready() -> None:
                    trying.end(lines=True)
                    write_line(f"serving {path} on {url}")

                app = make_app(service, limits)
                Server(app, limits, ready, listening).run(sockets=[bound])
    return 0


def _load(args: argparse.Namespace, path: Any) -> Any:
    """Load the model; the prompt cache has a part of the memory that it plans."""
    from mlx_moeflux import loading

    options = {**load_options(args), "reserved_memory": args.prompt_cache_bytes}
    return loading.load(path, revision=args.revision, **options, verbose=True)


def _follow(args: argparse.Namespace, path: Any) -> int:
    """Serve as another rank than 0."""
    from mlx_moeflux.server.following import follow

    for sent_to_all in (signal.SIGINT, signal.SIGHUP):
        signal.signal(sent_to_all, signal.SIG_IGN)  # rank 0 says when it ends
    with Awake(allow_sleep=args.allow_sleep), _prompt_cache(args) as states:
        model, _ = _load(args, path)
        with model, states:
            states.memory_bytes = model.plan.reserved_bytes
            follow(model, states)
    return 0


def _limits(args: argparse.Namespace) -> Any:
    from mlx_moeflux.checks import check_number
    from mlx_moeflux.server.guard import LOCAL_HOSTS, Limits

    key = args.api_key or os.environ.get(KEY_VARIABLE)
    if args.host not in LOCAL:
        if not key:
            raise InputError(
                f"other machines reach {args.host}: give --api-key or set {KEY_VARIABLE}."
            )
        if not args.allowed_host:
            raise InputError(
                f"other machines reach {args.host}: name this server with --allowed-host NAME."
            )
    check_number("--timeout", args.timeout, 0.001)
    check_number("--shutdown-timeout", args.shutdown_timeout, 0.0)
    for origin in args.allowed_origins:
        if origin not in ("*", "null") and not ORIGIN.fullmatch(origin):
            raise InputError(
                f"--allowed-origins has {origin!r}; give the beginning of a page's address up to "
                "its name or port, such as https://ai.example.org."
            )
    return Limits(
        hosts=frozenset({*LOCAL_HOSTS, *map(_host, args.allowed_host)}),
        api_key=key,
        origins=frozenset(args.allowed_origins),
        shutdown_seconds=args.shutdown_timeout,
    )


def _host(given: str) -> str:
    """Return a name of the server as it is compared with those of requests."""
    name = given.lower().removeprefix("[").removesuffix("]")
    if not HOST.fullmatch(name):
        try:
            ipaddress.ip_address(name)
        except ValueError:
            raise InputError(
                f"--allowed-host is {given!r}; give a name or an address without scheme and port, "
                "such as mac.local."
            ) from None
    return name


def _prompt_cache(args: argparse.Namespace) -> Any:
    """Return a context of the prompt cache: on disk if a directory is given, else in memory."""
    from mlx_moeflux.cache.prompt.cache import PromptCache
    from mlx_moeflux.experts.budget import parse_budget

    # What a percentage is of is known once the model is loaded.
    if parse_budget(args.prompt_cache_bytes, 10**12, what="--prompt-cache-bytes") is None:
        raise InputError("--prompt-cache-bytes is auto; give an amount such as 2GB or 5%.")
    if args.prompt_cache is None:
        return PromptCache(replies=True)
    states = prompt_cache(args, replies=True)
    try:
        Path(args.prompt_cache).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=args.prompt_cache):
            return states
    except OSError as error:
        why = error.strerror or error
        raise InputError(f"--prompt-cache {args.prompt_cache} cannot be written ({why}).") from None


def _template(args: argparse.Namespace) -> str | None:
    """Return the chat template that was given, tried."""
    from mlx_moeflux.sandbox.requests import check_syntax, check_template

    given: str | None = args.chat_template
    if given is None:
        return None
    template = given
    if "{" not in given:
        try:
            template = Path(given).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--chat-template {given} cannot be read ({error}).") from error
    check_syntax(template)
    check_template(template)
    return template


def _set_template(tokenizer: Any, template: str | None) -> None:
    """Replace the tokenizer's chat template by a given one, or try its own."""
    from mlx_moeflux.sandbox.requests import check_template

    if template is not None:
        tokenizer.chat_template, tokenizer.tool_template = template, None
        return
    for own in {tokenizer.chat_template, tokenizer.tool_template} - {None}:
        check_template(own)


def _name(args: argparse.Namespace, path: Any) -> str:
    """Return the model's id in replies: `org/name` of the hub, or its folder's own name, and no
    path of this machine."""
    from mlx_moeflux.checkpoint.model_name import parse_model_name

    given: str | None = args.model_name
    if given is not None:
        if not given.strip() or not given.isprintable():
            raise InputError(f"--model-name is {given!r}; give a name.")
        return given
    name = parse_model_name(path)
    folder, tag = Path(os.path.expanduser(name.place)), f":{name.chosen}" if name.chosen else ""
    if not name.is_path:
        return str(name)
    for part in folder.resolve().parts:
        if part.startswith("models--"):  # the hub's cache
            return part.removeprefix("models--").replace("--", "/", 1) + tag
    return (folder.absolute().name or folder.resolve().name) + tag


def _service_options(args: argparse.Namespace, path: Any) -> Any:
    from mlx_moeflux.checks import check_integer
    from mlx_moeflux.generation.prompt import check_template_options
    from mlx_moeflux.generation.sampling import make_sampler
    from mlx_moeflux.server.calls.registry import SYNTAXES
    from mlx_moeflux.server.reasoning import REASONING
    from mlx_moeflux.server.request import UNLIMITED, Defaults
    from mlx_moeflux.server.service import ServiceOptions

    sampling = given_sampling(args, SAMPLING)
    make_sampler(**sampling)
    if args.max_tokens != UNLIMITED:
        check_integer("--max-tokens", args.max_tokens, 1, hint=" (-1: no limit)")
    variables = json_object("--chat-template-args", args.chat_template_args)
    check_template_options(variables)
    for flag, name, known in (
        ("--tool-parser", args.tool_parser, SYNTAXES),
        ("--reasoning-parser", args.reasoning_parser, REASONING),
    ):
        if name is not None and name not in known:
            raise InputError(f"{flag} is {name!r}; there are {', '.join(known)}.")
    return ServiceOptions(
        name=_name(args, path),
        defaults=Defaults(
            args.max_tokens,
            {SAMPLING_FIELDS[name].request: value for name, value in sampling.items()},
        ),
        strict_model=args.strict_model,
        seconds=args.timeout,
        template_options=variables,
        tool_parser=args.tool_parser,
        reasoning_parser=args.reasoning_parser,
    )


def _engine_options(args: argparse.Namespace) -> Any:
    """Return the engine's options as far as they need no model; see :func:`_for_model`."""
    from mlx_moeflux.checks import check_integer, check_number
    from mlx_moeflux.experts.budget import parse_budget
    from mlx_moeflux.generation.idle import check_idle_release
    from mlx_moeflux.server.engine import EngineOptions

    for flag in ("decode_concurrency", "prompt_concurrency"):
        check_integer(f"--{flag.replace('_', '-')}", getattr(args, flag), 1)
    if args.prefill_step_size is not None:
        check_integer("--prefill-step-size", args.prefill_step_size, 1)
    check_integer("--max-waiting", args.max_waiting, 0)
    check_number("--max-pause", args.max_pause, 0.0)
    check_idle_release(args.idle_release)
    return EngineOptions(
        concurrency=args.decode_concurrency,
        prompts=args.prompt_concurrency,
        waiting=args.max_waiting,
        warm_up=not args.no_warm_up,
        state_bytes=parse_budget(args.kv_memory, 0, what="--kv-memory"),
        prefill_step_size=args.prefill_step_size,
        max_pause=args.max_pause,
        idle_release=args.idle_release,
        pressure=memory_pressure(args),
    )


def _for_model(options: Any, model: LoadedModel, memory: Any) -> Any:
    """Return options whose missing values are the model's and the plan's."""
    step = options.prefill_step_size
    if step is None and model.store.streaming is None:
        step = 2048  # a resident model reads no experts: calls may be short
    return replace(options, state_bytes=memory.states, prefill_step_size=step)
