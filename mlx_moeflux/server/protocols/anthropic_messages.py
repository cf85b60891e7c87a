"""Anthropic's messages: ``POST /v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mlx_moeflux.generation.sampling_fields import REQUEST_FIELDS
from mlx_moeflux.server.assemble import CALLS, LENGTH, Delta
from mlx_moeflux.server.errors import RequestError
from mlx_moeflux.server.fields import (
    CountOrOff,
    Fields,
    Items,
    OneOf,
    OpenFields,
    Share,
    Texts,
    TokenLimit,
)
from mlx_moeflux.server.protocols.content import (
    Arguments,
    Content,
    Echoed,
    Label,
    OrWrong,
    OtherPart,
    TextPart,
    WrongPart,
    as_text,
    check_newest,
    contents,
    first_fault,
    joined,
    newest,
    unreadable,
)
from mlx_moeflux.server.protocols.openai import (
    AnswerSchema,
    Function,
    OtherTool,
    Parameters,
    event,
    shown_arguments,
)
from mlx_moeflux.server.request import (
    AUTO,
    MOST_STOPS,
    NONE,
    REQUIRED,
    GenerationRequest,
    check_provided,
    check_tools,
    continue_last,
    fault_of_continuation,
)
from mlx_moeflux.server.service import Generation, Service
from mlx_moeflux.server.thinking import always_sent

# Claude Code writes a line of this name, which changes from turn to turn, into the system prompt:
# with it no prompt would continue the one before.
CHANGING_LINE = "x-anthropic-billing-header:"
MOST_CHECKPOINTS = 4
CHOICES = {"auto": AUTO, "any": REQUIRED, "none": NONE}
KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 408: "timeout_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def error(found: RequestError) -> dict[str, Any]:
    """Return Anthropic's error object."""
    kind = "api_error" if found.status >= 500 else "invalid_request_error"
    inner = {"type": KINDS.get(found.status, kind), "message": str(found)}
    return {"type": "error", "error": inner, "request_id": None}


class Block(OpenFields):
    """A block of a content. cache_control: Marks a place to continue from."""

    cache_control: Any = None


class SystemBlock(Block):
    text: str


class TextBlock(Block, TextPart):
    type: Literal["text"]


class OtherBlock(Block, OtherPart):
    """A block that is no text and no call: the model reads what stands for it."""


class ToolResult(Block):
    type: Literal["tool_result"]
    tool_use_id: Label = ""
    content: Annotated[Content, contents("\n")] = Content()


class Thinking(Block):
    type: Literal["thinking", "redacted_thinking"]
    thinking: Annotated[Content, contents()] = Content()


class ToolUse(Block):
    type: Literal["tool_use"]
    id: Label = ""
    name: Echoed = ""
    input: Arguments = Field({})


def _blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _contents(value: Any) -> Any:
    return value if isinstance(value, list) else _blocks(as_text(value))


UserBlock = Annotated[TextBlock | ToolResult | OtherBlock, OneOf("type", other=OtherBlock), OrWrong]
AssistantBlock = Annotated[
    TextBlock | Thinking | ToolUse | OtherBlock, OneOf("type", other=OtherBlock), OrWrong
]


class UserMessage(OpenFields):
    role: Literal["user", "system"]
    content: Annotated[list[UserBlock | WrongPart], BeforeValidator(_contents)] = Field([])

    @property
    def results(self) -> list[ToolResult]:
        return [block for block in self.content if isinstance(block, ToolResult)]

    @property
    def parts(self) -> list[TextBlock | OtherBlock | WrongPart]:
        """The blocks besides results of tools."""
        return [block for block in self.content if not isinstance(block, ToolResult)]


class AssistantMessage(OpenFields):
    role: Literal["assistant"]
    content: Annotated[list[AssistantBlock | WrongPart], BeforeValidator(_contents)] = Field([])


Message = Annotated[UserMessage | AssistantMessage, OneOf("role")]


