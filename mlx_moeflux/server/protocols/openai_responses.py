"""OpenAI's responses, stateless: ``POST /v1/responses``. Every request has the whole history."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mlx_moeflux.server.assemble import LENGTH, Delta
from mlx_moeflux.server.calls.reader import CallPart
from mlx_moeflux.server.errors import RequestError
from mlx_moeflux.server.fields import CountOrOff, Fields, Items, OneOf, OpenFields, TokenLimit
from mlx_moeflux.server.protocols.content import (
    Arguments,
    Content,
    Echoed,
    Label,
    OtherPart,
    check_newest,
    contents,
    newest,
)
from mlx_moeflux.server.protocols.openai import (
    Format,
    Function,
    OpenAIBody,
    OtherTool,
    ToolChoice,
    event,
    logprobs,
    merged_system,
    shown_arguments,
)
from mlx_moeflux.server.request import (
    AUTO,
    MOST_LOGPROBS,
    UNLIMITED,
    GenerationRequest,
    check_tools,
)
from mlx_moeflux.server.service import Generation, Service
from mlx_moeflux.server.thinking import always_sent

WITH_LOGPROBS = "message.output_text.logprobs"

COMPACT = "compaction_trigger"
SKIPPED = {
    "item_reference", "compaction", "context_compaction", COMPACT, "configuration_update",
    "mcp_list_tools",
}  # fmt: skip
"""Types of items without a text for the model: what they stand for is kept elsewhere."""

INPUTS = ("arguments", "input", "action", "actions", "operation", "code")
OUTPUTS = ("output", "result", "status")
"""Fields of calls and results of tools that are no functions; the first that is there counts."""


class Message(OpenFields):
    type: Literal["message", None] = None
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Content, contents()] | None = None


class FunctionCall(OpenFields):
    type: Literal["function_call"]
    namespace: Echoed = ""
    name: Echoed = ""
    arguments: Arguments = Field({})
    call_id: Label = ""


class FunctionCallOutput(OpenFields):
    type: Literal["function_call_output"]
    call_id: Label = ""
    output: Annotated[Content, contents()] = Content()


class ReasoningItem(OpenFields):
    type: Literal["reasoning"]
    content: Annotated[Content, contents()] = Content()
    summary: Annotated[Content, contents("\n")] = Content()


class OtherItem(OtherPart):
    """An item that is neither a message nor a call: the model reads what stands for it."""


class FunctionTool(Function):
    type: Literal["function"]


class OtherGroupedTool(OpenFields):
    type: str | None = None


GroupedTool = Annotated[FunctionTool | OtherGroupedTool, OneOf("type", other=OtherGroupedTool)]


class Namespace(OpenFields):
    type: Literal["namespace"]
    name: str
    tools: Items[GroupedTool] = Field([])


Tool = Annotated[FunctionTool | Namespace | OtherTool, OneOf("type", other=OtherTool)]


class ToolsItem(OpenFields):
    """Further tools; those that the client found have the id of the call that searched."""

    type: Literal["additional_tools", "tool_search_output"]
    call_id: Label = ""
    tools: Items[Tool] = Field([])


Item = Annotated[
    FunctionCall | FunctionCallOutput | ReasoningItem | ToolsItem | Message | OtherItem,
    OneOf("type", other=OtherItem),
]


class Reasoning(Fields):
    inert = ("summary", "generate_summary", "context")
    enabled: bool | None = None
    effort: str | None = None


class TextOptions(Fields):
    inert = ("verbosity",)
    format: Format = ()


class StreamOptions(Fields):
    inert = ("include_obfuscation",)


def _input(value: Any) -> Any:
    if isinstance(value, str) or value == []:
        # Codex asks nothing, for one token, to see whether the model answers.
        return [{"role": "user", "content": value or ""}]
    return [_as_function(item) for item in value] if isinstance(value, list) else value


def _as_function(item: Any) -> Any:
    """Return the call or the result of another tool, such as a shell, as that of a function."""
    if not isinstance(item, dict) or "role" in item:
        return item
    kind = item.get("type")
    if kind is None and "id" in item:
        return {**item, "type": "item_reference"}
    if not isinstance(kind, str) or kind.startswith("function_call") or "tools" in item:
        return item
    if kind.endswith("_output"):
        # A result of `local_shell` has the id of its call in `id`.
        found = {"call_id": item.get("call_id", item.get("id"))}
        output = next((item[name] for name in OUTPUTS if item.get(name) not in (None, "")), None)
        return {"type": "function_call_output", "output": output, **found}
    if item.get("call_id") is None:
        return item
    field = next((name for name in INPUTS if item.get(name) is not None), "input")
    given = item.get(field)
    return {
        "type": "function_call",
        "call_id": item["call_id"],
        "namespace": item.get("namespace"),
        "name": item.get("name") or kind.removesuffix("_call"),
        "arguments": given if isinstance(given, dict) or field == "arguments" else {field: given},
    }


class Body(OpenAIBody):
    """The body of a request."""

    instructions: str | None = None
    input: Annotated[Items[Item], Field(min_length=1), BeforeValidator(_input)]
    max_output_tokens: TokenLimit | None = None
    tools: Items[Tool] = Field([])
    tool_choice: ToolChoice = AUTO
    parallel_tool_calls: bool = True
    reasoning: Reasoning = Reasoning()
    text: TextOptions = TextOptions()
    stream_options: StreamOptions | None = None
    include: list[Any] = Field([])
    top_logprobs: Annotated[CountOrOff, Field(le=MOST_LOGPROBS)] = 0


def read(body: Body, service: Service) -> GenerationRequest:
    """Return the request of a body; refuse what would not act."""
    service.check_model(body.model)
    check_messages(body)
    tools, namespaces = _tools(body)
    check_tools(tools, body.tool_choice)
    reasoning, top = body.reasoning, body.top_logprobs
    return GenerationRequest(
        sampling=body.sampling(service),
        messages=merged_system(_messages(body, service)),
        max_tokens=body.max_output_tokens,
        logprobs=top if WITH_LOGPROBS in body.include or top else None,
        schema=body.text.format,
        tools=tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        # Codex sends an effort with every request, so it acts where it can.
        thinking=always_sent(reasoning.enabled, reasoning.effort),
        namespaces=namespaces,
        stream=body.stream,
    )


def _qualified(group: str | None, name: str) -> str:
    """Return the model's name of a function: two groups may have one of the same name."""
    return f"{group}__{name}" if group else name


