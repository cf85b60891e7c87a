"""Whether and how much to think: from the names that clients use to those that a template reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import PlainValidator

from mlx_moeflux.sandbox.requests import TemplateNames
from mlx_moeflux.server.fields import Fields

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra"]

EFFORTS: tuple[str, ...] = get_args(Effort)
"""From no thinking to the most."""

UNDECIDED = ("auto", "default")
"""Words of clients for the model's own effort."""

OFF = ("none", "minimal")
"""Efforts that turn thinking off where a template reads an on/off switch alone."""

ASKING = ("enable_thinking", "think", "thinking", "reasoning", "reasoning_effort")
"""Fields and template variables by which clients ask; each takes all forms, see :data:`Asked`."""

SWITCHES = ("enable_thinking", "thinking")
EFFORT = "reasoning_effort"
"""Variables of templates: true or false, and an effort."""

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Fields of an assistant's message in which templates look for its reasoning."""


@dataclass(frozen=True)
class Thinking:
    """What a request asks for. on: None leaves it to the model. effort: One of EFFORTS.

    field: The field that asks; it is refused if the template cannot do it. None: Clients of this
    protocol send it with every request, so it acts where it can.
    """

    on: bool | None = None
    effort: str | None = None
    field: str | None = None


class _Options(Fields):
    """The object of OpenRouter, of Responses or of Anthropic's messages."""

    inert = ("budget_tokens", "display", "summary", "generate_summary")
    type: Literal["enabled", "disabled", "adaptive"] | None = None
    enabled: bool | None = None
    effort: Effort | None = None


def _asked(value: Any) -> Thinking:
    if isinstance(value, bool):
        return Thinking(value)
    if isinstance(value, str):
        if value in UNDECIDED:
            return Thinking()
        if value not in EFFORTS:
            raise ValueError(f"give true, false, or one of {', '.join(EFFORTS)}")
        return Thinking(effort=value)
    options = _Options.model_validate(value)
    on = options.enabled if options.type is None else options.type != "disabled"
    return Thinking(on, options.effort)


Asked = Annotated[Thinking, PlainValidator(_asked)]
"""Whether to think (true, false), an effort, or an object with either."""


def always_sent(on: bool | None, effort: str | None) -> Thinking | None:
    """Return what a request asks for in fields that clients send every time."""
    return Thinking(on, effort) if on is not None or effort else None


def combined(given: Iterable[tuple[str, Thinking | None]]) -> Thinking | None:
    """Return what the fields of a request ask for together; an earlier one counts more."""
    found = [(field, one) for field, one in given if one and (one.on, one.effort) != (None, None)]
    if not found:
        return None
    on = next((one.on for _, one in found if one.on is not None), None)
    effort = next((one.effort for _, one in found if one.effort is not None), None)
    return Thinking(on, effort, found[0][0])


def asked_by_template_options(options: Mapping[str, Any]) -> list[tuple[str, Thinking | None]]:
    """Return what variables for another template than the model's would ask for."""
    return [
        (f"chat_template_kwargs.{name}", _asked(value))
        for name in ASKING
        if isinstance(value := options.get(name), bool) or value in EFFORTS
    ]


def template_variables(asked: Thinking, names: TemplateNames) -> dict[str, Any] | None:
    """Return the variables with which a template does what is asked, None if it cannot."""
    switches = [name for name in SWITCHES if name in names.variables]
    levels = _levels(names)
    on = asked.on
    if on is None:
        on = asked.effort not in (OFF[:1] if levels else OFF)
    found: dict[str, Any] = dict.fromkeys(switches, on)
    if on and levels:
        if level := _nearest(asked.effort, levels):
            found[EFFORT] = level
    elif levels and OFF[0] in levels:
        found[EFFORT] = OFF[0]
    elif not switches:
        return None
    return found


def _levels(names: TemplateNames) -> list[str]:
    """Return the efforts that a template knows, none if it does not read any."""
    if EFFORT not in names.variables:
        return []
    known = [effort for effort in EFFORTS if effort in names.words]
    if len([effort for effort in known if effort != OFF[0]]) > 1:
        return known
    # It prints what it is given, as gpt-oss's does, which knows these.
    return [*(OFF[:1] if OFF[0] in known else ()), "low", "medium", "high"]


def _nearest(effort: str | None, levels: list[str]) -> str | None:
    """Return the level of thinking next to an effort, the higher one of two; None for any."""
    if effort is None or effort == OFF[0]:
        # Its own default may be not to think.
        effort = "medium" if OFF[0] in levels else None
    if effort not in EFFORTS:
        return None
    rank = EFFORTS.index(effort)
    return min(
        (level for level in levels if level != OFF[0]),
        key=lambda level: (abs(EFFORTS.index(level) - rank), -EFFORTS.index(level)),
    )


def reasoning_field(names: TemplateNames) -> str:
    """Return the field of messages in which a template looks for earlier reasoning."""
    return next((field for field in REASONING_FIELDS if field in names.words), REASONING_FIELDS[0])
