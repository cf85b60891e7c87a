"""What GCC lets pass and Metal's compiler does not: address spaces, and the house's subset.

:func:`address_spaces` has clang compile a generated text as C++ for OpenCL, whose address spaces
have the same rules. :func:`text_problems` reads a .metal file: it needs no compiler.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from mlx_moeflux.kernels import source
from tests.kernels.variant import Variant

HEADER = Path(__file__).parent / "lint.h"
ARGUMENTS = shlex.split(
    "-x cl -cl-no-stdinc -cl-std=clc++2021 -target spir64 -Xclang -cl-ext=+cl_khr_fp16 "
    "-Wno-undefined-inline -Wno-undefined-internal"
)

DIRECTIVES = ("ifdef", "ifndef", "else", "endif", "define", "pragma unroll")
SPACES = ("device", "threadgroup", "thread", "constant")
# Metal finds them without a scope, a C++ compiler takes those of <math.h>, in double.
MATHS = (
    "exp|exp2|log|log2|sin|cos|tanh|pow|sqrt|rsqrt|floor|ceil|rint|round|trunc|fma|max|min|abs|"
    "clamp|select|isnan|isinf|popcount|clz|fabs|fmax|fmin"
)

_POINTER = re.compile(r"[\w>][*&](?=\s+\w|\s*[)>,]|operator)")
_STATEMENT = re.compile(r"[(),;{}\n<]")
_DIRECTIVE = re.compile(r"^\s*#\s*(pragma unroll|\w+)", re.M)
_DOUBLE = re.compile(r"(?<![\w.])(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?(?![\w.])")
_LEFT = re.compile(r"\b(?:float|half|bfloat|u?int|T|P|auto)\s+[*&]\w")
_UNSCOPED = re.compile(rf"(?<![\w:.])({MATHS})\s*\(")
# A method that hands out a reference into its object: the object is in the same address space.
_METHOD = re.compile(r"(\bthread\s+[\w:<>]+\s*[&*]\s*[\w\[\]]+\([^()]*\))\s*(\{)")


def missing() -> str | None:
    """Why clang cannot be asked here, or None."""
    try:
        import clang.cindex
    except ImportError:
        return "the address-space lint needs libclang"
    del clang
    return None


def address_spaces(variant: Variant) -> list[str]:
    """clang's errors on a generated text."""
    usings = "".join(
        f"constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {text};\n"
        if isinstance(value, int)
        else f"using {name} = {text};\n"
        for (name, value), text in zip(
            variant.template, variant.template_values().values(), strict=True
        )
    )
    header = _METHOD.sub(r"\1 thread \2", variant.header)
    return clang_errors(
        f"{HEADER.read_text('ascii')}\n#line 1\n{header}\n"
        f"__kernel void kernel_function({variant.parameters}) {{\n{usings}{variant.body}\n}}\n"
    )


def clang_errors(text: str) -> list[str]:
    """Errors in a C++ for OpenCL text."""
    from clang.cindex import Diagnostic, Index

    name = "kernel.clcpp"
    unit = Index.create().parse(name, args=ARGUMENTS, unsaved_files=[(name, text)])
    return [
        f"line {d.location.line}: {d.spelling}"
        for d in unit.diagnostics
        if d.severity >= Diagnostic.Error
    ]


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
    text = source.strip(source.resolve_conditionals(text, cuda=False))
    for match in _POINTER.finditer(text):
        if not _names_space(text, match.start() + 1):
            problems.append(f"a pointer or reference without address space: {_line(text, match)}")
    problems += [
        f"write the * or & beside its type: {_line(text, m)}" for m in _LEFT.finditer(text)
    ]
    problems += [f"a literal of type double: {_line(text, m)}" for m in _DOUBLE.finditer(text)]
    problems += [f"write metal::{m[1]}: {_line(text, m)}" for m in _UNSCOPED.finditer(text)]
    problems += [f"double: {_line(text, m)}" for m in re.finditer(r"\bdouble\b", text)]
    return problems


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
