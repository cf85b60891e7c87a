"""Shared expert and residual in one launch against float64; the naive error is stock MLX's."""

from __future__ import annotations

import functools
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.linear import matvec
from mlx_moeflux.kernels.linear.weight import Weight
from mlx_moeflux.kernels.moe.add_shared import (
    APART,
    _launch,
    add_shared,
    add_shared_dequantised,
    add_shared_fused,
)
from tests.kernels.experts import dense, random_array, random_matrix
from tests.kernels.harness import Case, error, float64, patched, usually

# tokens, C, F, bits, group, dtype
SIZES = [
    (1, 96, 64, 4, 32, mx.float32),
    (2, 37, 96, 8, 32, mx.float32),
    (3, 128, 512, 4, 64, mx.bfloat16),
    (1, 66, 256, 2, 128, mx.float16),
    (2, 64, 128, 0, 32, mx.bfloat16),
    (3, 38, 1056, 4, 32, mx.bfloat16),
    (1, 9, 16416, 4, 32, mx.bfloat16),
    # In blocks.
    (2, 40, 256, "q4_k", 0, mx.bfloat16),
    (1, 12, 96, "q5_0", 0, mx.float32),
    (3, 22, 768, "q6_k", 0, mx.float16),
]
BLOCKS = SIZES[7:]


def arguments(sizes, *, scored, routed=True):
    """The call's arguments and what they must give."""
    tokens, C, F, bits, group, dtype = sizes
    rng = np.random.default_rng(C)
    down = Weight(*random_matrix(rng, (C, F), bits=bits, group=group, dtype=dtype))
    residual, gate, up = (random_array(rng, (tokens, n), dtype) for n in (C, F, F))
    experts = random_array(rng, (tokens, C), mx.float32)
    score = random_array(rng, (tokens, 1), dtype) if scored else None
    g, u = float64(gate), float64(up)
    shared = (g / (1 + np.exp(-g)) * u) @ dense(down).T
    factor = 1 / (1 + np.exp(-float64(score))) if scored else 1.0
    truth = float64(residual) + (float64(experts) if routed else 0.0) + factor * shared
    experts = experts if routed else None
    return (residual, experts, gate, up, down), {"score": score}, truth


def limit_of(args, options, truth):
    """Twice the error of stock MLX; one rounding of the result is no one's fault."""
    dtype = args[0].dtype
    half = 3e-7 if dtype == mx.float32 else float(mx.finfo(dtype).eps) / 2
    return max(2 * error(add_shared(*args, **options), truth), half * np.abs(truth).max())


@pytest.mark.parametrize(
    ("sizes", "scored"),
    [
        # By default in words and in blocks one without a score.
        pytest.param(
            sizes, scored, marks=[pytest.mark.slow] * (not scored and i not in (0, 8)),
            id=f"{'-'.join(map(str, sizes[:5]))}-{scored}",
        )
        for i, sizes in enumerate(SIZES)
        for scored in (False, True)
    ],
)  # fmt: skip
def test_agrees_with_float64(device, sizes, scored):
    args, options, truth = arguments(sizes, scored=scored)
    y = add_shared_fused(*args, **options)
    assert y.dtype == args[0].dtype
    assert error(y, truth) <= limit_of(args, options, truth)


@pytest.mark.parametrize("scored", usually([False, True], {1}))
@pytest.mark.parametrize("implementation", [add_shared, add_shared_fused, add_shared_dequantised])
def test_without_experts(device, implementation, scored):
    for sizes in (SIZES[1], SIZES[2]):
        args, options, truth = arguments(sizes, scored=scored, routed=False)
        limit = limit_of(args, options, truth)
        if implementation is add_shared_dequantised:
            limit *= 2  # the matrix is rounded too
        assert error(implementation(*args, **options), truth) <= limit


@pytest.mark.parametrize("scored", usually([False, True], {1}))
@pytest.mark.parametrize(
    "sizes", usually(SIZES, {2, 3, 4, 6, 7}), ids=lambda sizes: "-".join(map(str, sizes[:5]))
)
def test_apart_is_the_same_bits(device, sizes, scored):
    args, options, _ = arguments(sizes, scored=scored)
    results = [add_shared_fused(*args, **options, apart_from=n) for n in (1, 1 << 62)]
    assert mx.array_equal(*results).item()


def test_wrong_arguments():
    (residual, experts, gate, up, down), options, _ = arguments(SIZES[1], scored=True)
    for wrong in (
        (residual[:, :8], experts, gate, up, down),
        (residual, experts.astype(mx.float16), gate, up, down),
        (residual, experts, gate[:, :32], up, down),
        (residual, experts, gate, up.astype(mx.float16), down),
        (residual[:1], experts, gate, up, down),
    ):
        with pytest.raises(ShapeError):
            add_shared_fused(*wrong, **options)


def case(sizes, scored: bool, routed: bool = True, apart_from: int = APART) -> Case:
    args, options, truth = arguments(sizes, scored=scored, routed=routed)
    limit = limit_of(args, options, truth)
    name = f"{sizes[2]} wide{', scored' * scored}{', dense' * (not routed)}"
    name += ", apart" * (apart_from == 1)
    call = lambda: [add_shared_fused(*args, **options, apart_from=apart_from)]  # noqa: E731
    return Case(name, call, lambda: [truth], limit)


def together(case: Case) -> Case:
    """As on a GPU that few threadgroups fill: rows share a read."""
    within = functools.partial(patched, matvec, _launch, ENOUGH_GROUPS=1)
    return replace(case, name=f"{case.name}, together", within=within)


IN_TWO = [
    case(sizes, scored, apart_from=1)
    for sizes, scored in (
        (SIZES[1], True),
        (SIZES[0], False),
        (SIZES[6], False),
    )
]
CASES = {
    "shared_product": [*IN_TWO, together(case(SIZES[5], True, apart_from=1))],
    "add_products": IN_TWO,
    "add_shared": [
        *(case(sizes, on) for sizes in (SIZES[1], SIZES[5]) for on in (True, False)),
        case(SIZES[1], False, routed=False),
        case(SIZES[6], True),
        together(case(SIZES[5], True)),
    ],
    "add_shared_blocks": [
        *(case(sizes, on) for sizes, on in zip(BLOCKS, (True, False, True), strict=True)),
        case(BLOCKS[0], False, routed=False),
    ],
}
