"""Oracle: the three operations that it is composed of. Their fused implementations give
the same bits, their references in float32 the truth."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.errors import ShapeError, UnsupportedError
from mlx_moeflux.kernels.attention.append import append_row_fused
from mlx_moeflux.kernels.mla.head_product import HeadMatrices, head_product_fused
from mlx_moeflux.kernels.mla.latent_prepare import latent_prepare_fused
from mlx_moeflux.kernels.mla.latent_step import latent_step, latent_step_fused
from tests.kernels.harness import Case, emulated, usually

F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
FUSED = SimpleNamespace(
    latent_prepare=latent_prepare_fused,
    append_row=append_row_fused,
    head_product=head_product_fused,
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


def flat(result):
    q_latent, rotary, tail = result
    return [q_latent, rotary, *tail]


@pytest.mark.parametrize("sizes", usually(SIZES, {0, 1, 2}), ids=str)
def test_the_same_bits_as_step_by_step(device, sizes):
    args, options = arguments(*sizes)
    once = flat(latent_step_fused(*args, **options))
    composed = flat(latent_step(*args, **options, steps=FUSED))
    for a, b in zip(once, composed, strict=True):
        assert a.dtype == sizes[0]
        assert mx.array_equal(a, b).item()


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


CASES = {
    "latent_step": [case(SIZES[0]), case((F32, 1, 4, 64, 8, 40, 64, 63, 8, 64, False))],
}
