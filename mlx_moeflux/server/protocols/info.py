"""Answers that need no generation: models, health, metrics, properties, tokens."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from mlx_moeflux._version import __version__
from mlx_moeflux.errors import CacheError
from mlx_moeflux.generation.prompt import encode_bounded
from mlx_moeflux.server.errors import RequestError
from mlx_moeflux.server.fields import Fields
from mlx_moeflux.server.protocols import anthropic_messages
from mlx_moeflux.server.service import Service


def model(service: Service) -> dict[str, Any]:
    """Return OpenAI's description of the one model."""
    return {
        "id": service.options.name,
        "object": "model",
        "created": service.created,
        "owned_by": "mlx_moeflux",
        **lengths(service),
    }


def lengths(service: Service) -> dict[str, Any]:
    """Return the most tokens that a prompt may have, under every name by which clients ask: those
    of OpenRouter, vLLM, LM Studio, Groq, Anthropic and llama.cpp."""
    most = service.engine.prompt_room
    names = ("context_length", "max_model_len", "max_context_length", "context_window")
    return {**dict.fromkeys((*names, "max_input_tokens"), most), "meta": {"n_ctx": most}}


# After which a client may ask again whether a server that warms up is ready.
WARM_UP_SECONDS = 2

# Codex gives a model of the catalogue no instructions of its own.
CODEX_INSTRUCTIONS = """\
You are a coding agent in a terminal. You and the user work on the files of one folder.
Read the files that matter before you change them. Search, read, edit and test with the shell.
Never guess what a file holds or what a command prints.
Make the smallest change that does what the user asks, in the style of the code around it. Leave
unrelated code alone. Do not commit, and do not install anything, unless asked.
Go on until the task is done and checked. Then say in a few sentences what you changed and what you
ran. If something cannot be done, say so and why. Follow the instructions in AGENTS.md files.
"""


def models(service: Service, *, catalogue: bool = False) -> dict[str, Any]:
    """Return the list of the one model. catalogue: With Codex's description of it, too."""
    found: dict[str, Any] = {"object": "list", "data": [model(service)]}
    return {**found, "models": [codex_model(service)]} if catalogue else found


def codex_model(service: Service) -> dict[str, Any]:
    """Return the model as an entry of Codex's catalogue, from which Codex learns the context.

    It asks for the catalogue with its `client_version`, if a command gives the provider's key.
    """
    return {
        "slug": service.options.name,
        "display_name": service.options.name,
        "description": None,
        "default_reasoning_level": None,
        "supported_reasoning_levels": [],
        "shell_type": "shell_command",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
        "upgrade": None,
        "base_instructions": CODEX_INSTRUCTIONS,
        "supports_reasoning_summaries": service.reasoning is not None,
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": None,
        "truncation_policy": {"mode": "bytes", "limit": 10_000},
        "supports_parallel_tool_calls": True,
        "context_window": service.engine.prompt_room,
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
    }


def retrieve(service: Service, name: str) -> dict[str, Any]:
    """Return the model under its name, or under any if the server is not strict."""
    service.check_model(name)
    return model(service)


def props(service: Service) -> dict[str, Any]:
    """Return what a client may want to know of model and limits."""
    defaults, engine = service.options.defaults, service.engine.options
    return {
        "model": service.options.name,
        **lengths(service),
        # llama.cpp's place in this answer.
        "default_generation_settings": {"n_ctx": service.engine.prompt_room},
        "vocabulary": service.vocabulary,
        "layers": len(service.model.layers),
        "chat_template": service.tokenizer.chat_template,
        "tool_calls": service.tool_syntax is not None,
        "reasoning": service.reasoning is not None,
        "defaults": {"max_tokens": defaults.max_tokens, **defaults.options},
        "concurrency": engine.concurrency,
        "waiting": engine.waiting,
        "state_bytes": engine.state_bytes,
        "memory": service.memory.as_dict() if service.memory else None,
        "version": __version__,
    }


def count_tokens(body: anthropic_messages.Body, service: Service) -> dict[str, Any]:
    """Return the tokens of the prompt of Anthropic's messages."""
    request = anthropic_messages.counted(body, service)
    return {"input_tokens": service.count(request)}


class Text(Fields):
    """The body of a text to tokenize; with special tokens if add_special."""

    inert = ("model",)
    content: str
    add_special: bool = False


def tokenize(body: Text, service: Service) -> dict[str, Any]:
    """Return the ids of a text.

    Raises:
        RequestError: It is much longer than the context.
    """
    most, special = service.model.context_left(), body.add_special
    try:
        ids = encode_bounded(service.tokenizer, body.content, most, add_special_tokens=special)
    except CacheError as error:
        raise service.long_text(error) from error
    return {"tokens": ids}


class Tokens(Fields):
    """The body of ids to detokenize."""

    inert = ("model",)
    tokens: list[Any] = Field([])


def detokenize(body: Tokens, service: Service) -> dict[str, Any]:
    """Return the text of ids."""
    if any(type(i) is not int or not 0 <= i < service.vocabulary for i in body.tokens):
        raise RequestError(
            f"'tokens' must be ids from 0 to {service.vocabulary - 1}.", param="tokens"
        )
    return {"content": service.tokenizer.decode(body.tokens)}


def health(service: Service) -> dict[str, Any]:
    """Return the state of a server that answers.

    Raises:
        RequestError: It does not yet, or no longer.
    """
    if service.draining:
        raise RequestError("the server is shutting down.", status=503)
    if not service.engine.alive:
        raise RequestError("the model does not run any more.", status=503)
    if not service.ready:
        reason = "the server warms up; requests wait until it has."
        raise RequestError(reason, status=503, retry_after=WARM_UP_SECONDS)
    return {"status": "ok"}


def metrics(service: Service) -> str:
    """Return all counts in Prometheus' text format."""
    cache, work = service.prompt_cache, service.engine.workload
    streaming, elastic = service.model.store.streaming, service.engine.elastic
    return service.metrics.text(
        {
            "replies": ("gauge", "Replies that wait or run.", service.engine.live),
            "prompts_waiting": ("gauge", "Prompts that wait to be read.", work.waiting),
            "prompts_reading": ("gauge", "Prompts that are read together.", work.reading),
            "prompt_layers": (
                "gauge",
                "Layers that these have passed in their present call of the model.",
                work.layers,
            ),
            "prompt_share": ("gauge", "Share of these that is read, 0 to 1.", work.share),
            **service.model.store.stats().table().metrics(),
            "prompt_cache_bytes": (
                "gauge",
                "Bytes of stored states in memory.",
                cache.nbytes if cache else 0,
            ),
            "prompt_cache_states": ("gauge", "Stored states.", len(cache) if cache else 0),
            "prompt_cache_bytes_written_total": (
                "counter",
                "Bytes that the prompt cache wrote to disk.",
                cache.bytes_written if cache else 0,
            ),
            "expert_memory_bytes": (
                "gauge",
                "Bytes of the experts' banks now; 0 if all experts are resident.",
                streaming.nbytes if streaming else 0,
            ),
            "expert_memory_shrinks_total": (
                "counter",
                "Steps in which banks shrank because the system lacked memory.",
                elastic.shrunk if elastic else 0,
            ),
            "expert_memory_grows_total": (
                "counter",
                "Steps in which banks grew back.",
                elastic.grown if elastic else 0,
            ),
            **(service.memory.metrics() if service.memory else {}),
        }
    )
