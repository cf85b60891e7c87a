"""Oracle: convolution, norms, gates, delta rule and gated norm as float64 loops.

Limits: twice the error of the plain-MLX composition on the same arrays, or 2e-6 where that is
more.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.errors import ShapeError, UnsupportedError
from mlx_moeflux.kernels.cpu.blas_delta import delta_mixer_blas
from mlx_moeflux.kernels.delta import delta_mixer
from tests.kernels.cases import PAST
from tests.kernels.delta.inputs import gated_norm, mixer, mixer_inputs, prepared
from tests.kernels.harness import DTYPES, Case, emulated, error, float64, one_rounding, usually
from tests.kernels.metal.variant import plain_name

FLOOR = 2e-6
NAMES = ("y", "conv", "state")
IN = ("qkv", "z", "a", "b")


def limits(inputs, truth):
    naive = delta_mixer.delta_mixer(**inputs)
    return [max(2 * error(a, b), FLOOR) for a, b in zip(naive, truth, strict=True)]


def mean_error(actual, truth):
    return float(np.sqrt(np.mean((float64(actual) - truth) ** 2)))


def prepare(inputs):
    """The launch, by what comes out."""
    Dk = inputs["state"].shape[3]
    names = ("qkv", "a", "b", "conv_weight", "conv_state", "a_log", "dt_bias", "mask", "lengths")
    arguments = {n: inputs[n] for n in names if n in inputs}
    Hv, Dv = inputs["state"].shape[1:3]
    key_heads = (inputs["qkv"].shape[2] - Hv * Dv) // (2 * Dk)
    outputs = delta_mixer.delta_prepare(**arguments, key_heads=key_heads, key_dim=Dk)
    return dict(zip(("q", "k", "v", "log_decay", "beta", "conv"), outputs, strict=True))


def prepare_naively(inputs):
    B, T, D = inputs["qkv"].shape
    Hv, Dv, Dk = inputs["state"].shape[1:]
    mask, lengths = inputs.get("mask"), inputs.get("lengths")
    qkv = inputs["qkv"] if mask is None else mx.where(mask[..., None], inputs["qkv"], 0)
    y, conv = delta_mixer.causal_conv_silu(
        qkv, inputs["conv_weight"], inputs["conv_state"], lengths=lengths
    )
    keys = (D - Hv * Dv) // 2
    q, k, v = mx.split(y, [keys, 2 * keys], axis=-1)
    q, k = delta_mixer.normalise_qk(q.reshape(B, T, -1, Dk), k.reshape(B, T, -1, Dk))
    gates = delta_mixer.decay_beta(
        inputs["a"], inputs["b"], a_log=inputs["a_log"], dt_bias=inputs["dt_bias"]
    )
    gates = [g if mask is None else mx.where(mask[..., None], g, 0) for g in gates]
    found = (q, k, v.reshape(B, T, Hv, Dv), *gates, conv)
    return dict(zip(("q", "k", "v", "log_decay", "beta", "conv"), found, strict=True))


def step_cases(name, inputs, **options):
    bounds = limits(inputs, mixer(inputs))
    return [
        Case(
            f"{name} {part}",
            lambda i=i: [delta_mixer.delta_step(**inputs, **options)[i]],
            lambda i=i: [mixer(inputs)[i]],
            bounds[i],
        )
        for i, part in enumerate(NAMES)
    ]


def in_rows(inputs):
    """The same with qkv, z, a and b in rows of one array."""
    parts = [inputs[name] for name in IN]
    return inputs | {"qkv": mx.concatenate(parts, axis=-1)} | dict.fromkeys("zab")


def rows_cases(name, inputs):
    bounds = limits(inputs, mixer(inputs))
    return [
        Case(
            f"{name} {part}",
            lambda i=i: [delta_mixer.delta_mixer_fused(**in_rows(inputs))[i]],
            lambda i=i: [mixer(inputs)[i]],
            bounds[i],
        )
        for i, part in enumerate(NAMES)
    ]


def first_tokens(inputs, count):
    return inputs | {name: inputs[name][:, :count] for name in IN}


def every_cases(name, inputs, given):
    """The states after each token. given: The arguments as the launch takes them."""
    bounds, T = limits(inputs, mixer(inputs)), inputs["qkv"].shape[1]
    return [
        Case(
            f"{name} {part}",
            lambda i=i: list(delta_mixer.delta_mixer_fused(**given, every=True)[i]),
            lambda i=i: [mixer(first_tokens(inputs, t + 1))[i] for t in range(T)],
            bounds[i],
        )
        for i, part in enumerate(NAMES)
        if i > 0
    ]


def prepare_cases(name, inputs):
    naive, truth = prepare_naively(inputs), prepared(inputs)
    return [
        Case(
            f"{name} {part}",
            lambda part=part: [prepare(inputs)[part]],
            lambda part=part: [prepared(inputs)[part]],
            max(2 * error(naive[part], truth[part]), FLOOR),
        )
        for part in naive
    ]


def norm_inputs(rows, D, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x, z, weight = rng.normal(size=(*rows, D)), rng.normal(size=(*rows, D)), rng.normal(size=D)
    return {
        "x": mx.array(x, dtype),
        "z": mx.array(3 * z, dtype),
        "weight": mx.array(weight, dtype),
        "eps": 1e-3,
    }


def norm_limit(inputs):
    """A value goes through eight roundings of float32: square root, two divisions, exponential,
    sum, three products. How many of them add up is chance, in the naive version too."""
    naive, truth = delta_mixer.gated_rms_norm(**inputs), gated_norm(**inputs)
    return max(2 * error(naive, truth), 8 * one_rounding(truth, mx.float32))


NORM = norm_inputs((1, 3, 2), 192, mx.float32)
SIGMOID = norm_inputs((2, 3), 64, mx.float32) | {"gate": "sigmoid"}
EVERY = mixer_inputs(2, 3, 1, 2, 32, 64, 3)
CASES = {
    "delta_step": [
        *step_cases("masked", mixer_inputs(1, 3, 1, 2, 32, 32, 4, masked=True)),
        *step_cases("two tokens", mixer_inputs(2, 2, 1, 3, 64, 32, 4, masked=True, ragged=True)),
        *step_cases("one token", mixer_inputs(1, 1, 2, 4, 32, 64, 3), threads=256),
        *step_cases("a gate of sigmoid", mixer_inputs(1, 2, 1, 1, 32, 32, 2, gate="sigmoid")),
        *every_cases("every token", EVERY, EVERY),
    ],
    "delta_step_of_rows": [
        *rows_cases("one token", mixer_inputs(2, 1, 2, 4, 32, 64, 3)),
        *rows_cases("three tokens", mixer_inputs(2, 3, 1, 2, 64, 32, 4, gate="sigmoid")),
        *every_cases("every token", EVERY, in_rows(EVERY)),
    ],
    "delta_prepare": [
        *prepare_cases("masked", mixer_inputs(2, 11, 1, 2, 64, 32, 4, masked=True, ragged=True)),
        *prepare_cases(
            "short", mixer_inputs(2, 2, 2, 6, 32, 96, 4, dtype=mx.bfloat16, ragged=True)
        ),
    ],
    "gated_rms_norm": [
        Case(
            "rows of 192",
            lambda: [delta_mixer.gated_rms_norm_fused(**NORM)],
            lambda: [gated_norm(**NORM)],
            norm_limit(NORM),
        ),
        Case(
            "a gate of sigmoid",
            lambda: [delta_mixer.gated_rms_norm_fused(**SIGMOID)],
            lambda: [gated_norm(**SIGMOID)],
            norm_limit(SIGMOID),
        ),
    ],
}

LARGER = "a larger array"
EQUIVALENT = {
    "delta_mixer.metal": {
        "delta_step: transposed index": LARGER,
        "delta_step: transposed index (2)": LARGER,
        "delta_step_of_rows: transposed index": LARGER,
        "delta_step_of_rows: transposed index (2)": LARGER,
        "finish_head: off by one < -> <= (2)": PAST,
        "keep_window: off by one < -> + 1 <": "steps of 32",
        "delta_prepare: swapped arguments 1 and 2 of metal::clamp": "the same",
        "delta_step: swapped arguments 1 and 2 of metal::clamp": "the same",
        "load_row: off by one < -> + 1 <": "steps of 4",
        "delta_step: off by one < -> <= (4)": "no channel is so large: nothing is written",
    }
}


def check(actual, inputs):
    """Twice the naive error as a mean; four times where it is largest."""
    truth = mixer(inputs)
    for a, naive, b in zip(actual, delta_mixer.delta_mixer(**inputs), truth, strict=True):
        assert error(a, b) <= max(4 * error(naive, b), FLOOR)
        assert mean_error(a, b) <= max(2 * mean_error(naive, b), FLOOR)
    dtypes = [a.dtype for a in actual]
    assert dtypes == [inputs["qkv"].dtype, inputs["qkv"].dtype, mx.float32]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("T", "dtype"),
    [
        # By default each dtype with one number of tokens.
        pytest.param(T, dtype, id=f"{T}-{dtype}", marks=[pytest.mark.slow] * (dtype not in usual))
        for T, usual in ((1, (mx.float16,)), (3, (mx.float32, mx.bfloat16)))
        for dtype in DTYPES
    ],
)
def test_step(dtype, T):
    inputs = mixer_inputs(2, T, 2, 4, 96, 64, 4, dtype=dtype, masked=T > 1, seed=T)
    check(delta_mixer.delta_step(**inputs), inputs)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("form", ["apart", "in rows"])
@pytest.mark.parametrize(
    "dtype", [mx.float32, *(pytest.param(d, marks=pytest.mark.slow) for d in DTYPES[1:])], ids=str
)
def test_every_state_has_the_bits_of_single_calls(form, dtype):
    inputs = mixer_inputs(1, 4, 2, 4, 64, 32, 4, dtype=dtype)
    check_every(delta_mixer.delta_mixer_fused, in_rows(inputs) if form == "in rows" else inputs)


@pytest.mark.parametrize("mixed", [delta_mixer.delta_mixer, delta_mixer_blas])
def test_every_state_has_the_bits_of_single_calls_on_the_cpu(mixed):
    check_every(mixed, mixer_inputs(1, 4, 2, 4, 64, 32, 4))
    check_every(mixed, in_rows(mixer_inputs(2, 3, 1, 2, 32, 32, 2)))


def check_every(mixed, inputs):
    """Each state, and y, against a call of one token from the state before."""
    y, windows, states = mixed(**inputs, every=True)
    before = {name: inputs[name] for name in ("conv_state", "state")}
    for t in range(inputs["qkv"].shape[1]):
        token = {n: None if inputs[n] is None else inputs[n][:, t : t + 1] for n in IN}
        single, *after = mixed(**inputs | token | before)
        for a, b in zip((y[:, t : t + 1], windows[t], states[t]), (single, *after), strict=True):
            assert mx.isfinite(b).all().item()
            assert a.dtype == b.dtype
            assert mx.array_equal(a, b).item()
        before = dict(zip(before, after, strict=True))


def test_every_state_is_refused_where_it_is_not_known():
    inputs = mixer_inputs(1, 3, 1, 2, 32, 32, 4, masked=True)
    for mixed in (delta_mixer.delta_mixer, delta_mixer.delta_mixer_fused):
        with pytest.raises(ShapeError, match="no mask"):
            mixed(**inputs, every=True)
    inputs = mixer_inputs(1, delta_mixer.STEP_UP_TO + 1, 1, 2, 32, 32, 4)
    with pytest.raises(UnsupportedError, match="take the reference"):
        delta_mixer.delta_mixer_fused(**inputs, every=True)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("Dv", usually([32, 160, 256], {0, 1}))
def test_step_of_any_width(Dv):
    inputs = mixer_inputs(1, 1, 1, 1, 64, Dv, 2)
    check(delta_mixer.delta_step(**inputs), inputs)
    check(delta_mixer.delta_step(**inputs, threads=128), inputs)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("T", "dtype"),
    [
        pytest.param(T, dtype, id=f"{T}-{dtype}", marks=[pytest.mark.slow] * (dtype != usual))
        for T, usual in ((1, mx.bfloat16), (8, mx.float32), (9, mx.bfloat16), (40, mx.float32))
        for dtype in (mx.float32, mx.float16, mx.bfloat16)
    ],
)
def test_mixer(dtype, T):
    options = {"masked": T == 9, "ragged": T == 8, "gate": "sigmoid" if T in (8, 40) else None}
    inputs = mixer_inputs(2, T, 1, 2, 32, 64, 4, dtype=dtype, **options, seed=T)
    check(delta_mixer.delta_mixer_fused(**inputs), inputs)


@pytest.mark.parametrize(
    ("back_end", "T", "launched"),
    [("cuda", 16, "recurrent"), ("cuda", 17, "walk"), ("metal", 17, "recurrent")],
)
def test_the_table_of_the_rule_chooses_its_kernel(back_end, T, launched):
    inputs, seen = mixer_inputs(1, T, 1, 1, 32, 32, 4), []
    with emulated(name=back_end, inspect=seen.append):
        check(delta_mixer.delta_mixer_fused(**inputs), inputs)
    assert f"gated_delta_{launched}" in [plain_name(launch.kernel.name) for launch in seen]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("T", "masked", "dtype"),
    [
        pytest.param(
            T, masked, dtype, id=f"{T}-{masked}-{dtype}",
            marks=[pytest.mark.slow] * (dtype != usual),
        )
        for T, masked, usual in (
            (1, False, mx.float32), (2, True, mx.bfloat16), (9, False, mx.bfloat16)
        )
        for dtype in (mx.float32, mx.float16, mx.bfloat16)
    ],
)  # fmt: skip
def test_rows_give_the_same_bits(dtype, T, masked):
    inputs = mixer_inputs(2, T, 2, 4, 64, 32, 4, dtype=dtype, masked=masked)
    implementations = delta_mixer.delta_mixer, delta_mixer.delta_mixer_fused
    for implementation in implementations:
        for a, b in zip(implementation(**in_rows(inputs)), implementation(**inputs), strict=True):
            assert mx.array_equal(a, b).item()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prepare(dtype):
    inputs = mixer_inputs(3, 17, 1, 3, 128, 32, 4, dtype=dtype, masked=True, ragged=True)
    actual, naive, truth = prepare(inputs), prepare_naively(inputs), prepared(inputs)
    for name, array in actual.items():
        assert array.dtype == naive[name].dtype
        assert error(array, truth[name]) <= max(2 * error(naive[name], truth[name]), FLOOR), name


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [(5,), (2, 3, 4)])
def test_gated_norm(dtype, rows):
    inputs = norm_inputs(rows, 160, dtype)
    actual = delta_mixer.gated_rms_norm_fused(**inputs)
    assert actual.dtype == dtype
    assert error(actual, gated_norm(**inputs)) <= norm_limit(inputs)


@pytest.mark.parametrize("T", [1, 12])
def test_another_gate_is_refused_by_kernels(T):
    inputs = mixer_inputs(1, T, 1, 1, 32, 32, 2, gate="tanh")
    with emulated(), pytest.raises(UnsupportedError, match="'tanh'"):
        delta_mixer.delta_mixer_fused(**inputs)


@pytest.mark.usefixtures("device")
def test_gates_keep_small_steps():
    """softplus(-17) is 4e-8: a sum with 1 in float32 would lose it, and the decay with it."""
    inputs = mixer_inputs(1, 6, 1, 2, 32, 32, 2)
    inputs["a"] = mx.full((1, 6, 2), -17.0)
    inputs["dt_bias"] = mx.zeros((2,))
    actual, truth = prepare(inputs)["log_decay"], prepared(inputs)["log_decay"]
    assert np.all(truth < 0)
    assert np.abs(np.array(actual) / truth - 1).max() <= 1e-5


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("a", lambda a: a[..., :1], "a is [1, 2, 1], expected [1, 2, 2]"),
        ("b", lambda a: a.astype(mx.float16), "must share"),
        ("dt_bias", lambda a: a.astype(mx.bfloat16), "the others one dtype"),
        ("conv_state", lambda a: a[:, 1:], "conv_state is [1, 2, 128]"),
        ("z", lambda a: a[:, :1], "z, state, norm are"),
        ("state", lambda a: a.astype(mx.float16), "float32"),
        ("lengths", lambda _: mx.zeros((2,), mx.int32), "lengths is"),
        ("mask", lambda _: mx.ones((1, 2)), "mask is"),
    ],
)
def test_wrong_arguments(name, edit, message):
    inputs = mixer_inputs(1, 2, 1, 2, 32, 32, 4)
    inputs[name] = edit(inputs.get(name))
    with pytest.raises(ShapeError) as caught:
        delta_mixer.delta_mixer_fused(**inputs)
    assert message in str(caught.value)


def test_the_oracle_against_the_reference():
    inputs = mixer_inputs(2, 9, 2, 4, 32, 64, 4, masked=True, ragged=True)
    for actual, truth in zip(delta_mixer.delta_mixer(**inputs), mixer(inputs), strict=True):
        assert error(actual, truth) <= 1e-5
        assert np.abs(truth).max() > 0.1