BETA = ("block_binding", "task_budget", "speed", "allowed_callers", "diagnostics")
"""Fields of beta versions that only hint, wherever they stand."""


class FunctionTool(Function, extra="forbid"):
    inert = ("cache_control", "strict", "eager_input_streaming", "defer_loading", "input_examples",
             *BETA)  # fmt: skip
    type: Literal["custom", None] = None
    parameters: Parameters = Field(alias="input_schema")


Tool = Annotated[FunctionTool | OtherTool, OneOf("type", other=OtherTool)]


class AnyToolChoice(Fields):
    inert = BETA
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool = False


class OneToolChoice(Fields):
    inert = BETA
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool = False


ToolChoice = Annotated[AnyToolChoice | OneToolChoice, OneOf("type")]


class ThinkingOptions(Fields):
    """A budget of tokens is the model's own business."""

    inert = ("budget_tokens", "display", *BETA)
    type: Literal["enabled", "disabled", "adaptive"] = "enabled"


class OutputFormat(OpenFields):
    type: Literal["json_schema"] = "json_schema"
    value: AnswerSchema = Field(alias="schema")


class OutputConfig(Fields):
    inert = BETA
    format: OutputFormat | None = None
    effort: str | None = None


class Body(Fields):
    """The body of a request."""

    inert = ("metadata", "service_tier", "container", "context_management", "betas",
             "inference_geo", "cache_control", *BETA)  # fmt: skip
    model: str | None = None
    system: Annotated[Items[SystemBlock], BeforeValidator(_blocks)] = Field([])
    messages: Annotated[Items[Message], Field(min_length=1)]
    max_tokens: TokenLimit | None = None
    stream: bool = False
    temperature: Share | None = None
    top_p: Share | None = None
    top_k: CountOrOff | None = None
    stop_sequences: Annotated[Texts, Field(max_length=MOST_STOPS)] = Field([])
    tools: Items[Tool] = Field([])
    tool_choice: ToolChoice = AnyToolChoice(type="auto")
    thinking: ThinkingOptions | None = None
    output_format: OutputFormat | None = None
    output_config: OutputConfig = OutputConfig()


def counted(body: Body, service: Service) -> GenerationRequest:
    """Return the request of a body whose tokens are counted; its history may end anywhere."""
    service.check_model(body.model)
    check_messages(body)
    tools = [tool.tool() for tool in body.tools if isinstance(tool, FunctionTool)]
    choice = body.tool_choice
    named = choice.name if isinstance(choice, OneToolChoice) else CHOICES[choice.type]
    check_tools(tools, named)
    messages, checkpoints = _messages(body, service)
    sampling = body.model_dump(include={*REQUEST_FIELDS}, exclude_unset=True)
    on = None if body.thinking is None else body.thinking.type != "disabled"
    form = body.output_config.format or body.output_format
    request = GenerationRequest(
        sampling=service.options.defaults.sampling(sampling),
        messages=messages,
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        schema=() if form is None else (form.value,),
        tools=tools,
        tool_choice=named,
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        # Claude Code sends both with every request, so they act where they can.
        thinking=always_sent(on, body.output_config.effort),
        checkpoints=checkpoints[-MOST_CHECKPOINTS:],
        stream=body.stream,
    )
    request.continued = fault_of_continuation(request) is None
    return request


def read(body: Body, service: Service) -> GenerationRequest:
    """Return the request of a body; refuse what would not act."""
    request = counted(body, service)
    check_provided(body.tools, request.tools)
    if request.messages[-1]["role"] == "assistant":
        continue_last(request)
        if (text := request.messages[-1]["content"]) != text.rstrip():
            place = f"messages.{len(body.messages) - 1}"
            fault = f"'{place}' cannot end with white space, as the reply continues it; remove it."
            raise RequestError(fault, param=place)
    return request


