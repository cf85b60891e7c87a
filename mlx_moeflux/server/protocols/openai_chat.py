"""OpenAI's chat completions: ``POST /v1/chat/completions``."""

from __future__ import annotations

import time
import uuid
from typing import Any

from mlx_moeflux.server.assemble import Delta
from mlx_moeflux.server.errors import RequestError
from mlx_moeflux.server.fields import Fields, required
from mlx_moeflux.server.protocols.openai import (
    INERT,
    ChunkStream,
    logprobs,
    merged_system,
    parsed_arguments,
    read_stream,
    text_of,
    usage,
)
from mlx_moeflux.server.request import (
    AUTO,
    MOST_CHOICES,
    MOST_LOGPROBS,
    NONE,
    REQUIRED,
    GenerationRequest,
    check_tools,
    function_tool,
    read_sampling,
    read_stop,
)
from mlx_moeflux.server.service import Generation, Service

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
ROLES |= {"tool": "tool"}

# Arguments of the rendering itself, which are no variables of a template.
RESERVED = {
    "self", "conversation", "messages", "tools", "documents", "chat_template", "template",
    "tokenize", "return_dict", "add_generation_prompt", "continue_final_message", "bos_token",
    "eos_token", "pad_token",
}  # fmt: skip


def read(body: Fields, service: Service) -> GenerationRequest:
    """Return the request of a body; refuse what would not act."""
    service.check_model(body.text("model"))
    stream, counted = read_stream(body)
    tools = [_tool(tool) for tool in body.objects("tools")]
    choice = read_tool_choice(body)
    check_tools(tools, choice)
    request = GenerationRequest(
        sampling=read_sampling(body, service.options.defaults, service.vocabulary),
        messages=merged_system([_message(m, service) for m in body.objects("messages")]),
        max_tokens=body.integer("max_completion_tokens", body.integer("max_tokens", low=1), low=1),
        n=body.integer("n", 1, low=1, high=MOST_CHOICES),
        stop=read_stop(body),
        logprobs=_logprobs(body),
        schema=read_format(body.object("response_format")),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.flag("parallel_tool_calls", True),
        template_options=_template_options(body),
        stream=stream,
        usage=counted,
    )
    if not request.messages:
        raise body.wrong("messages", "give at least one message")
    if body.any("modalities", ["text"]) != ["text"]:
        raise body.wrong("modalities", 'replies are ["text"]')
    body.ignore(*INERT)
    body.finish()
    return request


def _tool(tool: Fields) -> dict[str, Any]:
    tool.choice("type", ("function",))
    return function_tool(required(tool, tool.object, "function", "give the function"))


def read_tool_choice(body: Fields) -> str:
    """Return "auto", "none", "required", or the name of a function."""
    value = body.any("tool_choice", AUTO)
    if isinstance(value, str):
        return body.choice("tool_choice", (AUTO, NONE, REQUIRED), AUTO)
    choice = Fields(value, "tool_choice")
    choice.choice("type", ("function",))
    # Responses name the function at the top.
    function = choice.object("function") or choice
    return required(function, function.text, "name", "name the function")


def _message(message: Fields, service: Service) -> dict[str, Any]:
    role = ROLES[required(message, lambda name: message.choice(name, ROLES), "role", "give a role")]
    found: dict[str, Any] = {"role": role, "content": text_of(message, "content") or ""}
    if role == "assistant":
        reasoning = message.text("reasoning_content") or message.text("reasoning")
        if reasoning:
            found["reasoning_content"] = reasoning
        calls = [_call(call, service) for call in message.objects("tool_calls")]
        if calls:
            found["tool_calls"] = calls
        message.ignore("refusal", "annotations", "reasoning", "function_call", "audio")
    elif "content" not in message:
        raise message.wrong("content", "give a text")
    if role == "tool":
        found["tool_call_id"] = message.text("tool_call_id", "")
        if name := message.text("name"):
            found["name"] = name
    message.ignore("name")
    message.finish()
    return found


