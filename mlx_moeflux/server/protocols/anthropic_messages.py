"""Anthropic's messages: ``POST /v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import json
import uuid
from typing import Any

from mlx_moeflux.server.assemble import CALLS, LENGTH, Delta
from mlx_moeflux.server.errors import CONTEXT_EXCEEDED, RequestError
from mlx_moeflux.server.fields import Fields, required
from mlx_moeflux.server.protocols.openai import event
from mlx_moeflux.server.request import (
    AUTO,
    NONE,
    REQUIRED,
    GenerationRequest,
    Sampling,
    check_tools,
    function_tool,
    read_stop,
)
from mlx_moeflux.server.service import Generation, Service

INERT = ("metadata", "service_tier", "container", "context_management", "betas", "inference_geo",
         "cache_control")  # fmt: skip
"""Fields of requests that change nothing in a reply."""

# Claude Code writes a line of this name, which changes from turn to turn, into the system prompt:
# with it no prompt would continue the one before.
CHANGING_LINE = "x-anthropic-billing-header:"
MOST_CHECKPOINTS = 4
ROLES = ("user", "assistant", "system")
KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 408: "timeout_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def error(found: RequestError) -> dict[str, Any]:
    """Return Anthropic's error object."""
    kind = "api_error" if found.status >= 500 else "invalid_request_error"
    # Claude Code shortens a conversation when it reads these words.
    words = "prompt is too long: " if found.code == CONTEXT_EXCEEDED else ""
    inner = {"type": KINDS.get(found.status, kind), "message": f"{words}{found}"}
    return {"type": "error", "error": inner, "request_id": None}


def read(body: Fields, service: Service) -> GenerationRequest:
    """Return the request of a body; refuse what would not act."""
    if body.integer("max_tokens", low=1) is None:
        raise body.wrong("max_tokens", "give the most tokens of the reply")
    return read_prompt(body, service)


def read_prompt(body: Fields, service: Service) -> GenerationRequest:
    """Return the request of a body that may lack max_tokens, as one to be counted does."""
    service.check_model(body.text("model"))
    defaults = service.options.defaults
    sampling = Sampling(
        temperature=body.number("temperature", defaults.temperature, low=0, high=1),
        top_p=body.number("top_p", defaults.top_p, low=0, high=1),
        top_k=body.integer("top_k", defaults.top_k, low=0),
        min_p=defaults.min_p,
    )
    tools = [_tool(tool) for tool in body.objects("tools")]
    choice, parallel = _tool_choice(body.object("tool_choice"))
    check_tools(tools, choice)
    messages, checkpoints = _messages(body, service)
    schema, options = _output(body)
    request = GenerationRequest(
        sampling=sampling,
        messages=messages,
        max_tokens=body.integer("max_tokens", low=1),
        stop=read_stop(body, "stop_sequences"),
        schema=schema,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        template_options={**_thinking(body.object("thinking")), **options},
        checkpoints=sorted(set(checkpoints))[-MOST_CHECKPOINTS:],
        stream=body.flag("stream"),
    )
    body.ignore(*INERT)
    body.finish()
    return request


def _tool(tool: Fields) -> dict[str, Any]:
    tool.choice("type", ("custom",))
    if "input_schema" not in tool:
        raise tool.wrong("input_schema", "give the schema of a tool of the client's")
    function = {
        "name": tool.any("name"),
        "description": tool.any("description"),
        "parameters": tool.mapping("input_schema"),
    }
    tool.ignore(
        "cache_control", "strict", "eager_input_streaming", "defer_loading", "input_examples"
    )
    tool.finish()
    return function_tool(Fields(function, "tools"))


def _tool_choice(choice: Fields | None) -> tuple[str, bool]:
    """Return the choice in OpenAI's words, and whether a reply may have several calls."""
    if choice is None:
        return AUTO, True
    kinds = {"auto": AUTO, "any": REQUIRED, "none": NONE, "tool": ""}
    kind = required(choice, lambda name: choice.choice(name, kinds), "type", "give a type")
    name = required(choice, choice.text, "name", "name the tool") if kind == "tool" else ""
    parallel = not choice.flag("disable_parallel_tool_use")
    choice.finish()
    return kinds[kind] or name, parallel


