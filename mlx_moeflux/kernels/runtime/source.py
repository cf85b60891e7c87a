"""The text of a kernel: what its body needs out of a .metal file, for Metal and for CUDA.

MLX hashes a kernel's whole text at every launch, so only the definitions that a body uses,
directly or through others, are sent. A file is a sequence of top-level definitions; each is
known by its qualified name, overloads share one. ``#ifdef MOEFLUX_CUDA``, ``#ifndef
MOEFLUX_CUDA``, ``#else``, ``#endif`` and ``#include "file.metal"`` are resolved here, nothing else
is preprocessed.

On CUDA address spaces vanish, ``threadgroup`` arrays become ``__shared__``, thread attributes
become constants in front of the body, and the rest of Metal's language is what
``cuda/dialect.cuh`` defines.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from mlx_moeflux.errors import ShapeError

KERNELS = Path(__file__).parents[1]
COMMON, DIALECT = "common.metal", "dialect.cuh"
CUDA_MACRO = "MOEFLUX_CUDA"

# Operators have no name to be asked for: they come with every kernel that may need them.
MIXED, MIXED_TYPES = "MOEFLUX_MIXED", frozenset({"typename", "half", "bfloat"})

_LINEAR = "(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z))"
_THREADS = "uint3{blockDim.x, blockDim.y, blockDim.z}"

# Metal's thread attributes that kernels may use -> type and value on CUDA. MLX finds them by
# substring in the body; x runs fastest on both.
ATTRIBUTES = {
    "thread_position_in_grid": (
        "uint3",
        "uint3{blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y, "
        "blockIdx.z * blockDim.z + threadIdx.z}",
    ),
    "thread_position_in_threadgroup": ("uint3", "uint3{threadIdx.x, threadIdx.y, threadIdx.z}"),
    "threadgroup_position_in_grid": ("uint3", "uint3{blockIdx.x, blockIdx.y, blockIdx.z}"),
    "threadgroups_per_grid": ("uint3", "uint3{gridDim.x, gridDim.y, gridDim.z}"),
    "threads_per_threadgroup": ("uint3", _THREADS),
    "thread_index_in_threadgroup": ("uint", _LINEAR),
    "thread_index_in_simdgroup": ("uint", f"{_LINEAR} & 31u"),
    "simdgroup_index_in_threadgroup": ("uint", f"{_LINEAR} >> 5"),
}

INCLUDE = re.compile(r'^#include "(\w+\.metal)"$', re.M)
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
_TOKEN = re.compile(r"[A-Za-z_]\w*(?:::[A-Za-z_]\w*)*")
# Behind a closing brace it belongs to the same definition.
_SEMICOLON = re.compile(r"\s*;")
_TEMPLATE = re.compile(r"^template\s*<")
# The name of a definition, by its kind; the last finds functions, tables and constants.
_NAMES = (
    re.compile(r"#define\s+(\w+)"),
    re.compile(r"using\s+(?:[\w:]*::)?(\w+)"),
    re.compile(r"typedef.*?(\w+)\s*;$", re.S),
    re.compile(r"(?:struct|class|union|enum(?:\s+class)?)\s+(?:alignas\([^;{]*?\)\s*)?(\w+)"),
    re.compile(r".*?(\w+)\s*(?:\(|\[|=|\{)", re.S),
)
_ARRAY = re.compile(r"(^|[;{}\n])(\s*)threadgroup\s+((?:[\w:]+(?:<[^;>]*>)?\s+)+)(\w+\s*\[)")
_ARRAYS = re.compile(r"\bthreadgroup\s+(\w+)\s+(\w+)(\[[^;]*\]);")
_ADDRESS_SPACE = re.compile(r"\b(?:device|threadgroup|thread|constant)\b(?!\s*\()\s*")


@dataclass(frozen=True)
class Definition:
    """One top-level definition of a file: its qualified name, text, and the names it uses."""

    name: str
    text: str
    uses: frozenset[str]


@functools.cache
def _path(file: str) -> Path:
    """A Metal file or the dialect by its name, which is unique among all rooms."""
    (found,) = KERNELS.rglob(file)
    return found


def strip(text: str) -> str:
    """Without comments, indentation, continued lines and blank lines."""
    text = _COMMENT.sub("", text).replace("\\\n", " ")
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line)


def resolve_conditionals(text: str, *, cuda: bool) -> str:
    """Keep the side of every conditional on ``MOEFLUX_CUDA`` that applies."""
    kept, keep = [], [True]
    for line in text.splitlines():
        words = line.split()
        if words and words[0] in ("#ifdef", "#ifndef"):
            if words[1:] != [CUDA_MACRO]:
                raise ValueError(f"'{line}': kernels may only ask for {CUDA_MACRO}")
            keep.append(cuda == (words[0] == "#ifdef"))
        elif words and words[0] == "#else":
            keep[-1] = not keep[-1]
        elif words and words[0] == "#endif":
            keep.pop()
        elif all(keep):
            kept.append(line)
    if len(keep) != 1:
        raise ValueError("an #ifdef or #ifndef has no #endif")
    return "\n".join(kept)


def split(text: str) -> list[str]:
    """Stripped text -> its top-level definitions, in order."""
    chunks, start, depth, i = [], 0, 0, 0
    while i < len(text):
        c = text[i]
        if c == "#" and depth == 0 and not text[start:i].strip():
            end = text.find("\n", i)
            i = len(text) if end < 0 else end
        elif c in "({[":
            depth += 1
        elif c in ")}]":
            depth -= 1
        if depth == 0 and (c in ";#" or (c == "}" and not _SEMICOLON.match(text, i + 1))):
            chunks.append(text[start : i + 1].strip())
            start = i + 1
        i += 1
    if depth or text[start:].strip():
        raise ValueError(f"unfinished definition: {text[start : start + 60]!r}")
    return [chunk for chunk in chunks if chunk]


def definition(chunk: str) -> Definition:
    """Name a definition and find which names it uses."""
    return Definition(_name(chunk), chunk, _names_in(chunk))


def _names_in(text: str) -> frozenset[str]:
    """Every name and every qualified name, with the scopes that it begins with."""
    tokens = (token.split("::") for token in _TOKEN.findall(text))
    return frozenset(name for parts in tokens for name in accumulate(parts, "{}::{}".format))


def _name(chunk: str) -> str:
    scope = re.match(r"namespace\s+([\w:]+)\s*\{(.*)\}$", chunk, re.S)
    if scope:
        return f"{scope[1]}::{_name(scope[2].strip())}"
    text = _without_template(chunk)
    found = next(filter(None, (pattern.match(text) for pattern in _NAMES)), None)
    if not found:
        raise ValueError(f"cannot name the definition {chunk[:60]!r}")
    return found[1]


def _without_template(chunk: str) -> str:
    while _TEMPLATE.match(chunk):
        behind = chunk[chunk.index("<") :]
        depths = accumulate({"<": 1, ">": -1}.get(c, 0) for c in behind)
        end = next(i for i, depth in enumerate(depths) if not depth)
        chunk = behind[end + 1 :].lstrip()
    return chunk


@functools.cache
def files(file: str) -> tuple[str, ...]:
    """A file of this directory behind those that it includes."""
    included = INCLUDE.findall(_path(file).read_text("ascii"))
    return (*dict.fromkeys(each for name in included for each in files(name)), file)


@functools.cache
def definitions(file: str, *, cuda: bool) -> tuple[Definition, ...]:
    """The definitions of a file in this directory, without those of files that it includes."""
    try:
        text = strip(resolve_conditionals(_path(file).read_text("ascii"), cuda=cuda))
        return tuple(definition(chunk) for chunk in split(INCLUDE.sub("", text)))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def closure(body: str, known: Sequence[Definition]) -> list[str]:
    """The texts of those of `known` that `body` needs, each after what it uses itself.

    Two of the same text are one: overloads that differ in nothing but address spaces.
    """
    by_name: dict[str, list[Definition]] = {}
    for entry in known:
        by_name.setdefault(entry.name, []).append(entry)
    wanted, seen, needed = _names_in(body), set(), {}

    def visit(name: str) -> None:
        if name in seen:
            return
        seen.add(name)
        for entry in by_name[name]:
            for use in sorted(entry.uses & by_name.keys()):
                visit(use)
        needed.update((entry.text, None) for entry in by_name[name])

    for name in by_name:
        if name in wanted:
            visit(name)
    return list(needed)


def metal_text(file: str, body: str) -> tuple[str, str]:
    """header, body as ``mx.fast.metal_kernel`` takes them; arrays are aligned for wide loads."""
    body = _ARRAY.sub(r"\1\2alignas(16) threadgroup \3\4", strip(body))
    known = [d for each in (COMMON, *files(file)) for d in definitions(each, cuda=False)]
    return "\n".join([*closure(body, known), ""]), body


def cuda_text(file: str, body: str, *, on_demand: bool = False) -> tuple[str, str]:
    """header, body as ``mx.fast.cuda_kernel`` takes them.

    on_demand: A launch asks for threadgroup memory, so that there may be more than 48 KB."""
    body = strip(body)
    if on_demand:
        body = _in_one_block(body)
    constants = "".join(
        f"const {kind} {name} = {value};\n"
        for name, (kind, value) in ATTRIBUTES.items()
        if re.search(rf"\b{name}\b", body)
    )
    own = [d for each in (COMMON, *files(file)) for d in definitions(each, cuda=True)]
    own = [definition(without_address_spaces(entry.text)) for entry in own]
    known = [*definitions(DIALECT, cuda=True), *own]
    body = constants + without_address_spaces(body)
    needed = closure(body, known)
    if MIXED_TYPES & _names_in("\n".join(needed)):
        needed = closure(f"{body} {MIXED}", known)
    return "\n".join([*needed, ""]), body


def refuse_negative(kernel: str, template: Mapping[str, Any]) -> None:
    """Template arguments become a part of names.

    Raises:
        ShapeError: One is negative.
    """
    for value in template.values():
        if value.__class__ is int and value < 0:
            raise ShapeError(
                f"kernel '{kernel}': template {dict(template)} holds {value}; MLX takes no "
                "negative number there, pass it as an input."
            )


def _in_one_block(body: str) -> str:
    """Place arrays declared ``threadgroup`` consecutively in the memory of a launch."""
    arrays = _ARRAYS.findall(body)
    members = "".join(f"alignas(16) {kind} {name}{size}; " for kind, name, size in arrays)
    pointers = "".join(f"{kind}* {name} = parts.{name};\n" for kind, name, _ in arrays)
    return (
        f"struct shared_parts {{ {members}}};\nextern __shared__ uint4 shared_memory[];\n"
        f"shared_parts& parts = *(shared_parts*)shared_memory;\n{pointers}{_ARRAYS.sub('', body)}"
    )


def without_address_spaces(text: str) -> str:
    """Metal -> CUDA: arrays declared ``threadgroup`` are shared and aligned for wide loads, tables
    ``constant``; pointers carry no address space."""
    text = _ARRAY.sub(r"\1\2__shared__ alignas(16) \3\4", text)
    if text.startswith("constant "):
        text = f"__constant__ {text.removeprefix('constant ')}"
    return _ADDRESS_SPACE.sub("", text)
