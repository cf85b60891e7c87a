"""What a trial runs on. Oracle: the reference on the whole call, and the bytes that are copied."""

from __future__ import annotations

import dataclasses
import inspect
import math

import mlx.core as mx
import pytest

from mlx_moeflux.kernels.examples import TINY, normal
from mlx_moeflux.kernels.nested import arrays
from mlx_moeflux.kernels.registry import OPERATIONS
from mlx_moeflux.kernels.verify import arguments, comparison, trials, verdicts
from tests.kernels.metal.recording import Recorder, recorded
from tests.kernels.metal.test_device_limits import FIRST, MODELS, model_of, walk
from tests.kernels.verify.first_use import reference


def test_prompts_are_cut_and_the_truth_has_few_rows():
    args, kwargs = OPERATIONS["expert_mix"].proof.workload("", TINY, 300, mx.bfloat16)
    seen = []

    def right(x, slots, weights, bank, *, initial=None):
        seen.append(x.shape)
        return reference("expert_mix")(x, slots, weights, bank, initial=initial)

    assert comparison.attempt(OPERATIONS["expert_mix"], right, args, kwargs).ok
    assert set(seen) == {(300, TINY.C), (arguments.TOKENS, TINY.C)}


@pytest.mark.parametrize(
    "operation", sorted(name for name, record in OPERATIONS.items() if record.tokens)
)
def test_prompts_of_every_operation_can_be_cut(operation):
    args, kwargs = OPERATIONS[operation].proof.example_call(
        mx.float32, tokens=arguments.TOKENS + 40
    )
    call = inspect.signature(reference(operation)).bind(*args, **kwargs)
    cut = arguments.cut(OPERATIONS[operation], reference(operation), call)
    name, axis = next(iter(OPERATIONS[operation].tokens.items()))
    if operation == "project":
        args = (mx.concatenate([args[0]] * arguments.TOKENS), *args[1:])
        call = inspect.signature(reference(operation)).bind(*args, **kwargs)
        cut = arguments.cut(OPERATIONS[operation], reference(operation), call)
    assert cut.arguments[name].shape[axis] == arguments.TOKENS
    # Of a cut call every result is that of the first tokens.
    some = arrays(reference(operation)(*cut.args, **cut.kwargs))
    whole = arrays(reference(operation)(*args, **kwargs))
    for a, b in zip(some, whole, strict=True):
        where = tuple(slice(n) for n in a.shape)
        same = mx.allclose(a, b[where], atol=1e-5).item()
        assert same or a.shape == b.shape  # states, which are of other tokens


# Their long prompts have masks that are arrays, which are not cut, and take seconds.
INDEXED = {"deepseek-v3.2", "glm-5"}


def copied(call):
    """Bytes of the arguments that the truth copies in float32."""
    every = [value for value in call.arguments.values() if isinstance(value, mx.array)]
    return sum(4 * array.size for array in every if array.nbytes <= arguments.MOST_BYTES)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] * (n not in {*FIRST.values()} - INDEXED))
        for n in MODELS
    ],
)
def test_a_trial_at_published_sizes_takes_few_bytes(name, monkeypatch):
    """Nothing was tried before a prompt of 20,000 tokens and the step behind it."""
    tried, large, short = set(), [], 0

    def verdict(key, operation, implementation, args, kwargs, launched):
        nonlocal short
        if key in tried:
            return verdicts.Verdict(True)
        tried.add(key)
        call = bound(operation.name, args, kwargs)
        call.arguments.pop("steps", None)
        cut = arguments.cut(operation, operation.implementations[implementation].function, call)
        rows = arguments.sampled_rows(operation, cut)
        count = copied(cut if rows is None else arguments.of_row(operation, cut, int(rows[-1])))
        if count > 5 * arguments.MOST_BYTES:
            large.append(f"{operation.name} {launched}: {count} bytes")
        if operation.proof.positions and not isinstance(call.arguments["mask"], mx.array):
            caches = [cut.arguments[name] for name in operation.proof.positions]
            short += caches[0].shape != call.arguments[next(iter(operation.proof.positions))].shape
            # How many heads latent_prefill computes together depends on the length.
            most = arguments.MOST_BYTES if operation.proof.apart else math.inf
            if (count := sum(cache.nbytes for cache in caches)) > most:
                large.append(f"{operation.name} {launched}: a cache of {count} bytes")
        return verdicts.Verdict(True)

    monkeypatch.setattr(trials, "_verdict", verdict)
    monkeypatch.setattr(Recorder, "checks_first_use", True)
    with recorded():
        walk(model_of(name, mx.bfloat16, apart=False), prompts=(20_000,), batches=())
    assert len(tried) > 10
    assert not large  # an assertion within would print arrays that nobody has evaluated
    assert short or name in INDEXED


