"""What GCC lets pass and Metal's compiler does not.

:func:`problems` has clang compile MLX's whole text as C++ for OpenCL, whose address spaces have the
rules of Metal's, and checks what clang does not know: Metal's reserved words and the names of its
library, recursion, and the limits of a launch. :func:`text_problems` reads a .metal file: it needs
no compiler.

The whole text begins with MLX's prelude (:mod:`~tests.kernels.metal.prelude`), or with a model of
it where that cannot be had. lint.h declares what both and the kernels use of Metal's library:
Metal's compiler may refuse more.
"""

from __future__ import annotations

import functools
import re
import shlex
import tempfile
from collections.abc import Collection
from pathlib import Path

from mlx_moeflux.kernels.runtime import source
from tests.kernels.metal import prelude
from tests.kernels.metal.variant import Variant

HEADER = Path(__file__).parent / "lint.h"
NAMES = Path(__file__).parent / "metal_names.txt"
# Metal on macOS 14 and 15 is C++14. No double: the literals are warnings without a name.
ARGUMENTS = shlex.split(
    "-x cl -cl-no-stdinc -cl-std=clc++2021 -target spir64 "
    "-Xclang -cl-ext=-cl_khr_fp64,-__opencl_c_fp64,+cl_khr_fp16 "
    "-Wpre-c++17-compat -Werror=pre-c++17-compat -Wno-unknown-attributes -Wno-null-dereference "
    "-Wno-undefined-inline -Wno-undefined-internal -D__METAL__"
)
# Conditions on the version ask whether it is at least another one.
FIRST, *_, LAST = prelude.LANGUAGES
ENDS = (FIRST, LAST)

# Of MLX's prelude, what kernels here use.
MODEL = """using namespace metal;
typedef bfloat bfloat16_t;
typedef half float16_t;
"""

# Apple's GPUs give a threadgroup 32 KB and a kernel 31 buffers. How many threads it may have, 1024
# at most, follows from the registers of its code, which nothing here knows: 384 is the package's
# own limit.
MOST_MEMORY, MOST_BUFFERS, MOST_THREADS = 32768, 31, 384

# Words with a meaning of their own wherever they stand. clang knows those of C++.
RESERVED = frozenset(
    (
        *("vertex", "fragment", "kernel", "mesh", "object", "visible", "stitchable"),
        *("intersection", "threadgroup_imageblock", "ray_data", "object_data", "imageblock"),
        *("sampler", "texture", "texture_buffer", "texture1d", "texture2d", "texture3d"),
        *("texturecube", "depth2d", "depthcube", "quad", "main", "restrict", "assert"),
    )
)

PRAGMAS = ("pragma unroll", "pragma METAL fp contract(off)")
DIRECTIVES = ("ifdef", "ifndef", "else", "endif", "define", *PRAGMAS)
SPACES = ("device", "threadgroup", "thread", "constant")
# Metal finds them without a scope, a C++ compiler takes those of <math.h>, in double.
MATHS = (
    "exp|exp2|log|log2|sin|cos|tanh|pow|sqrt|rsqrt|floor|ceil|rint|round|trunc|fma|max|min|abs|"
    "clamp|select|isnan|isinf|popcount|clz|fabs|fmax|fmin"
)

_POINTER = re.compile(r"[\w>][*&](?=\s+\w|\s*[)>,]|operator)")
_STATEMENT = re.compile(r"[(),;{}\n<]")
_DIRECTIVE = re.compile(rf"^\s*#\s*({'|'.join(map(re.escape, PRAGMAS))}|\w+)", re.M)
_DOUBLE = re.compile(r"(?<![\w.])(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?[lL]?(?![\w.])")
_LEFT = re.compile(r"\b(?:float|half|bfloat|u?int|T|P|auto)\s+[*&]\w")
_UNSCOPED = re.compile(rf"(?<![\w:.])({MATHS})\s*\(")
_CALL = r"(?<![\w.:>]){}\s*(?:<[^;{{}}()]*>\s*)?\("
# A method that hands out a reference into its object: the object is in the same address space.
_METHOD = re.compile(r"(\bthread\s+[\w:<>]+\s*[&*]\s*[\w\[\]]+\([^()]*\))\s*(\{)")
# clang gives what is made outside of functions no address space, and takes a constructor for every
# one of them where none is named.
_CONSTRUCTOR = re.compile(r"(\bconstexpr \w+\([^;{}]*?\)) thread\b(?=\s*:)")
_INCLUDED = re.compile(r"^#(?:include <\w+>|line .*)$", re.M)
_INTERNAL = re.compile(r"\b__metal_\w+")
_INSTANTIATED = re.compile(r"^template \[\[host_name\(\"\w+\"\)\]\] \[\[kernel\]\] ", re.M)
# As source.metal_text writes them.
_ARRAYS = re.compile(r"\balignas\(16\) threadgroup ([\w:]+(?:<[^;>]*>)?) ([^;]*\]\s*);")
_ARRAY = re.compile(r"(\w+)\s*((?:\[[^\]]*\]\s*)+)")


