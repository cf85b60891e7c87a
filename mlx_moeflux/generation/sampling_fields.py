"""The options of sampling: what commands, requests and the page say of each is declared here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mlx_moeflux.checks import check_integer, check_number


@dataclass(frozen=True)
class SamplingField:
    """One option.

    name: Keyword of `make_sampler`, or of `make_logits_processors` for a penalty. With hyphens it
        is the flag.
    kind: int or float.
    default: Of the keyword and of the flag.
    range: Least and largest value.
    help: Of the flag.
    request: Name in requests; "" if they have none.
    request_range: Least and largest value in requests; None for `range`.
    least_on: Smallest value in requests besides 0, which turns a penalty off.
    neutral: Value of a request that gives none; None for `default`.
    serve: The server has the flag, for requests that give none.
    label, placeholder: In the settings of the page. placeholder: "" for the neutral value.
    window: Keyword for the number of recent tokens that a penalty counts.
    counts_prompt: In a request, a penalty counts the tokens of the prompt too.
    """

    name: str
    kind: type[int] | type[float]
    default: float | None
    range: tuple[float, float]
    help: str
    request: str = ""
    request_range: tuple[float, float] | None = None
    least_on: float = 0.0
    neutral: float | None = None
    serve: bool = False
    label: str = ""
    placeholder: str = ""
    window: str = ""
    counts_prompt: bool = False

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def requested(self) -> tuple[float, float]:
        """The least and the largest value in requests."""
        return self.request_range or self.range

    @property
    def off(self) -> float:
        """The value of a request that gives none."""
        value = self.default if self.neutral is None else self.neutral
        assert value is not None
        return value

    def check(self, value: Any) -> None:
        """Raise an InputError unless `value` is of the kind and in the range."""
        low, high = self.range
        if self.kind is int:
            check_integer(self.name, value, int(low))
        else:
            check_number(self.name, value, low, high)


_SHARE = (0.0, 1.0)
_ALL = (-math.inf, math.inf)

_FIELDS = (
    SamplingField(
        "temp", float, 0.0, (0.0, math.inf), "temperature, 0: greedy",
        request="temperature", request_range=(0.0, 2.0), serve=True, label="Temperature",
    ),
    SamplingField(
        "top_p", float, 1.0, _SHARE, "the likeliest tokens that have this probability together",
        request="top_p", serve=True, label="Top p",
    ),
    SamplingField(
        "top_k", int, 0, (0, math.inf), "so many of the likeliest tokens, 0: all",
        request="top_k", serve=True, label="Top k",
    ),
    SamplingField(
        "min_p", float, 0.0, _SHARE, "tokens with this share of the likeliest one's probability",
        request="min_p", serve=True, label="Min p",
    ),
    SamplingField(
        "min_tokens_to_keep", int, 1, (1, math.inf), "so many in spite of --min-p",
    ),
    SamplingField(
        "repetition_penalty", float, None, (0.0, math.inf), "factor that weakens recent tokens",
        # A smaller factor would divide logits to infinity.
        request="repetition_penalty", request_range=(0.0, 10.0), least_on=0.01, neutral=1.0,
        label="Repetition penalty", placeholder="none",
        window="repetition_context_size", counts_prompt=True,
    ),
    SamplingField(
        "presence_penalty", float, None, _ALL, "what recent tokens lose",
        request="presence_penalty", request_range=(-2.0, 2.0), neutral=0.0,
        label="Presence penalty", window="presence_context_size",
    ),
    SamplingField(
        "frequency_penalty", float, None, _ALL, "what recent tokens lose each time that they came",
        request="frequency_penalty", request_range=(-2.0, 2.0), neutral=0.0,
        label="Frequency penalty", window="frequency_context_size",
    ),
    SamplingField(
        "xtc_probability", float, 0.0, _SHARE, "how often XTC excludes the likeliest tokens",
        request="xtc_probability", label="XTC probability",
    ),
    SamplingField(
        "xtc_threshold", float, 0.1, (0.0, 0.5), "probability from which XTC excludes",
        request="xtc_threshold", label="XTC threshold",
    ),
)  # fmt: skip

SAMPLING_FIELDS = {field.name: field for field in _FIELDS}
REQUEST_FIELDS = {field.request: field for field in _FIELDS if field.request}


def check_sampling(**given: Any) -> None:
    """Raise an InputError unless each value is of its field's kind and in its range."""
    for name, value in given.items():
        SAMPLING_FIELDS[name].check(value)
