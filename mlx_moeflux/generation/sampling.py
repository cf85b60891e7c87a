"""Samplers and logits processors: from logits to the next token, on the device.

A sampler maps log-probabilities ``[B, V]`` to ids ``[B]``; a processor maps the tokens so far
``[T]`` and logits ``[B, V]`` to logits. Names and semantics are mlx-lm's, so either package's
callables work in the other. No function here waits for the device or changes its arguments.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple, TypedDict

import mlx.core as mx

from mlx_moeflux.checks import check_callable, check_integer, check_number
from mlx_moeflux.errors import ExactnessError, InputError, ShapeError
from mlx_moeflux.generation.sampling_fields import check_sampling
from mlx_moeflux.kernels.nested import describe

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


class SamplingOptions(TypedDict, total=False):
    """Keywords of :func:`make_sampler` and :func:`make_logits_processors`."""

    temp: float
    top_p: float
    min_p: float
    min_tokens_to_keep: int
    top_k: int
    xtc_probability: float
    xtc_threshold: float
    xtc_special_tokens: Sequence[int] | None
    logit_bias: Mapping[int, float] | None
    repetition_penalty: float | None
    repetition_context_size: int
    presence_penalty: float | None
    presence_context_size: int
    frequency_penalty: float | None
    frequency_context_size: int


# Temperatures below its inverse equal greedy decoding, and 0 * inf would be NaN.
MAX_SHARPNESS = 1e30


def make_sampler(
    temp: float = 0.0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    top_k: int = 0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    xtc_special_tokens: Sequence[int] | None = None,
    *,
    seed: int | None = None,
) -> Sampler:
    """Return a greedy sampler at temperature 0, else one that filters and draws.

    The filters run in the order top-p, min-p, XTC, top-k. seed: Draw from a random state of the
    sampler's own, so that nothing else changes what it draws; None draws from the thread's.

    Raises:
        InputError: A value is of another type or outside its range.
    """
    check_sampling(
        temp=temp, top_p=top_p, min_p=min_p,
        xtc_probability=xtc_probability, xtc_threshold=xtc_threshold,
        top_k=top_k, min_tokens_to_keep=min_tokens_to_keep,
    )  # fmt: skip
    special = () if xtc_special_tokens is None else xtc_special_tokens
    special = check_ids("xtc_special_tokens", special)
    if seed is not None:
        check_integer("seed", seed, 0)
    if temp == 0.0:
        return greedy
    filters: list[Callable[[mx.array, mx.array | None], mx.array]] = []
    if 0.0 < top_p < 1.0:
        filters.append(lambda logprobs, key: keep_top_p(logprobs, top_p))
    if min_p > 0.0:
        filters.append(lambda logprobs, key: keep_min_p(logprobs, min_p, min_tokens_to_keep))
    if xtc_probability > 0.0:
        xtc = {"probability": xtc_probability, "threshold": xtc_threshold, "special": special}
        filters.append(lambda logprobs, key: exclude_top_choices(logprobs, **xtc, key=key))
    if top_k > 0:
        filters.append(lambda logprobs, key: keep_top_k(logprobs, top_k))
    sharpness = min(1.0 / temp, MAX_SHARPNESS)
    state = None if seed is None else mx.random.key(seed % 2**64)

    def sample(logprobs: mx.array) -> mx.array:
        nonlocal state
        filtering = drawing = None
        if state is not None:
            state, filtering, drawing = mx.random.split(state, 3)
        for one in filters:
            logprobs = one(logprobs, filtering)
        return mx.random.categorical(logprobs * sharpness, key=drawing)

    return sample


def greedy(logprobs: mx.array) -> mx.array:
    """Draw the most probable tokens; the sampler of temperature 0, which keeps no state."""
    return mx.argmax(logprobs, axis=-1)


def keep_top_p(logprobs: mx.array, top_p: float) -> mx.array:
    """Keep the smallest set of tokens with `top_p` of the probability; others get -inf."""
    order = mx.argsort(-logprobs, axis=-1)
    # A running sum of V small numbers needs more than bfloat16's mantissa.
    p = mx.softmax(mx.take_along_axis(logprobs, order, axis=-1).astype(mx.float32), axis=-1)
    before = mx.cumsum(p, axis=-1) - p
    keep = mx.put_along_axis(mx.zeros(logprobs.shape, mx.bool_), order, before < top_p, axis=-1)
    return mx.where(keep, logprobs, -mx.inf)


def keep_min_p(logprobs: mx.array, min_p: float, min_tokens_to_keep: int = 1) -> mx.array:
    """Keep tokens at least `min_p` times as probable as the best one."""
    limit = logprobs.max(axis=-1, keepdims=True) + math.log(min_p)
    keep = logprobs >= limit
    if min_tokens_to_keep > 1:
        count = min(min_tokens_to_keep, logprobs.shape[-1])
        keep = keep | (logprobs >= mx.sort(logprobs, axis=-1)[..., -count, None])
    return mx.where(keep, logprobs, -mx.inf)


def keep_top_k(logprobs: mx.array, top_k: int) -> mx.array:
    """Keep the `top_k` most probable tokens; others get -inf."""
    if top_k >= logprobs.shape[-1]:
        return logprobs
    losers = mx.argsort(-logprobs, axis=-1)[..., top_k:]
    return mx.put_along_axis(logprobs, losers, mx.array(-mx.inf, logprobs.dtype), axis=-1)


def exclude_top_choices(
    logprobs: mx.array,
    *,
    probability: float,
    threshold: float,
    special: Sequence[int] = (),
    key: mx.array | None = None,
) -> mx.array:
    """Apply XTC: with `probability`, drop all tokens above `threshold` but the least probable one.

    Probabilities are taken over the tokens that earlier filters kept. `special` tokens are never
    dropped. key: Random state; None for the thread's.
    """
    p = mx.softmax(logprobs.astype(mx.float32), axis=-1)
    weakest = mx.where(p > threshold, p, mx.inf).min(axis=-1, keepdims=True)
    drop = p > weakest
    if special:
        check_ids("xtc_special_tokens", special, logprobs.shape[-1])
        drop[..., mx.array(list(special))] = False
    happens = mx.random.uniform(shape=(*logprobs.shape[:-1], 1), key=key) < probability
    return mx.where(happens & drop, -mx.inf, logprobs)


def make_logits_processors(
    logit_bias: Mapping[int, float] | None = None,
    repetition_penalty: float | None = None,
    repetition_context_size: int = 20,
    presence_penalty: float | None = None,
    presence_context_size: int = 20,
    frequency_penalty: float | None = None,
    frequency_context_size: int = 20,
) -> list[LogitsProcessor]:
    """Return processors for the arguments that are not None, 0 or empty.

    logit_bias: Id -> number added to its logit; -inf bans the token. repetition_penalty divides
    positive and multiplies negative logits of tokens in the last `repetition_context_size`;
    presence_penalty subtracts once for each such token; frequency_penalty once for each
    occurrence.

    Raises:
        InputError: A value is of another type or outside its range.
    """
    processors: list[LogitsProcessor] = []
    if logit_bias:
        processors.append(_bias(logit_bias))
    for penalty, size, name, make in (
        (repetition_penalty, repetition_context_size, "repetition", _repetition),
        (presence_penalty, presence_context_size, "presence", _presence),
        (frequency_penalty, frequency_context_size, "frequency", _frequency),
    ):
        check_integer(f"{name}_context_size", size, 1)
        if penalty is not None:
            check_sampling(**{f"{name}_penalty": penalty})
            if penalty != 0:
                processors.append(make(penalty, size))
    return processors


def _bias(logit_bias: Mapping[int, float]) -> LogitsProcessor:
    if not isinstance(logit_bias, Mapping):
        raise InputError(f"logit_bias is a {type(logit_bias).__name__}; give a dict of id: bias.")
    keys = check_ids("logit_bias", logit_bias)
    for i, value in logit_bias.items():
        if value != -math.inf:
            check_number(f"logit_bias[{i}]", value, -math.inf)
    ids, values = mx.array(keys), mx.array([float(v) for v in logit_bias.values()])

    def bias(tokens: mx.array, logits: mx.array) -> mx.array:
        # MLX does not check the range of a scatter and would write elsewhere.
        check_ids("logit_bias", keys, logits.shape[-1])
        return logits.at[:, ids].add(values.astype(logits.dtype))

    return bias


def _repetition(penalty: float, size: int) -> LogitsProcessor:
    return _change_recent(size, lambda x: mx.where(x < 0, x * penalty, x / penalty))


def _presence(penalty: float, size: int) -> LogitsProcessor:
    return _change_recent(size, lambda x: x - penalty)


def _change_recent(size: int, change: Callable[[mx.array], mx.array]) -> LogitsProcessor:
    """Return a processor that changes the logits of the last `size` tokens, each token once."""

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        recent = tokens[-size:]
        recent = mx.broadcast_to(recent, (logits.shape[0], recent.shape[0]))
        changed = change(mx.take_along_axis(logits, recent, axis=-1))
        return mx.put_along_axis(logits, recent, changed, axis=-1)

    return process


def _frequency(penalty: float, size: int) -> LogitsProcessor:
    def frequency(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits.at[:, tokens[-size:]].subtract(mx.array(penalty, logits.dtype))

    return frequency


def choose_sampling(
    sampler: Sampler | None,
    processors: Sequence[LogitsProcessor] | None,
    options: Mapping[str, Any],
    *,
    others: Iterable[str] = (),
) -> tuple[Sampler, list[LogitsProcessor]]:
    """Return the caller's callables, or those of plain options such as ``temp=0.7``.

    others: Further names to suggest for a misspelt option.

    Raises:
        InputError: An option is unknown, out of range, or given beside a callable.
    """
    ours, theirs = (
        {name: options[name] for name in inspect.signature(make).parameters if name in options}
        for make in (make_sampler, make_logits_processors)
    )
    known = SamplingOptions.__annotations__
    for name in options.keys() - known.keys():
        near = difflib.get_close_matches(name, {*known, *others}, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(sorted(known))}."
        raise InputError(f"nothing is called '{name}'; {hint}")
    for given, plain, what in (
        (sampler, ours, "sampler"), (processors, theirs, "logits_processors")
    ):  # fmt: skip
        if given is not None and plain:
            raise InputError(f"give either {what} or '{next(iter(plain))}', not both.")
    if processors is None:
        processors = make_logits_processors(**theirs)
    return check_sampler(sampler) or make_sampler(**ours), check_processors(processors)


def check_sampler(sampler: Sampler | None) -> Sampler | None:
    """Return `sampler`; raise an InputError if it is neither None nor callable."""
    check_callable("sampler", sampler)
    return sampler


def check_processors(processors: Iterable[LogitsProcessor] | None) -> list[LogitsProcessor]:
    """Return logits processors as a list; raise an InputError if one is not callable."""
    if processors is None:
        return []
    if not isinstance(processors, Iterable):
        raise InputError(f"logits_processors is {processors!r}; give a list of callables.")
    found = list(processors)
    for processor in found:
        if not callable(processor):
            raise InputError(f"logits_processors has {processor!r}; give callables.")
    return found


def processed(
    processors: Iterable[LogitsProcessor], tokens: mx.array, logits: mx.array
) -> mx.array:
    """Pass logits ``[B, V]`` after `tokens` ``[T]`` through all processors, lazily.

    Raises:
        ShapeError: One does not return floats of the same shape.
    """
    shape = logits.shape
    for processor in processors:
        logits = processor(tokens, logits)
        if (
            not isinstance(logits, mx.array)
            or logits.shape != shape
            or not mx.issubdtype(logits.dtype, mx.floating)
        ):
            raise ShapeError(
                f"the logits processor {_name_of(processor)} returned {describe(logits)}; expected "
                f"float logits {list(shape)}."
            )
    return logits


class Sampled(NamedTuple):
    """Tokens ``[B]`` of a step, their logprobs ``[B, V]`` float32, and whether these are finite,
    ``[B, 1]`` bool. All are lazy."""

    tokens: mx.array
    logprobs: mx.array
    finite: mx.array


def drawn(sampler: Sampler, logprobs: mx.array) -> mx.array:
    """Return the ids ``[B]`` that `sampler` draws from logprobs ``[B, V]``, lazily; when they are
    read, :func:`check_drawn` compares them with the vocabulary.

    Raises:
        ShapeError: It does not return integers of this shape.
    """
    tokens = sampler(logprobs)
    if (
        not isinstance(tokens, mx.array)
        or tokens.shape != logprobs.shape[:1]
        or not mx.issubdtype(tokens.dtype, mx.integer)
    ):
        raise ShapeError(
            f"the sampler {_name_of(sampler)} returned {describe(tokens)}; expected integer ids "
            f"{list(logprobs.shape[:1])}."
        )
    return tokens


def check_drawn(tokens: Iterable[int], vocabulary: int) -> None:
    """Raise an InputError unless the ids that a sampler drew are in the vocabulary."""
    for token in tokens:
        if not 0 <= token < vocabulary:
            raise InputError(
                f"the sampler returned id {token}, which is outside the vocabulary; return 0 to "
                f"{vocabulary - 1}."
            )


def normalised(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Return logprobs ``[B, V]`` float32 of logits ``[B, V]``, and for each row whether its sum is
    finite, ``[B, 1]`` bool."""
    logits = logits.astype(mx.float32)
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    return logits - total, mx.isfinite(total)


def check_finite(finite: mx.array, position: int) -> None:
    """Raise :class:`ExactnessError` unless `finite` of :func:`normalised`, evaluated, holds."""
    if not finite.all().item():
        raise ExactnessError(
            f"the logits after {position} tokens are not finite: a weight, a kernel or a replaced "
            "part gives wrong numbers; 'mlx_moeflux check' tries the kernels, --safe uses none."
        )


def _name_of(given: Any) -> str:
    return getattr(given, "__name__", type(given).__name__)


def check_ids(
    name: str, ids: Iterable[int], vocabulary: int | None = None, *, what: str = "token id"
) -> list[int]:
    """Return `ids` as a list; raise an InputError if one is no id of the vocabulary. what: A name
    for one of them."""
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise InputError(f"{name} is {ids!r}; give {what}s.")
    found = list(ids)
    for i in found:
        if not isinstance(i, Integral) or i < 0:
            kind = what.rpartition(" ")[2]
            raise InputError(f"{name} has {i!r}, which is no {what}; {kind}s count from 0.")
        if vocabulary is not None and i >= vocabulary:
            raise InputError(
                f"{name} has token id {i}, which is out of range; the vocabulary has {vocabulary}."
            )
    return [int(i) for i in found]