def _functions(tools: Iterable[Any]) -> Iterator[tuple[str | None, FunctionTool]]:
    """Yield the functions, each with the name of its group or None."""
    for tool in tools:
        if isinstance(tool, FunctionTool):
            yield None, tool
        elif isinstance(tool, Namespace):
            for inner in tool.tools:
                if isinstance(inner, FunctionTool):
                    yield tool.name, inner


def _tools(body: Body) -> tuple[list[dict[str, Any]], dict[str, tuple[str, str]]]:
    """Return the functions, and the group and the name in it of each that is in one."""
    functions = list(_functions(body.tools))
    known = {_qualified(group, tool.name) for group, tool in functions}
    for item in body.input:
        if isinstance(item, ToolsItem):
            # History may repeat a tool.
            for group, tool in _functions(item.tools):
                if (name := _qualified(group, tool.name)) not in known:
                    known.add(name)
                    functions.append((group, tool))
    tools, namespaces = [], {}
    for group, tool in functions:
        name = _qualified(group, tool.name)
        tools.append(tool.tool(name))
        if group:
            namespaces[name] = group, tool.name
    return tools, namespaces


def check_messages(body: Body) -> None:
    """Refuse a newest message that the model cannot read, and a wish to compact the history."""
    i = newest(item.role if isinstance(item, Message) else "" for item in body.input)
    if i is not None:
        message = body.input[i]
        assert isinstance(message, Message)
        check_newest(message.content, f"input.{i}.content")
    last = body.input[-1]
    if isinstance(last, OtherItem) and last.type == COMPACT:
        place = f"input.{len(body.input) - 1}"
        text = f"'{place}' asks for a compaction, which is not offered; leave it out."
        raise RequestError(text, param=place, code="unsupported_content")


