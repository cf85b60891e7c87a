"""The one request that every protocol is turned into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_moeflux.generation.sampling_fields import REQUEST_FIELDS
from mlx_moeflux.generation.scheduler import UNLIMITED
from mlx_moeflux.server.errors import RequestError
from mlx_moeflux.server.thinking import Thinking

MOST_CHOICES = 16
MOST_STOPS = 16
MOST_LOGPROBS = 20
MOST_TOOLS = 512
AUTO, NONE, REQUIRED = "auto", "none", "required"


@dataclass(frozen=True)
class Defaults:
    """Values of a request that names none; from the command line.

    max_tokens: UNLIMITED for what context and memory leave.
    options: Of the fields of sampling that the server has a flag for.
    """

    max_tokens: int = UNLIMITED
    options: Mapping[str, float] = field(
        default_factory=lambda: {key: one.off for key, one in REQUEST_FIELDS.items() if one.serve}
    )

    def sampling(
        self,
        given: Mapping[str, float],
        *,
        seed: int | None = None,
        logit_bias: tuple[tuple[int, float], ...] = (),
    ) -> Sampling:
        """Return the sampling of a request that gives these options."""
        off = {key: one.off for key, one in REQUEST_FIELDS.items()}
        return Sampling({**off, **self.options, **given}, seed, logit_bias)


@dataclass(frozen=True)
class Sampling:
    """Options of sampling. options: Value of each field of :data:`REQUEST_FIELDS`."""

    options: Mapping[str, float]
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __getitem__(self, name: str) -> float:
        return self.options[name]


@dataclass
class GenerationRequest:
    """A prompt (messages, text or ids) and the options of its replies.

    Messages and tools are in OpenAI's form, as chat templates take them.
    max_tokens: None for the server's default, UNLIMITED for what context and memory leave.
    logprobs: Number of alternatives to report for each token; None reports nothing.
    schema: JSON schema of the answer, in a tuple; () is any text, (None,) any object.
    tool_choice: "auto", "none", "required" or the name of a function.
    checkpoints: Numbers of first messages after which the state is kept for later requests.
    namespaces: Function -> the group and the name in it that a protocol calls it by.
    continued: The reply goes on with the last message, which is the assistant's.
    answer: The reply is the answer to messages, with reasoning and calls apart; False continues a
        text.
    """

    sampling: Sampling
    messages: list[dict[str, Any]] = field(default_factory=list)
    prompt: str | list[int] | None = None
    max_tokens: int | None = None
    n: int = 1
    stop: Sequence[str] = ()
    logprobs: int | None = None
    schema: tuple[Mapping[str, Any] | None, ...] = ()
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str = AUTO
    parallel_tool_calls: bool = True
    template_options: Mapping[str, Any] = field(default_factory=dict)
    thinking: Thinking | None = None
    checkpoints: Sequence[int] = ()
    continued: bool = False
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    stream: bool = False
    usage: bool = False
    """The stream ends with counts of tokens."""

    @property
    def answer(self) -> bool:
        return self.prompt is None


def fault_of_continuation(request: GenerationRequest) -> str | None:
    """Return why the last message cannot be continued, None if it can."""
    message = request.messages[-1]
    if message["role"] != "assistant":
        return f"it is of the {message['role']}, and only the assistant's can be"
    if "tool_calls" in message:
        return "it has a tool call"
    if "reasoning_content" in message:
        return "it has reasoning"
    if request.schema or request.tool_choice not in (AUTO, NONE):
        return "a schema or a forced call says how the reply begins"
    return None


def continue_last(request: GenerationRequest) -> None:
    """Let the reply go on with the last message.

    Raises:
        RequestError: The last message is no text of the assistant.
    """
    fault = fault_of_continuation(request)
    if fault is not None:
        raise RequestError(f"the last message cannot be continued: {fault}.", param="messages")
    request.continued = True


def check_provided(tools: Sequence[Any], functions: Sequence[Any]) -> None:
    """Refuse tools of a provider without a function beside them: the request is about them. Beside
    functions they are left out."""
    if tools and not functions:
        raise RequestError(
            f"'tools.0' is of the type '{tools[0].type[:80]}', which is not offered; leave it out.",
            param="tools.0",
            code="unsupported_parameter",
        )


def check_tools(tools: list[dict[str, Any]], choice: str, place: str = "tools") -> None:
    """Refuse two functions of one name, too many, and a choice of none of them."""
    names = [tool["function"]["name"] for tool in tools]
    if len(names) > MOST_TOOLS:
        raise RequestError(f"'{place}' has {len(names)} functions; give at most {MOST_TOOLS}.")
    if len(set(names)) < len(names):
        raise RequestError(f"'{place}' has two functions of one name.", param=place)
    if choice == REQUIRED and not names:
        raise RequestError("'tool_choice' requires a call, but there are no tools.",
                           param="tool_choice")  # fmt: skip
    if choice not in (AUTO, NONE, REQUIRED) and choice not in names:
        raise RequestError(
            f"'tool_choice' names '{choice[:80]}', which is not in '{place}'.", param="tool_choice"
        )
