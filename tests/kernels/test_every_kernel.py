"""Oracle: each kernel's reference, and the rules for Metal texts, for every registered kernel."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_moeflux.kernels
from mlx_moeflux.kernels.runtime import source
from mlx_moeflux.kernels.runtime.launcher import KERNELS
from tests.kernels.cases import all_cases, kernels, registered, texts, variants
from tests.kernels.harness import emulated, require, scratch_kernel
from tests.kernels.metal import cuda, lint, prelude

# On Metal MLX builds and hashes the text at each call that it does not trace (4 KB: some 2 us); on
# NVIDIA it lies in files. The longest is two launches in one: it reads experts in blocks, and adds
# the shared one. But matrices that one launch multiplies may all be stored in different ways.
MOST_BYTES, MOST_BYTES_MIXED = 17_000, 26_500
FILES = sorted(Path(mlx_moeflux.kernels.__path__[0]).rglob("*.metal"))
NAMES = sorted(kernels())
# Of kernels that one function writes for each number of matrices and results, by default these.
ALIKE = re.compile(r"project(_rows|_blocks)?(_\d)+(_normed|_joined)?")
USUAL = {
    "project_2",
    "project_2_2_joined",
    "project_rows_2_2_normed",
    "project_blocks_1_1_1_joined",
}


def slow_of(name: str) -> list[pytest.MarkDecorator]:
    """Marks of the tests of a kernel."""
    return [pytest.mark.slow] * (ALIKE.fullmatch(name) is not None and name not in USUAL)


NAMED = [pytest.param(name, marks=slow_of(name)) for name in NAMES]
# Each is a text that the emulator compiles: by default one of every kernel.
CASES_OF = [
    pytest.param(
        name, case, id=f"{name}-{case.name}", marks=[pytest.mark.slow] if i else slow_of(name)
    )
    for name, cases in sorted(all_cases().items())
    for i, case in enumerate(cases)
]


def test_every_kernel_has_cases():
    assert registered(), "no kernel is registered"
    lacking, unknown = set(NAMES) - set(all_cases()), set(all_cases()) - set(NAMES)
    assert not lacking, f"no test module has CASES of {sorted(lacking)}"
    assert not unknown, f"CASES of {sorted(unknown)}, which are no kernels"


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("name", "case"), CASES_OF)
def test_case(name, case, device):
    if device == "emulator" and case.partly_written:
        with emulated(partly_written=case.partly_written):
            case.check()
    else:
        case.check()


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_files_keep_to_the_subset(file):
    assert lint.text_problems(file.read_text("utf-8")) == []


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.slow
def test_text_is_short_and_uses_an_attribute(name):
    for header, body in texts(name):
        assert (header + body).isascii()
        most = MOST_BYTES_MIXED if name.startswith("project_blocks_1_1") else MOST_BYTES
        assert len(header) + len(body) <= most
        assert any(attribute in body for attribute in source.ATTRIBUTES)


@pytest.mark.parametrize(
    "every",
    [pytest.param(True, id="every", marks=pytest.mark.slow), pytest.param(False, id="last")],
)
@pytest.mark.parametrize("name", NAMED)
def test_metal_would_take_it(name, every):
    """Each text of its cases, which differ in the arguments of a template, in each version of the
    language; by default the last: GCC compiles the first for the emulator."""
    require(lint.missing(), "MOEFLUX_REQUIRE_EMULATOR")
    assert name in all_cases(), f"no test module has CASES of '{name}'"
    texts = variants(name)
    assert texts, f"no case of '{name}' launches it"
    versions = prelude.LANGUAGES if every else lint.ENDS
    for variant in texts if every else texts[-1:]:
        assert lint.problems(variant, versions) == [], (variant.template, variant.threads)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_cuda_text_compiles(name):
    require(cuda.missing(), "MOEFLUX_REQUIRE_NVCC")
    for variant in {(v.kernel.name, v.template): v for v in variants(name)}.values():
        errors, resources = cuda.compile_unit(cuda.unit(variant))
        assert not errors, errors[:3000]
        assert "spill" not in resources, resources


# ---- The checks themselves

BAD_TEXTS = {
    "inline float f(const float* p) { return p[0]; }": "without address space",
    "inline float f(thread tile_a<T, 3>& a, foo<T, 2>& b) { return 0; }": "without address space",
    "inline float f(float x) { return (*(float*)&x); }": "without address space",
    "inline float f(device float *p) { return p[0]; }": "beside its type",
    "inline float f(float x) { return 2.0 * x; }": "double",
    "inline float f(float x) { return 1e3 * x; }": "double",
    "inline float f(float x) { return exp(x); }": "metal::exp",
    "inline float f(double x) { return 0; }": "double",
    "#include <metal_stdlib>": "'#include' is none of",
    "// caf\u00e9": "ASCII",
}
GOOD = """
inline float f(const device float* p, thread tile_a<T, 3>& a, uint n, float s) {
  const threadgroup pack<T, 4>* q = (const threadgroup pack<T, 4>*)p;
  return n * 2 && s > 1.5e-3f ? metal::exp(p[0] * s) : 0.5f;
}
"""


def test_the_textual_lint_finds_what_it_looks_for():
    assert lint.text_problems(GOOD) == []
    for text, word in BAD_TEXTS.items():
        problems = lint.text_problems(text)
        assert any(word in p for p in problems), (text, problems)


ADDRESSES = {
    "load_pack<4>(x).at[0]": True,
    "[](const device float* p) { return p[0]; }(x)": True,
    "[](const threadgroup float* p) { return p[0]; }(x)": False,
    "[](const constant float* p) { return p[0]; }(x)": False,
    "*(const threadgroup float*)x": False,
}


@pytest.mark.parametrize("expression", ADDRESSES)
@pytest.mark.parametrize("size", [1, 7, 8])
def test_clang_finds_wrong_address_spaces(expression, size):
    """Inputs of every size arrive as `device` pointers, because the class pads them."""
    require(lint.missing(), "MOEFLUX_REQUIRE_EMULATOR")
    kernel = scratch_kernel(
        "spaces",
        inputs=("x",),
        outputs=("y",),
        body=f"y[thread_position_in_grid.x] = {expression};",
    )
    seen = []
    with emulated(inspect=seen.append, runs=False):
        kernel(
            mx.ones((size,)),
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(32,)],
            output_dtypes=[mx.float32],
        )
    errors = lint.problems(seen[0])
    assert (errors == []) == ADDRESSES[expression], errors


def test_scratch_kernels_are_not_registered():
    assert not any(name.startswith("scratch_") for name in KERNELS)