def _thinking(thinking: Fields | None) -> dict[str, Any]:
    """Return the template's variable; a budget of tokens is the model's own business."""
    if thinking is None:
        return {}
    kind = thinking.choice("type", ("enabled", "disabled", "adaptive"), "enabled")
    thinking.ignore("budget_tokens", "display")
    thinking.finish()
    return {"enable_thinking": kind != "disabled"}


def _output(body: Fields) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the schema of the answer, and the template's variables of the effort."""
    config, options = body.object("output_config"), {}
    form = body.object("output_format")
    if config is not None:
        form = config.object("format") or form
        if effort := config.text("effort"):
            options["reasoning_effort"] = effort
        config.finish()
    if form is None:
        return (), options
    form.choice("type", ("json_schema",))
    if "schema" not in form:
        raise form.wrong("schema", "give a JSON schema")
    return (form.mapping("schema"),), options


def _messages(body: Fields, service: Service) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the messages in OpenAI's form, and the numbers of those after which a mark stands."""
    messages: list[dict[str, Any]] = []
    checkpoints: list[int] = []
    system, marked = _system(body)
    if system:
        messages.append({"role": "system", "content": system})
    if marked:
        checkpoints.append(len(messages))
    given = body.objects("messages")
    if not given:
        raise body.wrong("messages", "give at least one message")
    for message in given:
        role = message.choice("role", ROLES)
        if role is None:
            raise message.wrong("role", "give a role")
        blocks, marked = _blocks(message)
        messages += _assistant(blocks, service) if role == "assistant" else _user(blocks, role)
        message.finish()
        if marked:
            checkpoints.append(len(messages))
    return messages, checkpoints


def _system(body: Fields) -> tuple[str, bool]:
    """Return the system prompt without its changing line, and whether it is marked."""
    whole = body.any("system")
    if isinstance(whole, str):
        texts, marked = [whole], False
    else:
        blocks = body.objects("system")
        texts = [required(block, block.text, "text", "give a text") for block in blocks]
        marked = any("cache_control" in block for block in blocks)
    kept = []
    for text in texts:
        lines = text.split("\n")
        stable = [line for line in lines if not line.lstrip().lower().startswith(CHANGING_LINE)]
        if "\n".join(stable).strip() or len(stable) == len(lines):
            kept.append("\n".join(stable))
    return "\n\n".join(text for text in kept if text), marked


def _blocks(message: Fields) -> tuple[list[Fields], bool]:
    """Return the blocks of a message, and whether one is marked."""
    content = message.any("content")
    if isinstance(content, str):
        return [Fields({"type": "text", "text": content}, message.place("content"))], False
    if content is None:
        raise message.wrong("content", "give a text or blocks")
    blocks = message.objects("content")
    return blocks, any("cache_control" in block for block in blocks)


def _user(blocks: list[Fields], role: str) -> list[dict[str, Any]]:
    """Return a message for each tool's result, and one for the texts behind them."""
    messages, texts = [], []
    for block in blocks:
        kind = block.text("type")
        if kind == "text":
            texts.append(required(block, block.text, "text", "give a text"))
        elif kind == "tool_result":
            text = _result(block)
            call = required(block, block.text, "tool_use_id", "name the call")
            messages.append({"role": "tool", "content": text, "tool_call_id": call})
        else:
            raise block.wrong("type", "this server reads text and tool_result, and fetches nothing")
    if texts or not messages:
        messages.append({"role": role, "content": "\n".join(texts)})
    return messages


def _result(block: Fields) -> str:
    if isinstance(block.any("content", ""), str):
        return block.text("content", "")
    parts = block.objects("content")
    for part in parts:
        if part.text("type") != "text":
            raise part.wrong("type", "this server reads text alone, and fetches nothing")
    return "\n".join(part.text("text", "") for part in parts)


