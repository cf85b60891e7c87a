"""Oracle: the specification of Metal's language, Apple's limits, and how MLX writes a text.

Each fault is planted into a kernel that passes, so that nothing but the fault is refused.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from tests.kernels.harness import emulated, patched, require, scratch_kernel
from tests.kernels.metal import lint, prelude
from tests.kernels.metal.emulator import Emulator

FUNCTIONS = """template <typename T>
inline T doubled(T x) {
return T(2.0f * float(x));
}
template <typename T>
inline void reversed(const device T* x, threadgroup T* s, device T* y, uint i) {
s[i] = doubled(x[i]);
threadgroup_barrier(mem_flags::mem_threadgroup);
y[i] = s[31 - i];
}
"""
BODY = """
threadgroup T s[32], other[N][4];
uint i = thread_position_in_grid.x;
reversed(x, s, y, i);
"""


@pytest.fixture(autouse=True)
def _clang():
    require(lint.missing(), "MOEFLUX_REQUIRE_EMULATOR")


def variant(
    functions=FUNCTIONS, body=BODY, *, more=(), number="N", size=32, threads=32, dtype=mx.bfloat16
):
    """The text of one launch; more: names of inputs that nothing reads; number: of a parameter."""
    kernel = scratch_kernel("linted", inputs=("x", *more), outputs=("y",), body=body)
    seen = []
    with (
        patched(Emulator, pads_inputs=False),
        emulated(
            inspect=seen.append,
            runs=False,
            rewrite=lambda _, header, body: (header + functions, body),
        ),
    ):
        kernel(
            mx.ones((size,), dtype),
            *(mx.ones((32,)) for _ in more),
            template={"T": dtype, number: 3},
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(32,)],
            output_dtypes=[dtype],
        )
    assert len(seen) == 1
    # A launch of too many threads is refused before there is a text.
    return replace(seen[0], threads=threads)


def with_line(line):
    """The kernel with one more definition, that it does not use."""
    return {"functions": f"{FUNCTIONS}{line}\n"}


def instead(old, new):
    """The kernel with another line in its place."""
    assert FUNCTIONS.count(old) + BODY.count(old) == 1
    return {"functions": FUNCTIONS.replace(old, new), "body": BODY.replace(old, new)}


def arrays(n):
    return {"more": [f"x{i}" for i in range(n - 2)]}


# Counters, and what is done with one.
COUNTERS = "threadgroup atomic_uint counters[8]; {}"
SET = "atomic_store_explicit(counters, 0, memory_order_relaxed);"
ADD = "atomic_fetch_add_explicit(counters + 1, 2, memory_order_relaxed);"
GET = "y[0] = T(float(atomic_load_explicit(counters, memory_order_relaxed)));"

GOOD = {
    "float": {"dtype": mx.float32},
    "half": {"dtype": mx.float16},
    "bfloat": {},
    "384 threads": {"threads": 384},
    "31 buffers": arrays(31),
    # 64 bytes of s and 48 of other, and the rest.
    "32 KB": {"body": f"threadgroup float most[{(32768 - 64 - 32) // 4}]; {BODY}"},
    "a function with another name": with_line("inline float fragments(float x) { return x; }"),
    "8 elements": {"size": 8},
    "counters": {"body": BODY + COUNTERS.format(SET + ADD + GET)},
}


@pytest.mark.parametrize("what", GOOD)
def test_a_good_text_passes(what):
    assert lint.problems(variant(**GOOD[what])) == []


FAULTS = {
    "a reserved name": (
        with_line("inline float fragment(float x) { return x; }"),
        "'fragment' is a reserved word of Metal",
    ),
    "a reserved name as a variable": (
        instead("uint i =", "uint vertex = 0; uint i ="),
        "'vertex' is a reserved word of Metal",
    ),
    "a name of the library": (
        with_line("inline float clamp(float x) { return x; }"),
        "'clamp' is a name of metal_stdlib",
    ),
    "a namespace of the library": (
        with_line("struct fast { float x; };"),
        "'fast' is a name of metal_stdlib",
    ),
    "a name of MLX's prelude": (
        with_line("inline int ceildiv(int x, int y) { return x / y; }"),
        "'ceildiv' is a name of mlx",
    ),
    "a definition in namespace metal": (
        with_line("namespace metal { inline float ours(float x) { return x; } }"),
        "'metal::ours' is defined in a namespace of Metal's",
    ),
    "a macro of the library as a template parameter": (
        {"number": "MAXFLOAT", "body": BODY.replace("[N]", "[MAXFLOAT]")},
        "the template's 'MAXFLOAT' is a name of metal_stdlib",
    ),
    "a missing address space": (
        # clang takes it: its pointers are generic if nothing is said.
        with_line("inline float first(const float* p) { return p[0]; }"),
        "a pointer or reference without address space",
    ),
    "a wrong address space": (
        instead("threadgroup T* s, ", "device T* s, "),
        "no matching function for call to 'reversed'",
    ),
    "an implicit bfloat": (
        instead("T(2.0f * float(x))", "2.0f * float(x)"),
        "no viable conversion from returned value of type 'float' to function return type "
        "'lint::bfloat'",
    ),
    "a bfloat as a bool": (
        instead("T(2.0f * float(x))", "!x ? x : T(0.0f)"),
        "attempt to use a deleted function",
    ),
    "a 16-bit function": (
        instead("2.0f * float(x)", "metal::exp(x)"),
        "'exp' is unavailable: it rounds to 16 bits",
    ),
    "a counter as a number": (
        {"body": BODY + COUNTERS.format("uint n = counters[0];")},
        "no viable conversion from '__local lint::atomic_uint'",
    ),
    "a number as a counter": (
        {"body": BODY + ADD.replace("counters + 1", "s")},
        "no matching function for call to 'atomic_fetch_add_explicit'",
    ),
    "C++17": (
        instead("y[i] =", "if constexpr (sizeof(T) == 2) y[i] ="),
        "constexpr if is incompatible with C++ standards before C++17",
    ),
    "a structured binding": (
        with_line(
            "struct two { int a, b; };\ninline int sum(two x) { auto [a, b] = x; return a; }"
        ),
        "decomposition declarations are incompatible with C++ standards before C++17",
    ),
    "a double": (
        with_line("inline float wide(float x) { double y = x; return y; }"),
        "double: inline float wide",
    ),
    "a literal of type double": (
        instead("2.0f * float(x)", "2.0 * float(x)"),
        "a literal of type double",
    ),
    "a long double": (
        instead("2.0f * float(x)", "2.0L * float(x)"),
        "a literal of type double",
    ),
    "recursion": (
        with_line("inline int factorial(int n) { return n < 2 ? 1 : n * factorial(n - 1); }"),
        "recursion: 'factorial' calls itself",
    ),
    "recursion through another": (
        with_line(
            "inline int odd(int n);\n"
            "inline int is_even(int n) { return n == 0 ? 1 : odd(n - 1); }\n"
            "inline int odd(int n) { return n == 0 ? 0 : is_even(n - 1); }"
        ),
        "recursion: 'is_even' calls itself",
    ),
    "33 KB of threadgroup memory": (
        {"body": f"threadgroup float most[33 * 256]; {BODY}"},
        "too much threadgroup memory",
    ),
    "16 bytes too much threadgroup memory": (
        {"body": f"threadgroup float most[{(32768 - 64 - 16) // 4}]; {BODY}"},
        "too much threadgroup memory",
    ),
    "32 buffers": (arrays(32), "32 buffers, Metal has 31"),
    "640 threads": ({"threads": 640}, "640 threads in a threadgroup, at most 384 here"),
    "a small input": ({"size": 7}, "'x' has fewer than 8 elements"),
    "a single number": ({"size": 1}, "no matching function for call to 'reversed'"),
    "no thread attribute": (
        instead("thread_position_in_grid.x", "0"),
        "the body names no thread attribute",
    ),
    "an attribute that is not passed on": (
        instead("s[31 - i]", "s[31 - thread_index_in_simdgroup]"),
        "use of undeclared identifier 'thread_index_in_simdgroup'",
    ),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_planted_fault_is_refused(what):
    options, reason = FAULTS[what]
    found = lint.problems(variant(**options))
    assert any(reason in problem for problem in found), found


# What no model of the prelude knows.
CLASHES = {
    "a function of the prelude": (
        with_line("inline float log1p(float x) { return x; }"),
        "redefinition of 'log1p'",
    ),
    "a template of the prelude": (
        with_line("template <typename T, typename U> inline T ceildiv(T x, U y) { return x / y; }"),
        "redefinition of 'ceildiv'",
    ),
    "a class of the prelude": (
        with_line("template <typename T> struct WorkPerThread { T x; };"),
        "redefinition of 'WorkPerThread'",
    ),
    "a function of the prelude as a variable": (
        with_line("constant int elem_to_loc = 3;"),
        "redefinition of 'elem_to_loc' as different kind of symbol",
    ),
    "a macro of the prelude": (
        instead("uint i =", "uint MTL_CONST = 0; uint i ="),
        "expected unqualified-id",
    ),
    "a macro of the prelude with arguments": (
        with_line("inline float instantiate_float_limit(float x) { return x; }"),
        "expected",
    ),
    "a call that an overload of the prelude makes ambiguous": (
        {
            **with_line("inline float log1p(half x) { return float(x); }"),
            "body": BODY + "y[0] = T(log1p(1));",
        },
        "call to 'log1p' is ambiguous",
    ),
    "a call with two overloads of the prelude": (
        {
            **with_line(
                "template <typename T>\ninline T simd_shuffle_and_fill_up(T x, long y, int n) {\n"
                "return x;\n}"
            ),
            "body": BODY + "y[0] = T(float(simd_shuffle_and_fill_up(1l, size_t(1), 1)));",
        },
        "call to 'simd_shuffle_and_fill_up' is ambiguous",
    ),
}


@pytest.mark.parametrize("version", lint.ENDS)
@pytest.mark.parametrize("what", CLASHES)
def test_a_clash_with_mlx_s_prelude_is_refused(what, version):
    require(prelude.missing(), "MOEFLUX_REQUIRE_EMULATOR")
    options, reason = CLASHES[what]
    planted = variant(**options)
    found = lint.compile_errors(planted, [version])
    assert any(reason in problem for problem in found), found
    assert lint.clang_errors(lint.whole_text(planted), version, lint.MODEL) == ()


@pytest.mark.parametrize("what", GOOD)
def test_a_good_text_passes_behind_the_model(what):
    """Which stands for the prelude where that cannot be had."""
    text = lint.whole_text(variant(**GOOD[what]))
    assert lint.clang_errors(text, before=lint.MODEL) == ()


def test_the_prelude_stands_before_each_text():
    require(prelude.missing(), "MOEFLUX_REQUIRE_EMULATOR")
    assert lint.known_prelude() == prelude.text()
    assert lint.clang_errors("inline int half_of(int x) { return ceildiv(x, 2); }") == ()


def test_without_the_prelude_its_model_is_there(monkeypatch):
    monkeypatch.setattr(prelude, "missing", lambda: "no network")
    assert lint.known_prelude.__wrapped__() == lint.MODEL


def test_the_version_is_that_of_the_language():
    text = 'static_assert(__METAL_VERSION__ == {}, "another version");'
    for version, number in (("3.1", 310), ("3.2", 320), ("4.0", 400)):
        assert lint.clang_errors(text.format(number), version, lint.MODEL) == ()
        assert lint.clang_errors(text.format(number + 1), version, lint.MODEL)


def test_a_prelude_that_uses_more_than_is_declared_is_an_error():
    with pytest.raises(ValueError, match=r"1 errors, .*'newer'.*; declare in lint\.h what it uses"):
        lint.clang_errors("", before=f"{lint.MODEL}typedef metal::newer newer_t;\n")


def test_names_of_mlx_are_those_of_its_prelude():
    require(prelude.missing(), "MOEFLUX_REQUIRE_EMULATOR")
    library = {name for name, whose in lint.metal_names().items() if whose == "metal_stdlib"}
    known = lint.metal_names().keys() - library
    for version in prelude.LANGUAGES:
        assert names_in(lint.for_clang(prelude.text()), version) - library == known


def names_in(text, version):
    """What a text defines for all that stands behind it, but for Metal's internal names."""
    from clang.cindex import CursorKind, Index, TranslationUnit

    unit = Index.create().parse(
        "prelude.clcpp",
        args=lint.clang_arguments(version),
        unsaved_files=[("prelude.clcpp", text)],
        options=TranslationUnit.PARSE_DETAILED_PROCESSING_RECORD,
    )
    found = set()

    def visit(cursor):
        for each in cursor.get_children():
            if each.location.file is None or each.location.file.name != "prelude.clcpp":
                continue
            if each.kind.is_declaration() or each.kind == CursorKind.MACRO_DEFINITION:
                found.add(each.spelling.partition("<")[0])
            # What is in another namespace is not in the way.
            if each.kind == CursorKind.NAMESPACE and each.spelling != "mlx":
                visit(each)

    visit(unit.cursor)
    return {n for n in found if n and not n.startswith(("__metal_", "operator"))}


