"""Oracle: the cases of every kernel. A mutation that none of them finds is a missing test."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mlx_moeflux.kernels.runtime import source
from tests.kernels.cases import PAST, UNSET, equivalent, kernels, variants
from tests.kernels.harness import require, require_emulator, scratch_kernel
from tests.kernels.metal import lint
from tests.kernels.metal.mutations import mutations, run

FILES = sorted({file for kernel in kernels().values() for file in source.files(kernel.file)})
_SPACE = re.compile(r"\b(device|threadgroup|thread|constant)(?= (?:const )?[\w:<>, ]+[*&])")


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_every_mutation_is_found(file):
    require_emulator()
    survivors = {made.name: made.place for made, found in run(file) if found is None}
    known = equivalent(file)
    unknown = [f"{name}, at {survivors[name]}" for name in sorted(survivors.keys() - set(known))]
    assert not unknown, "\n".join(["nothing finds", *unknown])
    found = sorted(n for n in known.keys() - survivors.keys() if known[n] not in (PAST, UNSET))
    assert not found, "\n".join(["found now, take it off the list:", *found])


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_every_wrong_address_space_is_found(file):
    """By one of the file's kernels: one that has no use for a pointer gives a null pointer."""
    require(lint.missing(), "MOEFLUX_REQUIRE_EMULATOR")
    own = {d.text for d in source.definitions(file, cuda=False)}
    found: dict[str, bool] = {}
    for kernel in (k for k in kernels().values() if file in source.files(k.file)):
        variant = variants(kernel.name)[0]
        for match in _SPACE.finditer(variant.header):
            line, column = _line(variant.header, match)
            if not any(line in text for text in own):
                continue
            other = "threadgroup" if match[1] != "threadgroup" else "device"
            what = f"{match[1]} -> {other} at {column}: {line}"
            if found.get(what):
                continue
            header = variant.header[: match.start()] + other + variant.header[match.end() :]
            mutated = replace(variant, header=header)
            found[what] = bool(lint.compile_errors(mutated, [lint.FIRST]))
    survivors = sorted(what for what, seen in found.items() if not seen)
    assert not survivors, "\n".join(["nothing finds", *survivors])


def _line(text, match):
    """The line around a match, and where in it."""
    start = text.rfind("\n", 0, match.start()) + 1
    return text[start:].partition("\n")[0], match.start() - start


def test_every_class_of_mutation_is_made():
    kernel = scratch_kernel(
        "mutated",
        inputs=("x", "y"),
        outputs=("z",),
        body="""
        threadgroup float s[64];
        uint i = thread_index_in_threadgroup;
        if (i < 60) {
          s[i] = x[i];
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        tile_a<float> a;
        load_a(a, s, 8, i);
        z[row * 8 + col] = metal::fma(x[i], y[i], s[i]);
        """,
    )
    made = mutations("common.metal", [kernel])
    places = {m.name: m.place for m in made}
    for name, place in (
        ("missing barrier", "threadgroup_barrier(mem_flags::mem_threadgroup);"),
        ("unwritten", "s[i] = x[i];"),
        ("unwritten (2)", "z[row * 8 + col] = metal::fma(x[i], y[i], s[i]);"),
        ("off by one < -> <=", "if (i < 60)"),
        ("off by one < -> + 1 <", "if (i < 60)"),
        ("transposed index", "row * 8 + col"),
        ("transposed load_a", "load_a(a, s, 8, i)"),
        ("swapped arguments 2 and 3 of load_a", "s, 8"),
        ("swapped arguments 1 and 2 of metal::fma", "x[i], y[i]"),
    ):
        assert places.get(f"scratch_mutated: {name}") == place, (name, places)
    assert len(places) == len(made)
    assert all(m.old != m.new for m in made)