def check_messages(body: Body) -> None:
    """Refuse a newest message that the model cannot read.

    What stands beside results of tools is theirs: Claude Code puts the pages of a PDF there.
    """
    kinds = ("tool" if isinstance(m, UserMessage) and m.results else m.role for m in body.messages)
    i = newest(kinds)
    if i is not None:
        message = body.messages[i]
        assert isinstance(message, UserMessage)
        given = "content" in message.model_fields_set
        parts = message.parts
        content = Content("", unreadable(parts), first_fault(parts)) if given else None
        check_newest(content, f"messages.{i}.content")


def _messages(body: Body, service: Service) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the messages in OpenAI's form, and the numbers of those after which a mark stands."""
    messages: list[dict[str, Any]] = []
    checkpoints: list[int] = []
    if system := _system(body.system):
        messages.append({"role": "system", "content": system})
    if _marked(body.system):
        checkpoints.append(len(messages))
    for message in body.messages:
        if isinstance(message, AssistantMessage):
            messages.append(_assistant(message, service))
        else:
            messages += _user(message)
        if _marked(message.content):
            checkpoints.append(len(messages))
    return messages, checkpoints


def _marked(blocks: Sequence[Block | WrongPart]) -> bool:
    return any(block.cache_control is not None for block in blocks)


def _system(blocks: Sequence[SystemBlock]) -> str:
    """Return the system prompt without its changing line."""
    kept = []
    for block in blocks:
        lines = block.text.split("\n")
        stable = [line for line in lines if not line.lstrip().lower().startswith(CHANGING_LINE)]
        if "\n".join(stable).strip() or len(stable) == len(lines):
            kept.append("\n".join(stable))
    return "\n\n".join(text for text in kept if text)


def _user(message: UserMessage) -> list[dict[str, Any]]:
    """Return a message for each tool's result, and one for the texts behind them."""
    messages: list[dict[str, Any]] = [
        {"role": "tool", "content": result.content.text, "tool_call_id": result.tool_use_id}
        for result in message.results
    ]
    if message.parts or not messages:
        messages.append({"role": message.role, "content": joined(message.parts, "\n")})
    return messages


def _assistant(message: AssistantMessage, service: Service) -> dict[str, Any]:
    parts, reasoning, calls = [], [], []
    for block in message.content:
        if isinstance(block, ToolUse):
            function = {"name": block.name, "arguments": shown_arguments(service, block.input)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, Thinking):
            reasoning.append(block.thinking.text)
        else:
            parts.append(block)
    found: dict[str, Any] = {"role": "assistant", "content": joined(parts)}
    if any(reasoning):
        found["reasoning_content"] = "".join(reasoning)
    if calls:
        found["tool_calls"] = calls
    return found


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


def reply(deltas: list[Delta], generation: Generation, service: Service) -> dict[str, Any]:
    """Return the body of the whole reply."""
    (delta,) = deltas
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
        for part in delta.calls:
            if part.name:
                found += self._enter("tool_use", {"id": part.id, "name": part.name, "input": {}})
            found += self._delta("input_json_delta", partial_json=part.arguments)
            if part.whole:
                found += self._close(whole=True)
        return found

    def wait(self) -> str:
        # Claude Code counts these events, and no pings.
        return self._state({"stop_reason": None, "stop_sequence": None})

    def end(self) -> str:
        return self._close() + self._state(_stop(self._last)) + _event({"type": "message_stop"})

    def fail(self, found: RequestError) -> str:
        return event(error(found), "error")

    def _state(self, delta: dict[str, Any]) -> str:
        usage = _usage(self._generation)
        return _event({"type": "message_delta", "delta": delta, "usage": usage})

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

    def _close(self, *, whole: bool = False) -> str:
        """Return the events that end the open block. A call that is not whole is not ended:
        clients would call the function."""
        if self._open is None or (self._open == "tool_use" and not whole):
            self._open = None
            return ""
        last = self._delta("signature_delta", signature="") if self._open == "thinking" else ""
        self._open = None
        return last + _event({"type": "content_block_stop", "index": self._index})


def _event(data: dict[str, Any]) -> str:
    return event(data, data["type"])
