"""Faults put into a .metal file on purpose, one at a time: each must fail a case of its kernels.

    python -m tests.kernels.metal.mutations FILE [FIRST]

runs them from number FIRST on and prints a line of JSON for each: its number, its name,
and what found it (null: nothing did). The test starts this as a process of its own, because a
mutated kernel may loop for ever or overwrite its stack.
"""

from __future__ import annotations

import json
import re
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from mlx_moeflux.kernels.runtime import source
from mlx_moeflux.kernels.runtime.launcher import MetalKernel
from tests.kernels.cases import all_cases, kernels, texts
from tests.kernels.harness import emulated
from tests.kernels.metal.emulator import OWN
from tests.kernels.metal.variant import plain_name

ROOT = Path(__file__).parents[3]
SECONDS = 60  # for one case; one that is not found runs all cases of many kernels
ALIVE = b"\n"

_BARRIER = re.compile(r"\b(?:threadgroup|simdgroup)_barrier\([^;]*\);")
_STORE = re.compile(
    r"(?<=[;{})\n])\s*(?:(?:\w|\.|->)+(?:\[[^;={}]*\])+\s=\s[^;]*;|\bstore(?:_pack)?\([^;]*\);)"
)
_COMPARE = re.compile(r" (<=|>=|<|>) ")
_INDEX = re.compile(r"\b(\w+(?:\([^()]*\))?) \* (\w+) \+ (\w+(?:\([^()]*\))?)(?![\w(\[.*])")
_CALL = re.compile(r"\b([A-Za-z_][\w:]*)(?=\(|<[^;{}()=]*>\()")
_WORDS = {" < ": [" <= ", " + 1 < "], " <= ": [" < "], " > ": [" >= "], " >= ": [" > "]}
_TURNED = {".row(": ".col(", ".col(": ".row(", "load_a(": "load_a_t(", "load_a_t(": "load_a(",
           "load_b(": "load_b_t(", "load_b_t(": "load_b("}  # fmt: skip
# Control flow, and functions of which the order of arguments does not matter.
_NO_CALLS = frozenset(
    ("if", "for", "while", "switch", "return", "sizeof", "metal::max", "metal::min", "template")
)


@dataclass(frozen=True)
class Mutation:
    """What was changed, and where: in a kernel's body, or (None) in a function of the file.

    name: The kernel or function, the change, and its number among those of the kind, if it is not
    the first: ``share: off by one < -> <= (2)``. It quotes no text of the file, in which variables
    may get other names. place: The words that were changed, for readers.
    """

    name: str
    place: str
    old: str
    new: str
    kernel: str | None = None

    def apply(self, kernel: MetalKernel, header: str, body: str) -> tuple[str, str]:
        """The text of any kernel of the file, changed if it holds the place."""
        if self.kernel is None:
            return header.replace(self.old, self.new, 1), body
        if plain_name(kernel.name) != self.kernel:
            return header, body
        return header, body.replace(self.old, self.new, 1)


def kernels_of(file: str) -> list[MetalKernel]:
    """Kernels that may use functions of `file`: those that include it; of what is shared, all. By
    name: the order of imports is not the same in every process."""
    every = sorted(kernels().items())
    return [k for _, k in every if file in (source.COMMON, *source.files(k.file))]


def mutations(file: str, users: Sequence[MetalKernel]) -> list[Mutation]:
    """All mutations of the bodies of the file's kernels, and of those functions of the file that
    `users` use. What the emulator has in its own words (OWN) is left out."""
    made, used = [], {}
    for kernel in users:
        for header, _ in (
            texts(kernel.name) if kernel.name in all_cases() else [kernel.metal_text()]
        ):
            used.update(dict.fromkeys(source.split(header)))
        body = kernel.metal_text()[1]
        if kernel.file != file:
            continue
        made += [
            Mutation(f"{kernel.name}: {what}", place, body, new, kernel.name)
            for what, place, new in _changes(body, depth=1)
        ]
    for entry in source.definitions(file, cuda=False):
        if entry.text in used and entry.name not in OWN:
            made += [
                Mutation(f"{entry.name}: {what}", place, entry.text, new)
                for what, place, new in _changes(entry.text, depth=0)
            ]
    seen: dict[str, int] = {}
    for i, mutation in enumerate(made):
        n = seen[mutation.name] = seen.get(mutation.name, 0) + 1
        if n > 1:
            made[i] = replace(mutation, name=f"{mutation.name} ({n})")
    return made


