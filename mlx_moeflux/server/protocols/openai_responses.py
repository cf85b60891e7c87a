"""OpenAI's responses, stateless: ``POST /v1/responses``. Every request has the whole history."""

from __future__ import annotations

import time
import uuid
from typing import Any

from mlx_moeflux.server.assemble import LENGTH, Delta
from mlx_moeflux.server.errors import RequestError
from mlx_moeflux.server.fields import Fields, required
from mlx_moeflux.server.protocols.openai import (
    INERT,
    event,
    logprobs,
    merged_system,
    parsed_arguments,
    text_of,
)
from mlx_moeflux.server.protocols.openai_chat import ROLES, read_format, read_tool_choice
from mlx_moeflux.server.request import (
    MOST_LOGPROBS,
    GenerationRequest,
    check_tools,
    function_tool,
    read_sampling,
)
from mlx_moeflux.server.service import Generation, Service
from mlx_moeflux.server.tools import ToolCall

TEXTS = ("input_text", "output_text", "text")
WITH_LOGPROBS = "message.output_text.logprobs"


def read(body: Fields, service: Service) -> GenerationRequest:
    """Return the request of a body; refuse what would not act."""
    service.check_model(body.text("model"))
    tools, namespaces = _tools(body)
    choice = read_tool_choice(body)
    check_tools(tools, choice)
    options: dict[str, Any] = {}
    if (reasoning := body.object("reasoning")) is not None:
        if effort := reasoning.text("effort"):
            options["reasoning_effort"] = effort
        reasoning.ignore("summary", "generate_summary", "context")
        reasoning.finish()
    schema: tuple[Any, ...] = ()
    if (text := body.object("text")) is not None:
        schema = read_format(text.object("format"))
        text.ignore("verbosity")
        text.finish()
    stream = body.flag("stream")
    if (streaming := body.object("stream_options")) is not None:
        streaming.ignore("include_obfuscation")
        streaming.finish()
    top = body.integer("top_logprobs", 0, high=MOST_LOGPROBS)
    request = GenerationRequest(
        sampling=read_sampling(body, service.options.defaults, service.vocabulary),
        messages=merged_system(_messages(body, service)),
        max_tokens=body.integer("max_output_tokens", low=1),
        logprobs=top if WITH_LOGPROBS in body.items("include") or top else None,
        schema=schema,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.flag("parallel_tool_calls", True),
        template_options=options,
        namespaces=namespaces,
        stream=stream,
    )
    body.choice("truncation", ("disabled",))
    body.ignore(*INERT)
    body.finish()
    return request


def _qualified(group: str | None, name: str) -> str:
    """Return the model's name of a function: two groups may have one of the same name."""
    return f"{group}__{name}" if group else name


def _tools(body: Fields) -> tuple[list[dict[str, Any]], dict[str, tuple[str, str]]]:
    """Return the functions, and the group and the name in it of each that is in one.

    Other kinds of tools, which the provider would run, are not offered to the model.
    """
    tools, namespaces = [], {}
    for tool in body.objects("tools"):
        kind = required(tool, tool.text, "type", "give a type")
        if kind == "function":
            tools.append(function_tool(tool))
        elif kind == "namespace":
            group = required(tool, tool.text, "name", "name the group")
            for inner in tool.objects("tools"):
                if inner.text("type") == "function":
                    tools.append(function_tool(inner))
                    function = tools[-1]["function"]
                    name = function["name"]
                    function["name"] = _qualified(group, name)
                    namespaces[function["name"]] = group, name
    return tools, namespaces


def _messages(body: Fields, service: Service) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if instructions := body.text("instructions"):
        messages.append({"role": "system", "content": instructions})
    given = body.any("input")
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    items = body.objects("input")
    if not items:
        raise body.wrong("input", "give a text or items")
    for item in items:
        _add_item(messages, item, service)
    return messages


def _add_item(messages: list[dict[str, Any]], item: Fields, service: Service) -> None:
    """Append an item of the history; what one turn of the assistant says is one message."""
    kinds = ("message", "function_call", "function_call_output", "reasoning")
    kind = item.choice("type", kinds, "message")
    if kind == "message":
        role = ROLES[required(item, lambda name: item.choice(name, ROLES), "role", "give a role")]
        text = text_of(item, "content", TEXTS)
        if text is None:
            raise item.wrong("content", "give a text")
        if role == "assistant":
            message = _assistant(messages, with_text=True)
            message["content"] += text
        else:
            messages.append({"role": role, "content": text})
    elif kind == "function_call":
        text = required(item, item.text, "arguments", "give the JSON text of an object")
        name = required(item, item.text, "name", "name the function")
        function = {
            "name": _qualified(item.text("namespace"), name),
            "arguments": parsed_arguments(service, text, item, "arguments"),
        }
        call = required(item, item.text, "call_id", "give the id")
        calls = _assistant(messages).setdefault("tool_calls", [])
        calls.append({"id": call, "type": "function", "function": function})
    elif kind == "function_call_output":
        call = required(item, item.text, "call_id", "give the id")
        text = text_of(item, "output", TEXTS) or ""
        messages.append({"role": "tool", "content": text, "tool_call_id": call})
    else:
        parts = item.objects("content")
        if reasoning := "".join(part.text("text", "") for part in parts):
            _assistant(messages)["reasoning_content"] = reasoning


