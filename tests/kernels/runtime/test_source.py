"""Oracle: small files written here, whose parts are known."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.runtime import source
from mlx_moeflux.kernels.runtime.launcher import KERNELS, MetalKernel, NoBackend, set_backend
from tests.kernels.harness import emulated, error, scratch_kernel

FILE = """
// A comment with { and ; in it.
#define TWICE(x) \\
  ((x) + (x))
template <typename T, int N>
struct box {
  T at[N];
};
inline float leaf(float x) {
  return TWICE(x); /* not ; here */
}
inline float other(float x) {
  return x;
}
#ifdef MOEFLUX_CUDA
inline float both(const device float* p) {
  return other(p[0]);
}
#else
inline float both(const device float* p) {
  return leaf(p[0]);
}
#endif
inline float both(const threadgroup float* p) {
  return p[0];
}
namespace metal { inline float exp(float x) { return x; } }
"""


def parts(cuda):
    text = source.strip(source.resolve_conditionals(FILE, cuda=cuda))
    return [source.definition(chunk) for chunk in source.split(text)]


def names(texts):
    return [source.definition(text).name for text in texts]


def test_files_fall_into_named_definitions():
    assert [d.name for d in parts(False)] == [
        "TWICE", "box", "leaf", "other", "both", "both", "metal::exp",
    ]  # fmt: skip


def test_only_what_a_body_uses_is_taken_each_after_what_it_uses():
    assert names(source.closure("y[0] = both(x);", parts(False))) == [
        "TWICE", "leaf", "both", "both",
    ]  # fmt: skip
    assert names(source.closure("y[0] = both(x);", parts(True))) == ["other", "both", "both"]
    assert names(source.closure("y[0] = metal::exp(x[0]);", parts(False))) == ["metal::exp"]
    assert source.closure("y[0] = behind(x[0]);", parts(False)) == []


def test_definitions_that_become_equal_are_one():
    bare = [source.definition(source.without_address_spaces(d.text)) for d in parts(True)]
    same = "inline float both(const float* p) {\nreturn p[0];\n}"
    assert source.closure("both(x)", [*bare, source.definition(same)]).count(same) == 1


@pytest.mark.parametrize(
    ("metal", "cuda"),
    [
        ("const device float* p", "const float* p"),
        ("threadgroup float a[4], b[5];", "__shared__ alignas(16) float a[4], b[5];"),
        ("{ threadgroup pack<T, 4> a[8];", "{ __shared__ alignas(16) pack<T, 4> a[8];"),
        ("f(const threadgroup float* p)", "f(const float* p)"),
        ("threadgroup_barrier(x); thread_index_in_simdgroup", None),
        ("constant float table[2] = {1, 2};", "__constant__ float table[2] = {1, 2};"),
    ],
)
def test_address_spaces_vanish(metal, cuda):
    assert source.without_address_spaces(metal) == (metal if cuda is None else cuda)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("#ifdef OTHER\n#endif", "may only ask for MOEFLUX_CUDA"),
        ("#ifdef MOEFLUX_CUDA\nint a;", "no #endif"),
    ],
)
def test_conditionals_are_simple(text, message):
    with pytest.raises(ValueError, match=message):
        source.resolve_conditionals(text, cuda=False)


def test_unfinished_files_are_refused():
    with pytest.raises(ValueError, match="unfinished definition"):
        source.split("inline float f() { return 0; ")


@pytest.mark.parametrize(
    ("body", "aligned"),
    [
        ("threadgroup float a[4], b[5];", "alignas(16) threadgroup float a[4], b[5];"),
        ("{ threadgroup pack<T, 4> a[8][N]; }", "{ alignas(16) threadgroup pack<T, 4> a[8][N]; }"),
        ("x; threadgroup T a[2];", "x; alignas(16) threadgroup T a[2];"),
        ("f((threadgroup float*)p, q[0]);", "f((threadgroup float*)p, q[0]);"),
    ],
)
def test_arrays_are_aligned_on_metal(body, aligned):
    """In front: clang takes no alignas behind an address space."""
    assert source.metal_text("common.metal", body)[1] == aligned


def test_attributes_are_constants_on_cuda():
    body = "y[thread_position_in_grid.x] = float(thread_index_in_simdgroup);"
    _, text = source.cuda_text("common.metal", body)
    assert text.count("const uint3 thread_position_in_grid =") == 1
    assert text.count("const uint thread_index_in_simdgroup =") == 1
    assert "simdgroup_index_in_threadgroup" not in text


# ---- The class


def test_two_kernels_may_not_share_a_name():
    options = {"file": "common.metal", "inputs": ("x",), "outputs": ("y",), "body": "y[0] = x[0];"}
    MetalKernel("twice", **options)
    try:
        with pytest.raises(ValueError, match="two kernels are called 'twice'"):
            MetalKernel("twice", **options)
    finally:
        del KERNELS["twice"]


KERNEL = scratch_kernel(
    "shaped",
    inputs=("x",),
    outputs=("y",),
    body="uint i = thread_position_in_grid.x; y[i] = x[0] + x_shape[0];",
)


def launch(x, grid=(32, 1, 1), template=None):
    options = {"grid": grid, "threadgroup": (32, 1, 1), "template": template}
    return KERNEL(x, **options, output_shapes=[(32,)], output_dtypes=[mx.float32])[0]


def test_launches_are_checked():
    with emulated():
        assert error(launch(mx.ones((9,))), mx.full((32,), 10.0)) == 0
        with pytest.raises(ShapeError, match="not divisible by threadgroup"):
            launch(mx.ones((9,)), grid=(40, 1, 1))
        with pytest.raises(ShapeError, match="'x' has 7 elements"):
            launch(mx.ones((7,)))
        with pytest.raises(ShapeError, match="holds -1; MLX takes no negative number"):
            launch(mx.ones((9,)), template={"N": 3, "M": -1})


def test_back_ends_may_change_between_launches():
    with emulated():
        launch(mx.ones((9,)))
        inner = set_backend(NoBackend())
        with pytest.raises(RuntimeError, match="needs a GPU"):
            launch(mx.ones((9,)))
        set_backend(inner)
        assert launch(mx.ones((9,)))[0].item() == 10