def missing() -> str | None:
    """Why clang cannot be asked here, or None."""
    try:
        import clang.cindex
    except ImportError:
        return "the lint of Metal texts needs libclang"
    del clang
    return None


def problems(variant: Variant, versions: Collection[str] = ENDS) -> list[str]:
    """Return why Metal would refuse a generated text in one of these versions of the language, or a
    launch of it with `variant.threads` threads."""
    parameters = variant.signature[2].splitlines()
    names = [*variant.kernel.inputs, *variant.kernel.outputs]
    chunks = tuple(source.split(variant.header))
    found = [
        f"'{word}' is a reserved word of Metal"
        for word in sorted(RESERVED & words(f"{variant.header}\n{variant.body} {names}"))
    ]
    found += [problem for chunk in chunks for problem in _known_names(chunk)]
    # Some of them are macros, which no scope stops.
    found += [
        f"the template's '{name}' is a name of {metal_names()[name]}"
        for name, _ in variant.template
        if name in metal_names()
    ]
    found += [problem for text in (*chunks, variant.body) for problem in _written(text)]
    found += _recursions(chunks)
    found += [
        f"'{name}' has fewer than 8 elements: it is constant, and functions take device"
        for line in parameters
        for name in re.findall(r"const constant \w+[*&] (\w+) \[\[", line)
        if name in variant.kernel.inputs
    ]
    buffers = sum("[[buffer(" in line for line in parameters)
    if buffers == len(parameters):
        found.append("the body names no thread attribute")
    if buffers > MOST_BUFFERS:
        found.append(f"{buffers} buffers, Metal has {MOST_BUFFERS}")
    if variant.threads > MOST_THREADS:
        found.append(f"{variant.threads} threads in a threadgroup, at most {MOST_THREADS} here")
    return [*found, *compile_errors(variant, versions)]


def words(text: str) -> set[str]:
    """Its identifiers and keywords."""
    return set(re.findall(r"[A-Za-z_]\w*", text))


@functools.cache
def metal_names() -> dict[str, str]:
    """Name -> whose it is, of what is defined before a kernel's text."""
    found, whose = {}, ""
    for line in NAMES.read_text("ascii").splitlines():
        if line.startswith("["):
            whose = line.strip("[]")
        elif not line.startswith("#"):
            found[line] = whose
    return found


@functools.cache
def _known_names(chunk: str) -> list[str]:
    """A definition of a name that is there already; MLX opens `metal` with a using directive."""
    name = source.definition(chunk).name
    if name.startswith("metal::"):
        return [f"'{name}' is defined in a namespace of Metal's"]
    whose = metal_names().get(name)
    return [f"'{name}' is a name of {whose}"] if whose else []


@functools.cache
def _recursions(chunks: tuple[str, ...]) -> list[str]:
    """Functions that call themselves, directly or through others; overloads are one function."""
    calls: dict[str, set[str]] = {}
    for chunk in chunks:
        entry = source.definition(chunk)
        inside = chunk.partition("{")[2]
        called = {name for name in words(inside) if re.search(_CALL.format(name), inside)}
        calls.setdefault(entry.name, set()).update(called)
    graph = {name: called & calls.keys() for name, called in calls.items()}
    for middle in graph:
        for called in graph.values():
            if middle in called:
                called |= graph[middle]
    return [f"recursion: '{name}' calls itself" for name in graph if name in graph[name]]


def compile_errors(variant: Variant, versions: Collection[str] = ENDS) -> list[str]:
    """Return clang's errors on a generated text, each once."""
    text = whole_text(variant)
    return list(dict.fromkeys(error for v in versions for error in clang_errors(text, v)))


def whole_text(variant: Variant) -> str:
    """The text of a kernel as clang can take it.

    clang takes no template as a kernel, and arrays ``threadgroup`` in nothing else: the kernel
    becomes a function, and each array a reference to one. Their sizes are summed up where the
    template is instantiated.
    """
    header = _METHOD.sub(r"\1 thread \2", variant.header)
    sizes: list[str] = []

    def arrays(match: re.Match[str]) -> str:
        made = ""
        for name, size in _ARRAY.findall(match[2]):
            sizes.append(f"(sizeof(array_{name}) + 15) / 16 * 16")
            made += (
                f"using array_{name} = {match[1]}{size}; "
                f"threadgroup array_{name}& {name} = *(threadgroup array_{name}*)0; "
            )
        return made

    body = _ARRAYS.sub(arrays, variant.body)
    total = " + ".join(sizes) or "0"
    limit = f'static_assert({total} <= {MOST_MEMORY}, "too much threadgroup memory");'
    generated = variant.generated.replace(variant.body, f"{body}\n{limit}\n", 1)
    # clang takes no attribute in an explicit instantiation.
    generated = _INSTANTIATED.sub("template ", generated).replace("[[kernel]]", "kernel")
    return f"{header}{generated}\n"