def _changes(text: str, *, depth: int) -> Iterator[tuple[str, str, str]]:
    """What was changed, the words there, and the changed text. depth: of the braces around
    `text`."""

    def replaced(match: re.Match[str], new: str) -> str:
        return text[: match.start()] + new + text[match.end() :]

    for match in _BARRIER.finditer(text):
        yield "missing barrier", _short(match[0]), replaced(match, ";")
    for match in _STORE.finditer(text):
        yield "unwritten", _short(match[0]), replaced(match, ";")
    for match in _COMPARE.finditer(text):
        for new in _WORDS[match[0]]:
            what = f"off by one {match[1]} -> {new.strip()}"
            yield what, _around(text, match), replaced(match, new)
    for match in _INDEX.finditer(text):
        a, size, b = match.groups()
        if a != b:
            yield "transposed index", match[0], replaced(match, f"{b} * {size} + {a}")
    for old, new in _TURNED.items():
        for match in re.finditer(rf"(?<!\w){re.escape(old)}" if old[0] != "." else re.escape(old),
                                 text):  # fmt: skip
            if _depth(text, match.start()) + depth > 0:
                what = f"transposed {old.strip('.(')}"
                yield what, _around(text, match), replaced(match, new)
    for match in _CALL.finditer(text):
        if match[1] in _NO_CALLS or _depth(text, match.start()) + depth == 0:
            continue
        for opening in "<(":
            start = text.find("(", match.end()) if opening == "(" else match.end()
            if text[start : start + 1] != opening:
                continue
            yield from _swaps(text, match[1], start)


def _swaps(text: str, name: str, start: int) -> Iterator[tuple[str, str, str]]:
    """Neighbouring arguments swapped, of the list that opens at `start`."""
    cuts, depth, i = [start], 0, start
    angle = text[start] == "<"
    while True:
        c = text[i]
        if c in ("([{<" if angle else "([{"):
            depth += 1
        elif c in (")]}>" if angle else ")]}"):
            depth -= 1
        if depth == 1 and c == ",":
            cuts.append(i)
        if depth == 0:
            cuts.append(i)
            break
        i += 1
    parts = [text[a + 1 : b].strip() for a, b in pairwise(cuts)]
    for n, (a, b) in enumerate(pairwise(parts)):
        if a == b:
            continue
        swapped = [*parts[:n], b, a, *parts[n + 2 :]]
        new = text[: start + 1] + ", ".join(swapped) + text[cuts[-1] :]
        what = f"swapped {'parameters' if angle else 'arguments'} {n + 1} and {n + 2} of {name}"
        yield what, f"{_short(a)}, {_short(b)}", new


def _depth(text: str, at: int) -> int:
    return text.count("{", 0, at) - text.count("}", 0, at)


def _short(text: str) -> str:
    return " ".join(text.split())[:60]


def _around(text: str, match: re.Match[str]) -> str:
    left = re.search(r"[^\n;{}]{0,24}$", text[: match.start()])[0]
    right = re.match(r"[^\n;{}]{0,24}", text[match.end() :])[0]
    return f"{left}{match[0]}{right}".strip()


# ---- The process that runs them


def find(file: str, mutation: Mutation) -> str | None:
    """What finds a mutation: the words of the first case that fails, or None."""
    for kernel in kernels_of(file):
        if all(mutation.apply(kernel, *text) == text for text in texts(kernel.name)):
            continue
        for case in all_cases()[kernel.name]:
            print(flush=True)  # noqa: T201
            with emulated(rewrite=mutation.apply, partly_written=case.partly_written):
                try:
                    case.check()
                except AssertionError as error:
                    return f"{kernel.name}-{case.name}: {str(error).splitlines()[0][:200]}"
    return None


def main(file: str, first: str = "0") -> None:
    for number, mutation in enumerate(mutations(file, kernels_of(file))):
        if number >= int(first):
            found = find(file, mutation)
            print(json.dumps([number, mutation.name, found]), flush=True)  # noqa: T201


def run(file: str) -> Iterator[tuple[Mutation, str | None]]:
    """Each mutation of a file, and what found it; a crash and a hang count."""
    made = mutations(file, kernels_of(file))
    number = 0
    while number < len(made):
        command = [sys.executable, "-m", "tests.kernels.metal.mutations", file, str(number)]
        # Without a buffer, which would hide lines from select.
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, bufsize=0) as process:
            while number < len(made):
                ready, _, _ = select.select([process.stdout], [], [], SECONDS)
                line = process.stdout.readline() if ready else b""
                if line == ALIVE:
                    continue
                if line:
                    at, what, found = json.loads(line)
                    assert (at, what) == (number, made[number].name)
                else:
                    found = "it crashes" if ready else f"it runs for more than {SECONDS} s"
                yield made[number], found
                number += 1
                if not line:
                    process.kill()
                    break


if __name__ == "__main__":
    main(*sys.argv[1:])
