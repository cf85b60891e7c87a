"""OpenAI's chat completions: ``POST /v1/chat/completions``."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
)

from mlx_moeflux.server.assemble import Delta
from mlx_moeflux.server.calls.reader import CallPart
from mlx_moeflux.server.fields import CountOrOff, Items, OneOf, OpenFields, TokenLimit
from mlx_moeflux.server.protocols.content import (
    Arguments,
    Content,
    Echoed,
    Label,
    as_text,
    check_newest,
    contents,
    newest,
)
from mlx_moeflux.server.protocols.openai import (
    ChunkBody,
    ChunkStream,
    Format,
    Function,
    OtherTool,
    ToolChoice,
    logprobs,
    merged_system,
    shown_arguments,
    usage,
)
from mlx_moeflux.server.request import (
    AUTO,
    MOST_LOGPROBS,
    GenerationRequest,
    check_provided,
    check_tools,
    continue_last,
    fault_of_continuation,
)
from mlx_moeflux.server.service import Generation, Service
from mlx_moeflux.server.thinking import ASKING, Asked, asked_by_template_options, combined

# Arguments of the rendering itself, which are no variables of a template.
RESERVED = {
    "self", "conversation", "messages", "tools", "documents", "chat_template", "template",
    "tokenize", "return_dict", "add_generation_prompt", "continue_final_message", "bos_token",
    "eos_token", "pad_token",
}  # fmt: skip


class Message(OpenFields):
    role: Literal["system", "developer", "user"]
    content: Annotated[Content, contents()] | None = None


class ToolMessage(OpenFields):
    role: Literal["tool", "function"]
    content: Annotated[Content, contents()] = Content()
    tool_call_id: Label = ""
    name: Echoed = ""


class CalledFunction(OpenFields):
    name: Echoed = ""
    arguments: Arguments = Field({})


class CustomCall(OpenFields):
    name: Echoed = ""
    input: Annotated[str, BeforeValidator(as_text)] = ""


class Call(OpenFields):
    """An earlier call: of a function, or of a custom tool, whose input is a text."""

    id: Label = ""
    function: CalledFunction | None = None
    custom: CustomCall | None = None

    def shown(self, service: Service) -> dict[str, Any]:
        """Return the call as chat templates take it."""
        called: Any = self.function or self.custom
        arguments = called.arguments if self.function else {"input": called.input}
        function = {"name": called.name, "arguments": shown_arguments(service, arguments)}
        return {"id": self.id, "type": "function", "function": function}


def _calls(value: Any) -> list[dict[str, Any]]:
    """Return the calls that a client lists: `{}` is no call, and an object is one. A call may have
    its name and arguments at its top."""
    calls = [value] if isinstance(value, dict) else value if isinstance(value, list) else []
    return [_nested(call) for call in calls if call and isinstance(call, dict)]


def _nested(call: dict[str, Any]) -> dict[str, Any]:
    function, custom = call.get("function"), call.get("custom")
    own = {"id": call.get("id")}
    if isinstance(custom, dict) and not isinstance(function, dict):
        return {**own, "custom": custom}
    return {**own, "function": function if isinstance(function, dict) else call}


class AssistantMessage(OpenFields):
    role: Literal["assistant"]
    content: Annotated[Content, contents()] = Content()
    refusal: Echoed = ""
    reasoning_content: Echoed = ""
    reasoning: Echoed = ""
    thinking: Echoed = ""
    tool_calls: Annotated[list[Call], BeforeValidator(_calls)] = Field([])
    function_call: Annotated[list[Call], BeforeValidator(_calls)] = Field([])
    """A call in the form before `tool_calls`."""


AnyMessage = Annotated[Message | ToolMessage | AssistantMessage, OneOf("role")]


class FunctionTool(OpenFields):
    type: Literal["function"]
    function: Function


def _typed(value: Any) -> Any:
    """Return a tool with its type, which some clients leave out."""
    if isinstance(value, dict) and value.get("type") is None:
        # A provider's tool without one is an object in a field: {"googleSearch": {}}.
        fields = [name for name in value if name != "type"]
        provided = len(fields) == 1 and fields[0] not in ("function", "name")
        return {**value, "type": fields[0] if provided else "function"}
    return value


Tool = Annotated[FunctionTool | OtherTool, OneOf("type", other=OtherTool), BeforeValidator(_typed)]


def _template_options(options: dict[str, Any]) -> dict[str, Any]:
    for name in RESERVED & options.keys():
        raise ValueError(f"it cannot set '{name}'")
    return options


class Body(ChunkBody):
    """The body of a request."""

    messages: Annotated[Items[AnyMessage], Field(min_length=1)]
    max_completion_tokens: TokenLimit | None = None
    modalities: Annotated[Items[Literal["text"]], Field(min_length=1, max_length=1)] = Field([])
    tools: Items[Tool] = Field([])
    tool_choice: ToolChoice = AUTO
    parallel_tool_calls: bool = True
    response_format: Format = ()
    logprobs: bool = False
    top_logprobs: Annotated[CountOrOff, Field(le=MOST_LOGPROBS)] = 0
    enable_thinking: Asked | None = None
    think: Asked | None = None
    thinking: Asked | None = None
    reasoning: Asked | None = None
    reasoning_effort: Asked | None = None
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_template_options)] = Field({})

    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @field_validator("add_generation_prompt")
    @classmethod
    def _or_continue(cls, value: bool, info: ValidationInfo) -> bool:
        if value == info.data.get("continue_final_message"):
            raise ValueError("'continue_final_message' must be the opposite")
        return value

    @property
    def continues(self) -> bool | None:
        """Whether the reply continues the last message; None if the body does not say so."""
        if self.add_generation_prompt is None:
            return self.continue_final_message
        return not self.add_generation_prompt

    @field_validator("top_logprobs")
    @classmethod
    def _of_logprobs(cls, value: int, info: ValidationInfo) -> int:
        if value and not info.data.get("logprobs"):
            raise ValueError("it needs 'logprobs': true")
        return value


def read(body: Body, service: Service) -> GenerationRequest:
    """Return the request of a body; refuse what would not act."""
    service.check_model(body.model)
    check_messages(body)
    functions = [tool for tool in body.tools if isinstance(tool, FunctionTool)]
    check_provided(body.tools, functions)
    tools = [tool.function.tool() for tool in functions]
    check_tools(tools, body.tool_choice)
    asked = asked_by_template_options(body.chat_template_kwargs)
    asked += [(name, getattr(body, name)) for name in ASKING]
    request = GenerationRequest(
        sampling=body.sampling(service),
        messages=merged_system([_message(message, service) for message in body.messages]),
        max_tokens=body.max_completion_tokens or body.max_tokens,
        n=body.n,
        stop=body.stop,
        logprobs=body.top_logprobs if body.logprobs else None,
        schema=body.response_format,
        tools=tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        template_options=body.chat_template_kwargs,
        thinking=combined(asked),
        stream=body.stream,
        usage=body.usage,
    )
    if body.continues:
        continue_last(request)
    elif body.continues is None and request.messages[-1]["content"]:
        request.continued = fault_of_continuation(request) is None
    return request


def check_messages(body: Body) -> None:
    """Refuse a newest message that the model cannot read."""
    i = newest(message.role for message in body.messages)
    if i is not None:
        check_newest(body.messages[i].content, f"messages.{i}.content")


def _message(message: Message | ToolMessage | AssistantMessage, service: Service) -> dict[str, Any]:
    """Return a message as chat templates take it."""
    roles = {"developer": "system", "function": "tool"}
    text = "" if message.content is None else message.content.text
    found: dict[str, Any] = {"role": roles.get(message.role, message.role), "content": text}
    if isinstance(message, ToolMessage):
        found["tool_call_id"] = message.tool_call_id
        if message.name:
            found["name"] = message.name
    elif isinstance(message, AssistantMessage):
        found["content"] = text or message.refusal
        if reasoning := message.reasoning_content or message.reasoning or message.thinking:
            found["reasoning_content"] = reasoning
        if calls := message.tool_calls or message.function_call:
            found["tool_calls"] = [call.shown(service) for call in calls]
    return found


def _message_of(delta: Delta) -> dict[str, Any]:
    """Return a whole reply as a message."""
    message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
    if delta.reasoning:
        message["reasoning_content"] = delta.reasoning
    if delta.calls:
        message["content"] = delta.text or None
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in delta.calls
        ]
    return message


def _steps(part: CallPart) -> Iterator[dict[str, Any]]:
    """Yield a part of a call as a stream has it: the name before the first arguments."""
    if part.name:
        function = {"name": part.name, "arguments": ""}
        yield {"index": part.index, "id": part.id, "type": "function", "function": function}
    yield {"index": part.index, "function": {"arguments": part.arguments}}


def _head(service: Service, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": service.options.name,
        "system_fingerprint": None,
    }


def reply(deltas: list[Delta], generation: Generation, service: Service) -> dict[str, Any]:
    """Return the body of the whole reply."""
    choices = []
    for i, delta in enumerate(deltas):
        choice = {"index": i, "message": _message_of(delta), "finish_reason": delta.finish}
        found = logprobs(service, delta) if generation.request.logprobs is not None else None
        choices.append({**choice, "logprobs": found})
    head = _head(service, "chat.completion")
    return {**head, "choices": choices, "usage": usage(generation)}


class Stream(ChunkStream):
    """The chunks of a streamed reply."""

    def __init__(self, generation: Generation, service: Service):
        super().__init__(generation, _head(service, "chat.completion.chunk"))
        self._service = service

    def start(self) -> str:
        first = {"role": "assistant", "content": ""}
        return "".join(self._delta(i, first) for i in range(self._generation.request.n))

    def add(self, i: int, delta: Delta) -> str:
        content: dict[str, Any] = {}
        if delta.reasoning:
            content["reasoning_content"] = delta.reasoning
        if delta.text:
            content["content"] = delta.text
        found = logprobs(self._service, delta) if delta.logprobs else None
        text = self._delta(i, content, found=found) if content or found else ""
        for step in (step for part in delta.calls for step in _steps(part)):
            text += self._delta(i, {"tool_calls": [step]})
        return text + self._delta(i, {}, delta.finish) if delta.finish else text

    def wait(self) -> str:
        return self._still(_choice(0, {}))

    def _delta(
        self, i: int, delta: dict[str, Any], finish: str | None = None, found: Any = None
    ) -> str:
        return self._chunk(_choice(i, delta, finish, found))


def _choice(
    i: int, delta: dict[str, Any], finish: str | None = None, found: Any = None
) -> dict[str, Any]:
    return {"index": i, "delta": delta, "logprobs": found, "finish_reason": finish}