def clang_errors(text: str, version: str = FIRST, before: str | None = None) -> tuple[str, ...]:
    """Return the errors in a text, each with its notes. before: Its prelude; None:
    :func:`known_prelude`."""
    return _errors(text, version, known_prelude() if before is None else before)


@functools.cache
def known_prelude() -> str:
    """Return MLX's prelude, or the model of it where MLX's cannot be had."""
    return MODEL if prelude.missing() else prelude.text()


@functools.cache
def _errors(text: str, version: str, before: str) -> tuple[str, ...]:
    from clang.cindex import Diagnostic, Index

    name, compiled = "kernel.clcpp", _compiled(before, version)
    arguments = [*clang_arguments(version), "-include-pch", compiled]
    unit = Index.create().parse(name, args=arguments, unsaved_files=[(name, text)])
    return tuple(
        "; ".join([f"line {d.location.line}: {d.spelling}", *(n.spelling for n in d.children)])
        for d in unit.diagnostics
        if d.severity >= Diagnostic.Error or "double precision" in d.spelling
    )


def clang_arguments(version: str) -> list[str]:
    """Return clang's arguments for a version of Metal's language."""
    return [*ARGUMENTS, f"-D__METAL_VERSION__={version.replace('.', '')}0"]


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@functools.cache
def _compiled(before: str, version: str) -> str:
    """Compile a prelude once into a file, because that takes longer than most texts.

    Raises:
        ValueError: clang does not take it: it uses what lint.h does not declare.
    """
    from clang.cindex import Diagnostic, Index, TranslationUnit

    file = Path(tempfile.mkdtemp(dir=_folder().name)) / "prelude.clcpp"
    file.write_text(for_clang(before), "utf-8")
    unit = Index.create().parse(
        str(file), args=clang_arguments(version), options=TranslationUnit.PARSE_INCOMPLETE
    )
    errors = [d for d in unit.diagnostics if d.severity >= Diagnostic.Error]
    if errors:
        raise ValueError(
            f"clang refuses MLX's prelude for Metal {version} ({len(errors)} errors, the first: "
            f"{errors[0].spelling}); declare in {HEADER.name} what it uses."
        )
    unit.save(str(file.with_suffix(".pch")))
    return str(file.with_suffix(".pch"))


def for_clang(before: str) -> str:
    """Return a prelude as clang can take it, behind what it uses. It may be newer than C++14."""
    internal = sorted(set(_INTERNAL.findall(before)))
    return (
        f'#include "{HEADER}"\n'
        '#pragma clang diagnostic push\n#pragma clang diagnostic ignored "-Wpre-c++17-compat"\n'
        + "".join(f"template <typename... T> float {name}(T... x);\n" for name in internal)
        + _CONSTRUCTOR.sub(r"\1", _INCLUDED.sub("", before))
        + "#pragma clang diagnostic pop\n"
    )


def text_problems(text: str) -> list[str]:
    """What a .metal file must not hold; Metal's side of conditionals."""
    if not text.isascii():
        return ["it is not ASCII"]
    text = source.INCLUDE.sub("", text)
    problems = [
        f"'#{d[1]}' is none of {', '.join(DIRECTIVES)}"
        for d in _DIRECTIVE.finditer(text)
        if d[1] not in DIRECTIVES
    ]
    if problems:
        return problems
    return list(_written(source.strip(source.resolve_conditionals(text, cuda=False))))


@functools.cache
def _written(text: str) -> tuple[str, ...]:
    """What the words of a stripped text alone show."""
    problems = [
        f"a pointer or reference without address space: {_line(text, match)}"
        for match in _POINTER.finditer(text)
        if not _names_space(text, match.start() + 1)
    ]
    problems += [
        f"write the * or & beside its type: {_line(text, m)}" for m in _LEFT.finditer(text)
    ]
    problems += [f"a literal of type double: {_line(text, m)}" for m in _DOUBLE.finditer(text)]
    problems += [f"write metal::{m[1]}: {_line(text, m)}" for m in _UNSCOPED.finditer(text)]
    problems += [f"double: {_line(text, m)}" for m in re.finditer(r"\bdouble\b", text)]
    return tuple(problems)


def _names_space(text: str, at: int) -> bool:
    """Whether the declaration that ends at `at` begins with an address space, or is none."""
    begin = at
    depth = 0
    while begin > 0:
        c = text[begin - 1]
        depth += {">": 1, "<": -1}.get(c, 0)
        if depth < 0 or (depth == 0 and c != "<" and _STATEMENT.match(c)):
            break
        begin -= 1
    words = re.findall(r"\w+", text[begin:at])
    return any(word in SPACES for word in words)


def _line(text: str, match: re.Match[str]) -> str:
    start = text.rfind("\n", 0, match.start()) + 1
    return text[start : text.find("\n", match.start())].strip()