def _call(call: Fields, service: Service) -> dict[str, Any]:
    call.choice("type", ("function",))
    function = required(call, call.object, "function", "give the function")
    text = required(function, function.text, "arguments", "give the JSON text of an object")
    return {
        "id": call.text("id", ""),
        "type": "function",
        "function": {
            "name": required(function, function.text, "name", "name the function"),
            "arguments": parsed_arguments(service, text, function, "arguments"),
        },
    }


def _logprobs(body: Fields) -> int | None:
    top = body.integer("top_logprobs", high=MOST_LOGPROBS)
    if body.flag("logprobs"):
        return top or 0
    if top:
        raise RequestError("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    return None


def read_format(form: Fields | None) -> tuple[Any, ...]:
    """Return a request's schema from ``response_format``, or from ``text.format`` of a response."""
    if form is None:
        return ()
    kinds = ("text", "json_object", "json_schema")
    kind = required(form, lambda name: form.choice(name, kinds), "type", "give a type")
    if kind == "text":
        return ()
    if kind == "json_object":
        return (None,)
    # Responses have the schema at the top.
    inner = form.object("json_schema") or form
    if "schema" not in inner:
        raise inner.wrong("schema", "give a JSON schema")
    return (inner.mapping("schema"),)


def _template_options(body: Fields) -> dict[str, Any]:
    options = body.mapping("chat_template_kwargs")
    if (effort := body.text("reasoning_effort")) is not None:
        options = {"reasoning_effort": effort, **options}
    for name in RESERVED & options.keys():
        raise RequestError(
            f"'chat_template_kwargs' cannot set '{name}'.", param="chat_template_kwargs"
        )
    return options


def _message_of(delta: Delta) -> dict[str, Any]:
    """Return a whole reply as a message."""
    message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
    if delta.reasoning:
        message["reasoning_content"] = delta.reasoning
    if delta.calls:
        message["content"] = delta.text or None
        message["tool_calls"] = _calls(delta, None)
    return message


def _calls(delta: Delta, first: int | None) -> list[dict[str, Any]]:
    """Return the calls of a part; `first`: Number of the first one, in streams."""
    return [
        {
            **({} if first is None else {"index": first + i}),
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for i, call in enumerate(delta.calls)
    ]


def _head(service: Service, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": service.options.name,
        "system_fingerprint": None,
    }


async def reply(generation: Generation, service: Service) -> dict[str, Any]:
    """Return the body of the whole reply."""
    choices = []
    for i, delta in enumerate(await generation.whole()):
        choice = {"index": i, "message": _message_of(delta), "finish_reason": delta.finish}
        found = logprobs(service, delta) if generation.request.logprobs is not None else None
        choices.append({**choice, "logprobs": found})
    head = _head(service, "chat.completion")
    return {**head, "choices": choices, "usage": usage(generation)}


class Stream(ChunkStream):
    """The chunks of a streamed reply."""

    def __init__(self, generation: Generation, service: Service):
        super().__init__(generation, _head(service, "chat.completion.chunk"))
        self._service, self._calls = service, [0] * generation.request.n

    def start(self) -> str:
        first = {"role": "assistant", "content": ""}
        return "".join(self._delta(i, first) for i in range(self._generation.request.n))

    def add(self, i: int, delta: Delta) -> str:
        content: dict[str, Any] = {}
        if delta.reasoning:
            content["reasoning_content"] = delta.reasoning
        if delta.text:
            content["content"] = delta.text
        if delta.calls:
            content["tool_calls"] = _calls(delta, self._calls[i])
            self._calls[i] += len(delta.calls)
        found = logprobs(self._service, delta) if delta.logprobs else None
        text = self._delta(i, content, found=found) if content or found else ""
        return text + self._delta(i, {}, delta.finish) if delta.finish else text

    def _delta(
        self, i: int, delta: dict[str, Any], finish: str | None = None, found: Any = None
    ) -> str:
        return self._chunk({"index": i, "delta": delta, "logprobs": found, "finish_reason": finish})