ATTENTION = sorted(name for name, record in OPERATIONS.items() if record.proof.positions)


def bound(operation, args, kwargs):
    return inspect.signature(reference(operation)).bind(*args, **kwargs)


@pytest.mark.parametrize("operation", [name for name in ATTENTION if OPERATIONS[name].proof.apart])
def test_the_truth_of_some_tokens_of_attention_is_that_of_all(operation):
    record = OPERATIONS[operation]
    calls = dict(record.proof.small_cases())
    args, kwargs = record.proof.example_call(mx.float32, tokens=20)
    calls |= {"20 tokens": (args, kwargs), "unmasked": (args, kwargs | {"mask": None})}
    if operation == "sdpa":
        calls["whole buffers"] = args, {"scale": 0.1, "mask": "causal"}
    sampled = 0
    for what, (args, kwargs) in calls.items():
        call = bound(operation, args, kwargs)
        rows = arguments.sampled_rows(record, call)
        if rows is None:
            continue
        (whole,) = comparison._truth(record, call)
        for row in rows.tolist():
            (one,) = comparison._truth(record, arguments.of_row(record, call, row))
            assert mx.allclose(one, whole[..., row : row + 1, :], atol=1e-5), (what, row)
            sampled += 1
    assert sampled >= 2 * arguments.ROWS


def with_a_long_cache(operation, tokens, *, on_device=False):
    """A call on the first 2,000 of 2,048 positions, two sequences, the second of which has
    padding."""
    sizes = dataclasses.replace(TINY, keys=2000 - tokens, step=48 + tokens, heads=2)
    build = OPERATIONS[operation].proof.workloads[""]
    args, kwargs = build(sizes, tokens, normal(mx.float32))
    kwargs["start"] = mx.array([0, 1700])
    if on_device:
        names = list(OPERATIONS[operation].proof.positions)
        caches = [bound(operation, args, kwargs).arguments[name] for name in names]
        kwargs["tail"] = tuple(normal(mx.float32)(*x.shape[:2], 64, x.shape[3]) for x in caches)
        kwargs["length"] = mx.array([2000, 1990], mx.int32)
    return args, kwargs


@pytest.mark.parametrize(("tokens", "on_device"), [(1, False), (1, True), (80, False)])
@pytest.mark.parametrize("operation", ATTENTION)
def test_a_trial_has_a_short_cache(operation, tokens, on_device, monkeypatch):
    if on_device and operation == "latent_prefill":
        return  # it takes no tail
    record, most = OPERATIONS[operation], 600_000
    monkeypatch.setattr(arguments, "MOST_BYTES", most)
    args, kwargs = with_a_long_cache(operation, tokens, on_device=on_device)
    call = bound(operation, args, kwargs)
    cut = arguments.cut(record, reference(operation), call)
    caches = [cut.arguments[name] for name in record.proof.positions]
    S = caches[0].shape[2]
    assert sum(cache.nbytes for cache in caches) <= most
    assert S % arguments.POSITIONS == 0
    for name, cache in zip(record.proof.positions, caches, strict=True):
        assert mx.array_equal(cache, call.arguments[name][:, :, :S])
    before, after = kwargs["length"], cut.arguments["length"]
    gone = 2000 - int(mx.array(after).max().item())
    gone -= tokens - min(tokens, arguments.TOKENS)
    assert S - 48 - 64 < 2000 - gone <= S - 48
    if on_device:
        # The newest rows have the same places in the tail.
        assert gone % 64 == 0
        assert after.tolist() == [n - gone for n in before.tolist()]
    assert cut.arguments["start"].tolist() == [0, max(1700 - gone, 0)]
    (truth,) = comparison._truth(record, cut)
    assert mx.isfinite(truth).all()


def test_other_orders_have_the_same_numbers():
    small, large, zeros = mx.random.normal((3, 7)), mx.random.normal((600, 4096)), mx.zeros((2, 9))
    shrinks_nothing = OPERATIONS["sdpa"]
    call = inspect.signature(lambda small, large, zeros: None).bind(small, large, zeros)
    for _ in range(2):
        drawn = arguments.drawn(shrinks_nothing, call, keep=False).arguments
        assert sorted(drawn["small"].flatten().tolist()) == sorted(small.flatten().tolist())
        assert not mx.array_equal(drawn["small"], small)
        assert drawn["large"] is large  # more than MOST_BYTES
        assert len(set(drawn["zeros"].flatten().tolist())) > 1
        assert (drawn["zeros"] <= 0).all()
    kept = arguments.drawn(shrinks_nothing, call, keep=True).arguments
    assert kept["small"] is small
    assert not mx.array_equal(kept["zeros"], zeros)
