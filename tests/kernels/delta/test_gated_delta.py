"""Oracle: the delta rule as a float64 loop over tokens.

Limits: twice the error of the plain-MLX recurrent form on the same arrays, or where that is more
1e-5 of the largest value, 4e-5 for 16-bit inputs: products of the chunkwise form lose up to 2^-20
of a float factor, and 2^-17 where it is two bfloats.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.delta import gated_delta
from mlx_moeflux.kernels.registry import Kernels
from tests.kernels.delta.inputs import rule, rule_inputs
from tests.kernels.harness import DTYPES, Case, emulated, error, usually

FLOOR = 1e-5


def limits(inputs, truth):
    naive = gated_delta.gated_delta_recurrent(**inputs)
    floor = FLOOR if inputs["v"].dtype == mx.float32 else 4 * FLOOR
    return [
        max(2 * error(a, b), floor * np.abs(b).max()) for a, b in zip(naive, truth, strict=True)
    ]


def check(implementation, inputs, **options):
    truth = rule(inputs)
    actual = implementation(**inputs, **options)
    assert [a.dtype for a in actual] == [inputs["v"].dtype, mx.float32]
    for a, b, limit in zip(actual, truth, limits(inputs, truth), strict=True):
        assert error(a, b) <= limit


def cases(implementation, named, **options):
    """One for y and one for the state, whose limits differ."""
    made = []
    for name, inputs in named.items():
        for i, part in enumerate(("y", "state")):
            inputs_limits = limits(inputs, rule(inputs))
            made.append(
                Case(
                    f"{name} {part}",
                    lambda inputs=inputs, i=i: [implementation(**inputs, **options)[i]],
                    lambda inputs=inputs, i=i: [rule(inputs)[i]],
                    inputs_limits[i],
                )
            )
    return made


CHUNKWISE = [
    *cases(
        gated_delta.gated_delta_chunkwise_fused,
        {
            "masked": rule_inputs(2, 37, 1, 5, 32, 32, masked=True, forgets=True),
            "chunks of 16": rule_inputs(1, 21, 1, 1, 128, 32, forgets=True),
        },
    ),
    *cases(
        gated_delta.gated_delta_chunkwise_fused,
        {"pairs": rule_inputs(1, 70, 1, 3, 32, 64, dtype=mx.bfloat16)},
        parts=2,
        prefetch=True,
    ),
    *cases(
        gated_delta.gated_delta_chunkwise_fused,
        {"floats": rule_inputs(1, 18, 2, 4, 32, 32, dtype=mx.bfloat16, masked=True)},
        parts=1,
    ),
]
CASES = {
    "gated_delta_recurrent": cases(
        gated_delta.gated_delta_recurrent_fused,
        {
            "masked": rule_inputs(2, 5, 2, 6, 64, 32, masked=True, forgets=True),
            "bfloat": rule_inputs(1, 3, 1, 2, 32, 64, dtype=mx.bfloat16),
        },
    ),
    "gated_delta_factors": CHUNKWISE,
    "gated_delta_walk": CHUNKWISE,
}


STEPS = "the bound is a multiple of the step"
NOTHING = "the last turn then does nothing"
EQUIVALENT = {
    "gated_delta_chunks.metal": {
        "fetch: off by one < -> + 1 <": STEPS,
        "put: off by one < -> <=": NOTHING,
        "put: off by one < -> + 1 <": STEPS,
        "chunk_factors: off by one < -> + 1 <": STEPS,
        "chunk_factors: off by one < -> <= (8)": NOTHING,
        "chunk_factors: off by one < -> + 1 < (8)": "the last turn does nothing",
        "chunk_factors: off by one < -> + 1 < (9)": STEPS,
        "chunk_factors: off by one < -> + 1 < (12)": STEPS,
        "gated_delta_factors: off by one < -> + 1 < (2)": STEPS,
        "gated_delta_factors: off by one < -> <= (3)": NOTHING,
        "gated_delta_factors: off by one < -> <= (4)": "above the diagonal, unread",
        "gated_delta_walk: off by one < -> <= (14)": "past the end of a thread's array",
    }
}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("T", "dtype"),
    [
        # By default each number of tokens in one of the dtypes.
        pytest.param(T, dtype, id=f"{T}-{dtype}", marks=[pytest.mark.slow] * (dtype != usual))
        for T, usual in ((1, mx.float16), (2, mx.float32), (33, mx.bfloat16))
        for dtype in DTYPES
    ],
)
def test_recurrent(dtype, T):
    inputs = rule_inputs(2, T, 2, 4, 96, 32, dtype=dtype, masked=T > 1, seed=T)
    check(gated_delta.gated_delta_recurrent_fused, inputs)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    "dtype", [mx.float32, pytest.param(mx.float16, marks=pytest.mark.slow), mx.bfloat16], ids=str
)
@pytest.mark.parametrize("T", [1, 31, 32, 65])
def test_chunkwise(dtype, T):
    inputs = rule_inputs(1, T, 1, 2, 64, 96, dtype=dtype, masked=T == 65, forgets=True, seed=T)
    check(gated_delta.gated_delta_chunkwise_fused, inputs)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("parts", "prefetch"),
    [
        *((1, False), (2, True)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, True), (2, False))),
    ],
)
def test_chunkwise_however_tuned(parts, prefetch):
    inputs = rule_inputs(1, 71, 1, 5, 64, 64, dtype=mx.bfloat16, forgets=True)
    implementation = gated_delta.gated_delta_chunkwise_fused
    check(implementation, inputs, parts=parts, prefetch=prefetch)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("Dk", usually([32, 160, 256], {1, 2}))
def test_wide_keys(Dk):
    inputs = rule_inputs(1, 40, 1, 1, Dk, 32, dtype=mx.bfloat16)
    check(gated_delta.gated_delta_chunkwise_fused, inputs)
    check(gated_delta.gated_delta_recurrent_fused, inputs)


@pytest.mark.slow
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_4096_tokens(dtype):
    inputs = rule_inputs(1, 4096, 1, 1, 32, 32, dtype=dtype, forgets=True)
    check(gated_delta.gated_delta_recurrent_fused, inputs)
    check(gated_delta.gated_delta_chunkwise_fused, inputs)


@pytest.mark.usefixtures("device")
def test_a_sequence_in_pieces():
    """The state carries over, whichever implementation computes a piece."""
    inputs = rule_inputs(1, 75, 1, 2, 32, 32, forgets=True)
    truth, state, pieces = rule(inputs), inputs.pop("state"), []
    for part, implementation in (
        (slice(0, 40), gated_delta.gated_delta_chunkwise_fused),
        (slice(40, 43), gated_delta.gated_delta_recurrent_fused),
        (slice(43, 75), gated_delta.gated_delta_chunkwise_fused),
    ):
        y, state = implementation(**{n: a[:, part] for n, a in inputs.items()}, state=state)
        pieces.append(y)
    assert error(mx.concatenate(pieces, axis=1), truth[0]) <= FLOOR
    assert error(state, truth[1]) <= FLOOR


@pytest.mark.parametrize(("T", "launched"), [(16, "recurrent"), (17, "walk")])
def test_the_number_of_tokens_chooses_the_form(T, launched):
    inputs, seen, kernels = rule_inputs(1, T, 1, 1, 32, 32), [], Kernels()
    with emulated(name="cuda", inspect=seen.append):
        check(lambda q, k, v, **rest: kernels.gated_delta(q, k, v, **rest), inputs)
    # A suffix says which arguments are one array, where other tests have packed parameters.
    assert seen[-1].kernel.name.startswith(f"gated_delta_{launched}")


WRONG = {
    "multiples of 32": {"Dk": 48},
    "expected [1, 3, 2, 32]": {"k": lambda a: a[:, :, :, :32]},
    "share": {"q": lambda a: a.astype(mx.float16)},
    "state is float32": {"state": lambda a: a.astype(mx.bfloat16)},
    "state is [1, 4, 64, 32], expected [1, 4, 32, 64]": {"state": lambda a: a.swapaxes(2, 3)},
    "mask is": {"mask": lambda _: mx.ones((1, 3))},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments(message):
    change = WRONG[message]
    inputs = rule_inputs(1, 3, 2, 4, change.get("Dk", 64), 32)
    for name, edit in change.items():
        if name != "Dk":
            inputs[name] = edit(inputs.get(name))
    for implementation in (
        gated_delta.gated_delta_recurrent_fused,
        gated_delta.gated_delta_chunkwise_fused,
    ):
        with pytest.raises(ShapeError) as caught:
            implementation(**inputs)
        assert message in str(caught.value)


def test_the_oracle_against_the_reference():
    inputs = rule_inputs(2, 9, 2, 4, 32, 64, masked=True, forgets=True)
    y, state = gated_delta.gated_delta_recurrent(**inputs)
    truth = rule(inputs)
    assert error(y, truth[0]) <= 1e-6
    assert error(state, truth[1]) <= 1e-6
    assert np.abs(truth[0]).max() > 0.1