TYPES = ("half", "bfloat", "uint", "ushort", "uchar", "ulong", "size_t", "uint8_t", "int64_t")


@pytest.mark.parametrize("word", sorted({*lint.RESERVED, *TYPES, "device", "thread", "constant"}))
def test_reserved_words_name_nothing(word):
    function = variant(**with_line(f"inline float {word}(float x) {{ return x; }}"))
    local = variant(**instead("uint i =", f"float {word} = 0; uint i ="))
    assert lint.problems(function)
    assert lint.problems(local)
    if word in ("vertex", "fragment", "kernel", *TYPES):
        assert lint.compile_errors(function)
        assert lint.compile_errors(local)


def test_known_names_are_two_sorted_lists():
    lines = lint.NAMES.read_text("ascii").splitlines()
    lines = [line for line in lines if not line.startswith("#")]
    first, second = (i for i, line in enumerate(lines) if line.startswith("["))
    assert (lines[first], lines[second]) == ("[metal_stdlib]", "[mlx]")
    library, prelude = lines[first + 1 : second], lines[second + 1 :]
    assert library == sorted(set(library))
    assert prelude == sorted(set(prelude))
    assert {"clamp", "fast", "simd_sum", "float4", "INFINITY"} <= set(library)
    assert {"elem_to_loc", "Limits", "instantiate_kernel"} <= set(prelude)


@pytest.mark.parametrize(
    "line",
    [
        "inline float mix(float x) { return x; }",
        "template <typename T> struct mix { T x; };",
        "#define mix(x) x",
        "using mix = float;",
        "typedef float mix;",
        "constant int mix = 3;",
    ],
)
def test_every_kind_of_definition_is_seen(line):
    found = lint.problems(variant(**with_line(line)))
    assert "'mix' is a name of metal_stdlib" in found
    assert lint.problems(variant(**with_line(line.replace("mix", "mixed")))) == []
