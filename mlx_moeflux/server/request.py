"""The one request that every protocol is turned into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_moeflux.server.errors import RequestError
from mlx_moeflux.server.fields import Fields

MOST_CHOICES = 16
MOST_STOPS = 16
MOST_LOGPROBS = 20
MOST_TOOLS = 512
AUTO, NONE, REQUIRED = "auto", "none", "required"


@dataclass(frozen=True)
class Defaults:
    """Values of a request that names none; from the command line."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True)
class Sampling:
    """Options of sampling. Equal ones share a sampler unless they have a seed.

    Penalties count the tokens of the reply, repetition_penalty those of the prompt too.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None = None
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass
class GenerationRequest:
    """A prompt (messages, text or ids) and the options of its replies.

    Messages and tools are in OpenAI's form, as chat templates take them. max_tokens: None for the
    server's default. logprobs: Number of alternatives to report for each token; None reports
    nothing. schema: JSON schema of the answer, in a tuple; () is any text, (None,) any object.
    tool_choice: "auto", "none", "required" or the name of a function. checkpoints: Numbers of first
    messages after which the state is kept for later requests. namespaces: Function -> the group
    and the name in it that a protocol calls it by. answer: The reply is the answer to messages,
    with reasoning and calls apart; False continues a text.
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
    checkpoints: Sequence[int] = ()
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    stream: bool = False
    usage: bool = False
    """The stream ends with counts of tokens."""

    @property
    def answer(self) -> bool:
        return self.prompt is None


def read_sampling(
    body: Fields, defaults: Defaults, vocabulary: int, *, hottest: float = 2.0
) -> Sampling:
    """Return the sampling of a body in OpenAI's names, with mlx-lm's besides.

    hottest: Largest temperature.
    """
    return Sampling(
        temperature=body.number("temperature", defaults.temperature, low=0, high=hottest),
        top_p=body.number("top_p", defaults.top_p, low=0, high=1),
        top_k=body.integer("top_k", defaults.top_k, low=0),
        min_p=body.number("min_p", defaults.min_p, low=0, high=1),
        seed=body.integer("seed", None, low=-(2**63)),
        xtc_probability=body.number("xtc_probability", 0.0, low=0, high=1),
        xtc_threshold=body.number("xtc_threshold", 0.1, low=0, high=0.5),
        presence_penalty=body.number("presence_penalty", 0.0, low=-2, high=2),
        frequency_penalty=body.number("frequency_penalty", 0.0, low=-2, high=2),
        # Smaller ones would divide logits to infinity.
        repetition_penalty=body.number("repetition_penalty", 1.0, low=0.01, high=10),
        logit_bias=_logit_bias(body, vocabulary),
    )


def _logit_bias(body: Fields, vocabulary: int) -> tuple[tuple[int, float], ...]:
    given = body.mapping("logit_bias")
    fields, found = Fields(given, "logit_bias"), []
    for key in given:
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocabulary):
            raise RequestError(
                f"'logit_bias' names '{key[:40]}', which is no token id below {vocabulary}.",
                param="logit_bias",
            )
        found.append((int(key), fields.number(key, 0.0, low=-100, high=100)))
    return tuple(sorted(found))


def read_stop(body: Fields, name: str = "stop") -> list[str]:
    """Return the stop texts of a body."""
    stop = body.texts(name)
    if len(stop) > MOST_STOPS:
        raise body.wrong(name, f"give at most {MOST_STOPS}")
    return stop


def function_tool(function: Fields) -> dict[str, Any]:
    """Return a function, with its fields at one level, as a tool in OpenAI's form."""
    name = function.text("name")
    if not name or len(name) > 256 or any(c in name for c in "<>\"'`\n\\") or name != name.strip():
        raise function.wrong("name", "give a name of letters, digits, - and _")
    schema = function.mapping("parameters")
    for key, kind in (("properties", dict), ("required", list)):
        if not isinstance(schema.get(key, kind()), kind):
            raise function.wrong("parameters", f"its '{key}' must be of another type")
    found = {"name": name, "parameters": {"type": "object", "properties": {}, **schema}}
    if description := function.text("description"):
        found["description"] = description
    function.ignore("strict")
    return {"type": "function", "function": found}


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