def _assistant(messages: list[dict[str, Any]], *, with_text: bool = False) -> dict[str, Any]:
    """Return the assistant's message at the end, a new one if there is none to go on with."""
    last = messages[-1] if messages else {"role": ""}
    if last["role"] != "assistant" or (with_text and "tool_calls" in last):
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    return last


class Stream:
    """One response while it comes: its items, and the events about them."""

    def __init__(self, generation: Generation, service: Service):
        self._generation, self._service = generation, service
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._items: list[dict[str, Any]] = []
        self._open = False
        self._number = -1
        self._finish: str | None = None

    def body(self, status: str, error: RequestError | None = None) -> dict[str, Any]:
        request, generation = self._generation.request, self._generation
        done = status != "in_progress"
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": error and {"code": error.code or "server_error", "message": str(error)},
            "incomplete_details": cut,
            "instructions": None,
            "max_output_tokens": request.max_tokens,
            "model": self._service.options.name,
            "output": self._items if done else [],
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": request.sampling.temperature,
            "tool_choice": request.tool_choice,
            "tools": [],
            "top_p": request.sampling.top_p,
            "truncation": "disabled",
            "metadata": {},
            "usage": {
                "input_tokens": generation.prompt_tokens,
                "input_tokens_details": {"cached_tokens": generation.cached_tokens},
                "output_tokens": generation.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": generation.reasoning_tokens},
                "total_tokens": generation.prompt_tokens + generation.completion_tokens,
            }
            if done
            else None,
        }

    def start(self) -> str:
        body = self.body("in_progress")
        kinds = ("created", "in_progress")
        return "".join(self._event(f"response.{kind}", response=body) for kind in kinds)

    def add(self, i: int, delta: Delta) -> str:
        found = ""
        if delta.reasoning:
            found += self._text("reasoning", delta.reasoning, None)
        if delta.text:
            found += self._text("message", delta.text, delta)
        for call in delta.calls:
            found += self._close() + self._call(call)
        self._finish = delta.finish or self._finish
        return found

    def end(self) -> str:
        status = "incomplete" if self._finish == LENGTH else "completed"
        found = self._close(status)
        return found + self._event(f"response.{status}", response=self.body(status))

    def fail(self, found: RequestError) -> str:
        return self._event("response.failed", response=self.body("failed", found))

    def _event(self, kind: str, **fields: Any) -> str:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **fields}, kind)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _add(self, item: dict[str, Any]) -> str:
        self._items.append(item)
        index = len(self._items) - 1
        # The item goes on to grow.
        shown = {name: [] if name == "content" else value for name, value in item.items()}
        return self._event("response.output_item.added", output_index=index, item=shown)

    def _text(self, kind: str, text: str, delta: Delta | None) -> str:
        """Append to the open item of this kind, or to a new one."""
        found = ""
        name = "output_text" if kind == "message" else "reasoning_text"
        if not self._open or self._items[-1]["type"] != kind:
            found += self._close()
            part: dict[str, Any] = {"type": name, "text": ""}
            item: dict[str, Any] = {"id": f"{kind[:3]}_{uuid.uuid4().hex}", "type": kind}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
                item |= {"status": "in_progress", "role": "assistant"}
            else:
                item |= {"summary": []}
            found += self._add({**item, "content": [part]})
            self._open = True
            added = {**self._place(), "content_index": 0, "part": part}
            found += self._event("response.content_part.added", **added)
        part = self._items[-1]["content"][0]
        part["text"] += text
        fields: dict[str, Any] = {**self._place(), "content_index": 0, "delta": text}
        if kind == "message":
            assert delta is not None
            new = logprobs(self._service, delta)["content"]
            part["logprobs"] += new
            fields["logprobs"] = new
        return found + self._event(f"response.{name}.delta", **fields)

    def _close(self, status: str = "completed") -> str:
        if not self._open:
            return ""
        self._open, item = False, self._items[-1]
        part = item["content"][0]
        place = {**self._place(), "content_index": 0}
        done = {"text": part["text"]}
        if item["type"] == "message":
            item["status"], done["logprobs"] = status, part["logprobs"]
        return (
            self._event(f"response.{part['type']}.done", **place, **done)
            + self._event("response.content_part.done", **place, part=part)
            + self._item_done()
        )

    def _item_done(self) -> str:
        index, item = len(self._items) - 1, self._items[-1]
        return self._event("response.output_item.done", output_index=index, item=item)

    def _call(self, call: ToolCall) -> str:
        group, name = self._generation.request.namespaces.get(call.name, (None, call.name))
        item = {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": call.id,
            "name": name,
            "arguments": "",
        }
        if group is not None:
            item["namespace"] = group
        added = self._add(item)
        item |= {"status": "completed", "arguments": call.arguments}
        arguments = "response.function_call_arguments"
        whole = {"name": name, "arguments": call.arguments}
        return (
            added
            + self._event(f"{arguments}.delta", **self._place(), delta=call.arguments)
            + self._event(f"{arguments}.done", **self._place(), **whole)
            + self._item_done()
        )


async def reply(generation: Generation, service: Service) -> dict[str, Any]:
    """Return the body of the whole reply."""
    response = Stream(generation, service)
    (delta,) = await generation.whole()
    response.add(0, delta)
    response.end()
    return response.body("incomplete" if delta.finish == LENGTH else "completed")