def _messages(body: Body, service: Service) -> list[dict[str, Any]]:
    """Return the history as messages; what one turn of the assistant says is one."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    for item in body.input:
        if isinstance(item, FunctionCall):
            name = _qualified(item.namespace, item.name)
            function = {"name": name, "arguments": shown_arguments(service, item.arguments)}
            calls = _assistant(messages).setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "type": "function", "function": function})
        elif isinstance(item, FunctionCallOutput):
            result = {"role": "tool", "content": item.output.text, "tool_call_id": item.call_id}
            messages.append(result)
        elif isinstance(item, ReasoningItem):
            if reasoning := item.content.text or item.summary.text:
                _assistant(messages)["reasoning_content"] = reasoning
        elif isinstance(item, ToolsItem):
            if item.call_id:
                names = ", ".join(tool.name for _, tool in _functions(item.tools))
                messages.append({"role": "tool", "content": names, "tool_call_id": item.call_id})
        elif isinstance(item, OtherItem):
            if item.type not in SKIPPED:
                _say(messages, f"\n{item.text}\n")
        elif item.role == "assistant":
            _say(messages, item.content.text if item.content else "")
        else:
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": item.content.text if item.content else ""})
    return messages


def _say(messages: list[dict[str, Any]], text: str) -> None:
    """Append a text to what the assistant says at the end."""
    last = _assistant(messages, with_text=True)
    before = last["content"]
    last["content"] += text if before and not before.endswith("\n") else text.removeprefix("\n")


def _assistant(messages: list[dict[str, Any]], *, with_text: bool = False) -> dict[str, Any]:
    """Return the assistant's message at the end, a new one if there is none to go on with."""
    last = messages[-1] if messages else {"role": ""}
    if last["role"] != "assistant" or (with_text and "tool_calls" in last):
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    return last


def _response(
    request: GenerationRequest, service: Service, status: str, error: RequestError | None
) -> dict[str, Any]:
    """Return a response without items."""
    cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": error and {"code": error.code or "server_error", "message": str(error)},
        "incomplete_details": cut,
        "instructions": None,
        "max_output_tokens": None if request.max_tokens == UNLIMITED else request.max_tokens,
        "model": service.options.name,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": None,
        "store": False,
        "temperature": request.sampling["temperature"],
        "tool_choice": request.tool_choice,
        "tools": [],
        "top_p": request.sampling["top_p"],
        "truncation": "disabled",
        "metadata": {},
        "usage": None,
    }


def _usage(generation: Generation) -> dict[str, Any]:
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": generation.cached_tokens},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": generation.reasoning_tokens},
        "total_tokens": prompt + completion,
    }


def refused_stream(found: RequestError, request: GenerationRequest, service: Service) -> str:
    """Return the events of a stream that is refused because its prompt is too long.

    Codex shortens a conversation by this event, and gives it up on a status of 400.
    """
    failed = _response(request, service, "failed", found)
    started = {**failed, "status": "in_progress", "error": None}
    events = (("response.created", started), ("response.failed", failed))
    return "".join(
        event({"type": kind, "sequence_number": i, "response": response}, kind)
        for i, (kind, response) in enumerate(events)
    )


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
        generation, done = self._generation, status != "in_progress"
        found = _response(generation.request, self._service, status, error)
        own = {"id": self._id, "created_at": self._created}
        if done:
            own |= {"output": self._items, "usage": _usage(generation)}
        return found | own

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
        for part in delta.calls:
            found += self._call(part)
        self._finish = delta.finish or self._finish
        return found

    def wait(self) -> str:
        found = self._generation.prompt_progress()
        progress = {} if found is None else {"prompt_progress": found}
        body = self.body("in_progress")
        return self._event("response.in_progress", response=body, **progress)

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
        if item["type"] == "function_call":
            # No event says that it is done: clients would call the function.
            item["status"] = "incomplete"
            return ""
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

    def _call(self, part: CallPart) -> str:
        """Return the events of a part of a call; a call that does not become whole has no last."""
        found = self._begin_call(part) if part.name else ""
        item, kind = self._items[-1], "response.function_call_arguments"
        item["arguments"] += part.arguments
        found += self._event(f"{kind}.delta", **self._place(), delta=part.arguments)
        if not part.whole:
            return found
        self._open, item["status"] = False, "completed"
        whole = {"name": item["name"], "arguments": item["arguments"]}
        return found + self._event(f"{kind}.done", **self._place(), **whole) + self._item_done()

    def _begin_call(self, part: CallPart) -> str:
        before = self._close()
        group, name = self._generation.request.namespaces.get(part.name, (None, part.name))
        item = {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": part.id,
            "name": name,
            "arguments": "",
        }
        if group is not None:
            item["namespace"] = group
        self._open = True
        return before + self._add(item)


def reply(deltas: list[Delta], generation: Generation, service: Service) -> dict[str, Any]:
    """Return the body of the whole reply."""
    (delta,), response = deltas, Stream(generation, service)
    response.add(0, delta)
    response.end()
    return response.body("incomplete" if delta.finish == LENGTH else "completed")
