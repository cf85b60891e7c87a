"""From logits to the next token, on the device: samplers and logits processors.

A sampler maps log-probabilities ``[B, V]`` to ids ``[B]``; a processor maps the tokens so far and
logits ``[B, V]`` to logits. Names and semantics are mlx-lm's, so either package's callables work
in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx

from mlx_moeflux.errors import InputError

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


def make_sampler(
    temp: float = 0.0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    top_k: int = 0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.0,
    xtc_special_tokens: Sequence[int] = (),
) -> Sampler:
    """Greedy at temperature 0, else the filters in the order top-p, min-p, XTC, top-k and a draw.

    Raises:
        InputError: A value is outside its range.
    """
    _within("temp", temp, 0.0, None)
    _within("top_p", top_p, 0.0, 1.0)
    _within("min_p", min_p, 0.0, 1.0)
    _within("xtc_probability", xtc_probability, 0.0, 1.0)
    _within("xtc_threshold", xtc_threshold, 0.0, 0.5)
    if top_k < 0 or min_tokens_to_keep < 1:
        raise InputError(
            f"top_k is {top_k} and min_tokens_to_keep {min_tokens_to_keep}; they must be at least "
            "0 and 1."
        )
    if temp == 0.0:
        return lambda logprobs: mx.argmax(logprobs, axis=-1)
    filters: list[Sampler] = []
    if 0.0 < top_p < 1.0:
        filters.append(lambda logprobs: keep_top_p(logprobs, top_p))
    if min_p > 0.0:
        filters.append(lambda logprobs: keep_min_p(logprobs, min_p, min_tokens_to_keep))
    if xtc_probability > 0.0:
        special = tuple(xtc_special_tokens)
        filters.append(
            lambda logprobs: exclude_top_choices(
                logprobs, probability=xtc_probability, threshold=xtc_threshold, special=special
            )
        )
    if top_k > 0:
        filters.append(lambda logprobs: keep_top_k(logprobs, top_k))

    def sample(logprobs: mx.array) -> mx.array:
        for one in filters:
            logprobs = one(logprobs)
        return mx.random.categorical(logprobs * (1.0 / temp))

    return sample


def keep_top_p(logprobs: mx.array, top_p: float) -> mx.array:
    """Keep the smallest set of tokens whose probability reaches `top_p`; others get -inf."""
    order = mx.argsort(-logprobs, axis=-1)
    probabilities = mx.exp(mx.take_along_axis(logprobs, order, axis=-1))
    before = mx.cumsum(probabilities, axis=-1) - probabilities
    keep = mx.put_along_axis(mx.zeros(logprobs.shape, mx.bool_), order, before < top_p, axis=-1)
    return mx.where(keep, logprobs, -mx.inf)


def keep_min_p(logprobs: mx.array, min_p: float, min_tokens_to_keep: int = 1) -> mx.array:
    """Keep tokens at least `min_p` times as probable as the best one."""
    limit = logprobs.max(axis=-1, keepdims=True) + mx.log(mx.array(min_p))
    keep = logprobs >= limit
    if min_tokens_to_keep > 1:
        keep = keep | (logprobs >= _kth_largest(logprobs, min_tokens_to_keep))
    return mx.where(keep, logprobs, -mx.inf)


def keep_top_k(logprobs: mx.array, top_k: int) -> mx.array:
    """Keep the `top_k` most probable tokens, ties to the lower id."""
    V = logprobs.shape[-1]
    if top_k >= V:
        return logprobs
    losers = mx.argsort(-logprobs, axis=-1)[..., top_k:]
    return mx.put_along_axis(logprobs, losers, mx.array(-mx.inf, logprobs.dtype), axis=-1)


def exclude_top_choices(
    logprobs: mx.array, *, probability: float, threshold: float, special: Sequence[int] = ()
) -> mx.array:
    """XTC: with `probability`, drop every token above `threshold` but the least probable of them;
    `special` tokens are never dropped."""
    p = mx.exp(logprobs)
    above = p > threshold
    weakest = mx.where(above, p, mx.inf).min(axis=-1, keepdims=True)
    drop = p > weakest
    if special:
        drop[..., mx.array(list(special))] = False
    happens = mx.random.uniform(shape=(*logprobs.shape[:-1], 1)) < probability
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
    """Processors for what is not None, 0 or empty.

    repetition_penalty divides positive and multiplies negative logits of tokens in the last
    `repetition_context_size`; presence_penalty subtracts once for each such token;
    frequency_penalty once for each occurrence.

    Raises:
        InputError: The repetition penalty is negative.
    """
    processors: list[LogitsProcessor] = []
    if logit_bias:
        ids, values = mx.array(list(logit_bias.keys())), mx.array(list(logit_bias.values()))
        processors.append(lambda _, logits: logits.at[:, ids].add(values.astype(logits.dtype)))
    if repetition_penalty:
        if repetition_penalty < 0:
            raise InputError(
                f"repetition_penalty is {repetition_penalty}; it must not be negative."
            )

        def repetition(tokens: mx.array, logits: mx.array) -> mx.array:
            recent = tokens[-repetition_context_size:]
            chosen = logits[:, recent]
            scale = mx.where(chosen < 0, repetition_penalty, 1.0 / repetition_penalty)
            logits[:, recent] = (chosen * scale).astype(logits.dtype)
            return logits

        processors.append(repetition)
    if presence_penalty:

        def presence(tokens: mx.array, logits: mx.array) -> mx.array:
            recent = tokens[-presence_context_size:]
            logits[:, recent] = logits[:, recent] - presence_penalty
            return logits

        processors.append(presence)
    if frequency_penalty:

        def frequency(tokens: mx.array, logits: mx.array) -> mx.array:
            recent = tokens[-frequency_context_size:]
            return logits.at[:, recent].subtract(mx.array(frequency_penalty, logits.dtype))

        processors.append(frequency)
    return processors


def _kth_largest(values: mx.array, k: int) -> mx.array:
    return mx.sort(values, axis=-1)[..., -min(k, values.shape[-1]), None]


def _within(name: str, value: float, low: float, high: float | None) -> None:
    if not low <= value <= (float("inf") if high is None else high):
        end = "up" if high is None else f"to {high}"
        raise InputError(f"{name} is {value}; it must be from {low} {end}.")