def _assistant(blocks: list[Fields], service: Service) -> list[dict[str, Any]]:
    texts, reasoning, calls = [], [], []
    for block in blocks:
        kind = block.text("type")
        if kind == "text":
            texts.append(required(block, block.text, "text", "give a text"))
        elif kind == "thinking":
            reasoning.append(block.text("thinking", ""))
        elif kind == "tool_use":
            arguments: Any = block.mapping("input")
            if service.tool_syntax is not None and service.tool_syntax.text_arguments:
                arguments = json.dumps(arguments, ensure_ascii=False)
            name = required(block, block.text, "name", "name the tool")
            call = {"name": name, "arguments": arguments}
            calls.append({"id": block.text("id", ""), "type": "function", "function": call})
        elif kind != "redacted_thinking":
            raise block.wrong("type", "this server reads text, thinking and tool_use")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if any(reasoning):
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _usage(generation: Generation) -> dict[str, Any]:
    cached = generation.cached_tokens
    return {
        "input_tokens": generation.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": generation.completion_tokens,
    }


def _stop(delta: Delta) -> dict[str, Any]:
    reasons = {LENGTH: "max_tokens", CALLS: "tool_use"}
    reason = "stop_sequence" if delta.stop else reasons.get(delta.finish or "", "end_turn")
    return {"stop_reason": reason, "stop_sequence": delta.stop}


def _message(service: Service, generation: Generation) -> dict[str, Any]:
    return {
        "id": f"msg_{uuid.uuid4().hex[:24]}",
        "type": "message",
        "role": "assistant",
        "model": service.options.name,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(generation),
    }


async def reply(generation: Generation, service: Service) -> dict[str, Any]:
    """Return the body of the whole reply."""
    (delta,) = await generation.whole()
    content: list[dict[str, Any]] = []
    if delta.reasoning:
        content.append({"type": "thinking", "thinking": delta.reasoning, "signature": ""})
    if delta.text:
        content.append({"type": "text", "text": delta.text})
    for call in delta.calls:
        arguments = json.loads(call.arguments)
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    return {**_message(service, generation), "content": content, **_stop(delta)}


class Stream:
    """The events of a streamed reply. Its blocks are numbered, and one is open at a time."""

    def __init__(self, generation: Generation, service: Service):
        self._generation, self._service = generation, service
        self._open: str | None = None
        self._index = -1
        self._last = Delta()

    def start(self) -> str:
        message = _message(self._service, self._generation)
        return _event({"type": "message_start", "message": message})

    def add(self, i: int, delta: Delta) -> str:
        found, self._last = "", delta
        if delta.reasoning:
            found += self._enter("thinking", {"thinking": "", "signature": ""})
            found += self._delta("thinking_delta", thinking=delta.reasoning)
        if delta.text:
            found += self._enter("text", {"text": ""})
            found += self._delta("text_delta", text=delta.text)
        for call in delta.calls:
            found += self._enter("tool_use", {"id": call.id, "name": call.name, "input": {}})
            found += self._delta("input_json_delta", partial_json=call.arguments)
        return found

    def end(self) -> str:
        usage = _usage(self._generation)
        last = {"type": "message_delta", "delta": _stop(self._last), "usage": usage}
        return self._close() + _event(last) + _event({"type": "message_stop"})

    def fail(self, found: RequestError) -> str:
        return event(error(found), "error")

    def _enter(self, kind: str, block: dict[str, Any]) -> str:
        """Return the events that make a block of `kind` the open one; each call has its own."""
        if self._open == kind and kind != "tool_use":
            return ""
        before, self._open = self._close(), kind
        self._index += 1
        start = {"type": "content_block_start", "index": self._index}
        return before + _event({**start, "content_block": {"type": kind, **block}})

    def _delta(self, kind: str, **delta: str) -> str:
        inner = {"type": kind, **delta}
        return _event({"type": "content_block_delta", "index": self._index, "delta": inner})

    def _close(self) -> str:
        if self._open is None:
            return ""
        last = self._delta("signature_delta", signature="") if self._open == "thinking" else ""
        self._open = None
        return last + _event({"type": "content_block_stop", "index": self._index})


def _event(data: dict[str, Any]) -> str:
    return event(data, data["type"])
