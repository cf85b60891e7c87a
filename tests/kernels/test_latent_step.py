"""Oracle: the three operations that it is composed of. Their fused forms give the same bits, their
references in float32 the truth."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.errors import ShapeError, UnsupportedError
from mlx_moeflux.kernels import latent_step as module
from mlx_moeflux.kernels.append import append_row_fused
from mlx_moeflux.kernels.heads import HeadMatrices, head_product_fused
from mlx_moeflux.kernels.latent_prepare import latent_prepare_fused
from mlx_moeflux.kernels.latent_step import Queries, latent_step, latent_step_fused
from mlx_moeflux.kernels.metal import most_threads
from mlx_moeflux.kernels.project import Weight, project_fused
from tests.kernels.forms import in_float32
from tests.kernels.harness import Case, emulated, launched, patched

F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
FUSED = SimpleNamespace(
    latent_prepare=latent_prepare_fused,
    append_row=append_row_fused,
    head_product=head_product_fused,
    project=project_fused,
)
# dtype, B, H, Dn, Dr, R, rows of a tail, position, bits (0: floats), group, interleaved
SIZES = [
    (F32, 2, 3, 32, 16, 24, 16, 35, 4, 32, True),
    (BF16, 1, 4, 64, 8, 40, 64, 63, 8, 64, False),
    (F16, 3, 5, 64, 24, 16, 32, 64, 0, 32, True),
    (BF16, 1, 9, 128, 64, 128, 64, 2, 4, 64, True),
    (F32, 1, 2, 32, 64, 16, 64, 5, 4, 32, True),
]


def arguments(dtype, B, H, Dn, Dr, R, rows, position, bits, group, interleaved):
    mx.random.seed(Dn)
    draw = lambda *shape: mx.random.normal(shape).astype(dtype)  # noqa: E731
    weight, block = 0.2 * draw(H, R + 3, Dn), (1, R)
    parts, spec = (weight, None, None), None
    if bits:
        parts, spec = mx.quantize(weight, group_size=group, bits=bits), QuantSpec(bits, group)
    frequencies = 1e4 ** (-mx.arange(0, Dr, 2) / Dr)
    options = {"norm": draw(R), "eps": 1e-5, "frequencies": frequencies, "factor": 1.3}
    options |= {"position": mx.array([position], dtype=mx.int32), "interleaved": interleaved}
    options["offset"] = mx.array([position - b for b in range(B)], dtype=mx.int32)
    tail = draw(B, 1, rows, R), draw(B, 1, rows, Dr)
    args = draw(B, 1, H, Dn + Dr), draw(B, 1, R + Dr), tail, HeadMatrices(*parts, spec, *block)
    return args, options


DEEPSEEK = (BF16, 1, 2, 128, 64, 512, 64, 2, 4, 64, True)
# Of the matrix that makes queries: width, bits (0: floats), group; by SIZES, with one sequence.
MADE = [
    ((F32, 1, 3, 32, 16, 24, 16, 35, 4, 32, True), (1536, 4, 64)),
    ((BF16, 1, 4, 64, 32, 40, 64, 63, 8, 64, False), (1568, 8, 32)),
    ((F16, 1, 5, 64, 24, 16, 32, 64, 0, 32, True), (1600, 0, 32)),
    (DEEPSEEK, (1536, 4, 64)),
    ((BF16, 1, 2, 32, 16, 64, 16, 7, 4, 32, False), (1984, 4, 32)),
]


class Called:
    """A module that stands for a matrix."""

    weight = scales = spec = None

    def __init__(self, own: Weight):
        self.own = own


def project_either(x, weights, **options):
    return project_fused(x, [getattr(w, "own", w) for w in weights], **options)


STEPS = SimpleNamespace(**{**vars(FUSED), "project": project_either})


def any_heads():
    return patched(module, HEADS=range(1, 1 << 16))


def with_queries(sizes, made):
    """Arguments of `sizes` with rows of another width, and what makes queries of them."""
    (q, *rest), options = arguments(*sizes)
    (width, bits, group), (B, _, H, D) = made, q.shape
    draw = lambda *shape: mx.random.normal(shape).astype(q.dtype)  # noqa: E731
    weight = width**-0.5 * draw(H * D, width)
    parts = mx.quantize(weight, group_size=group, bits=bits) if bits else (weight,)
    weight = Weight(*parts, spec=QuantSpec(bits, group) if bits else None)
    queries = Queries(weight, draw(width), 1e-4)
    return (draw(B, 1, width), *rest), options | {"queries": queries}


def flat(result):
    q_latent, rotary, tail = result
    return [q_latent, rotary, *tail]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_same_bits_as_step_by_step(device, sizes):
    args, options = arguments(*sizes)
    once = flat(latent_step_fused(*args, **options))
    composed = flat(latent_step(*args, **options, steps=FUSED))
    for a, b in zip(once, composed, strict=True):
        assert a.dtype == sizes[0]
        assert mx.array_equal(a, b).item()


@pytest.mark.parametrize(("sizes", "made"), MADE, ids=str)
def test_queries_made_in_the_same_launch_have_the_same_bits(device, sizes, made):
    args, options = with_queries(sizes, made)
    with any_heads(), launched() as names:
        once = flat(latent_step_fused(*args, **options, steps=FUSED))
    # DeepSeek's heads need 24 simdgroups.
    one = sizes is not DEEPSEEK or most_threads() >= 768
    assert names == (["latent_step_queries"] if one else ["project_1", "latent_step"])
    composed = flat(latent_step(*args, **options, steps=FUSED))
    for a, b in zip(once, composed, strict=True):
        assert a.dtype == sizes[0]
        assert mx.array_equal(a, b).item()


def test_queries_made_by_24_simdgroups_have_the_same_bits():
    with emulated(name="cuda"):
        test_queries_made_in_the_same_launch_have_the_same_bits("emulator", DEEPSEEK, MADE[3][1])


def test_queries_that_take_a_launch_of_their_own(device):
    """Several sequences; narrow rows; modules in the place of a matrix."""
    two = (F32, 2, *MADE[0][0][2:])
    applied = lambda queries: replace(queries, weight=Called(queries.weight))  # noqa: E731
    for sizes, made, changed in (
        (two, (1536, 4, 64), lambda queries: queries),
        (MADE[0][0], (1024, 4, 64), lambda queries: queries),
        (MADE[0][0], (1536, 4, 64), applied),
    ):
        args, options = with_queries(sizes, made)
        composed = flat(latent_step(*args, **options, steps=FUSED))
        options["queries"] = changed(options["queries"])
        with any_heads(), launched() as names:
            once = flat(latent_step_fused(*args, **options, steps=STEPS))
        assert len(names) == 2
        assert names[-1] == "latent_step"
        for a, b in zip(once, composed, strict=True):
            assert mx.array_equal(a, b).item()


def test_heads_that_fill_a_gpu():
    args, options = with_queries(*MADE[0])
    for name, heads, made in (("cuda", 64, 0), ("cuda", 128, 1), ("cuda", 129, 0), ("metal", 4, 1)):
        rows = mx.zeros((heads * 48, 1536))
        with emulated(name=name):
            queries = replace(options["queries"], weight=Weight(rows))
            assert (module._made(args[0], queries, heads) is not None) == made


def test_what_does_not_fit():
    (q, kv, tail, matrices), options = arguments(*SIZES[0])
    for args, changed in (
        ((q[:, :, :2], kv, tail, matrices), {}),
        ((q[..., :-8], kv, tail, matrices), {}),
        ((mx.concatenate([q, q], axis=1), kv, tail, matrices), {}),
        ((q, kv[..., :-4], tail, matrices), {}),
        ((q, kv.astype(F16), tail, matrices), {}),
        ((q, kv, (tail[0], tail[1][:, :, :8]), matrices), {}),
        ((q, kv, tail, matrices), {"frequencies": options["frequencies"][:3]}),
        ((q, kv, tail, matrices), {"position": mx.array([3])[None].astype(mx.uint32)}),
    ):
        with pytest.raises(ShapeError), emulated():
            latent_step_fused(*args, **options | changed)
    with pytest.raises(UnsupportedError), emulated():
        latent_step_fused(q, kv, tail, matrices, **options, transposed=True)


def case(sizes):
    args, options = arguments(*sizes)
    expected = flat(latent_step(*args, **options))
    largest = max(float(mx.abs(x).max()) for x in expected)
    return Case(
        str(sizes),
        lambda: flat(latent_step_fused(*args, **options)),
        lambda: expected,
        3e-6 * largest,
    )


def case_with_queries(sizes, made):
    args, options = with_queries(sizes, made)
    expected = flat(latent_step(*args, **options))
    if sizes[0] != F32:
        exact, others = in_float32(args), in_float32(options)
        expected = flat(latent_step(*exact, **others))
    largest = max(float(mx.abs(x).max()) for x in expected)
    return Case(
        f"{sizes} {made}",
        lambda: flat(latent_step_fused(*args, **options)),
        lambda: expected,
        (3e-6 if sizes[0] == F32 else 4e-3) * largest,
        within=any_heads,
    )


CASES = {
    "latent_step": [case(SIZES[0]), case((F32, 1, 4, 64, 8, 40, 64, 63, 8, 64, False))],
    "latent_step_queries": [
        case_with_queries(*MADE[0]),
        case_with_queries((F32, 1, 4, 64, 32, 40, 64, 63, 8, 64, False), (1568, 8, 32)),
        case_with_queries(*MADE[2]),
    ],
}
ARRAY = "the length of a thread's array, which nobody checks"
WHOLE = "a simdgroup has two rows at least, and RANK rows are whole simdgroups' work"
EQUIVALENT = {
    "latent_step.metal": {
        "step_of_head: off by one if (row < RANK) -> + 1 <": WHOLE,
        "step_of_head: off by one if (row < RANK) -> + 1 < (2)": WHOLE,
        "step_of_head: swapped arguments 1 and 2 of narrow_steps: ROWS, DN": "a product",
        "step_of_head: swapped arguments 2 and 3 of narrow_steps: DN, N": ARRAY,
        "step_of_head: swapped arguments 1 and 2 of part_of_rows: OWN, M": "all rows at a time",
        "step_of_head: swapped arguments 2 and 3 of share: LOW_N, PARTS": "divided by both",
        "step_of_tail: off by one i < packs -> <=": "other_rows looks where it ends",
        "step_of_tail: off by one ne, packs = TAIL * (RANK > DR ? RANK : DR) / N -> >=": "the same "
        "where both are equal",
    },
}
