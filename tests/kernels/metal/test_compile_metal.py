"""tools/compile_metal.py with a stand-in for Apple's compiler, on a machine that cannot emulate.

Oracle: what the stand-in is given, against MLX's prelude and the texts that MLX generates."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels import harness
from tests.kernels.cases import kernels, variants
from tests.kernels.metal import prelude
from tools import compile_metal

ROOT = Path(__file__).parents[3]
# Few and short texts: the tool takes all.
NAMES = sorted(name for name in kernels() if name.startswith("softmax_top_k"))[:1]
XCRUN = """#!/bin/sh
echo "$*" >> {folder}/asked
case "$*" in {unknown}) echo "error: unknown: $4" >&2; echo "and more" >&2; exit 1;; esac
[ "$4" = --version ] && exit 0
while [ "$1" != -c ]; do shift; done
{grep} -q "{word}" "$2" && {{ echo "error: it holds {word}" >&2; exit 1; }}
[ {copies} = yes ] && {cp} "$2" {folder}/$$.metal
exit 0
"""
COMMANDS = {name: shutil.which(name) for name in ("grep", "cp")}


class Compiler:
    """A folder with an `xcrun` that records its arguments."""

    def __init__(self, folder: Path):
        self.folder = folder

    def knows(self, *, unknown: str = "nothing", word: str = "no such word", copies: bool = True):
        """unknown: a pattern of arguments, and word: what a text may not hold, that it refuses."""
        which = {"unknown": unknown, "word": word, "copies": "yes" if copies else "no"}
        file = self.folder / "xcrun"
        file.write_text(XCRUN.format(folder=self.folder, **which, **COMMANDS))
        file.chmod(0o755)

    @property
    def asked(self) -> list[list[str]]:
        """Arguments of each call, without the places of files."""
        lines = (self.folder / "asked").read_text().splitlines()
        return [line.partition(" -c ")[0].split() for line in lines]

    @property
    def texts(self) -> list[str]:
        return [file.read_text("utf-8") for file in self.folder.glob("*.metal")]


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A compiler that takes everything, on a PATH with nothing else, and a prelude."""
    monkeypatch.setattr(compile_metal, "kernels", lambda: dict.fromkeys(NAMES))
    monkeypatch.setattr(prelude, "text", lambda: "// MLX's prelude \u00a9\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    made = Compiler(tmp_path)
    made.knows()
    return made


def generated() -> set[str]:
    return {variant.header + variant.generated for name in NAMES for variant in variants(name)}


def test_each_text_is_compiled_as_mlx_does_in_each_version(compiler, capsys):
    assert compile_metal.main() == 0
    for call in compiler.asked:
        assert call[:3] == ["-sdk", "macosx", "metal"]
    options = [tuple(call[3:]) for call in compiler.asked if len(call) == 5]
    safe = "-fmetal-math-mode=safe"
    assert {*options} == {
        ("-std=metal3.1", "-fno-fast-math"), ("-std=metal3.2", safe),
        ("-std=metal4.0", safe), ("-std=metal4.1", safe),
    }  # fmt: skip
    texts = generated()
    assert texts
    assert all(options.count(one) == len(texts) for one in options)
    whole = [text for text in compiler.texts if text != compile_metal.SMALLEST]
    assert sorted(whole) == sorted([f"// MLX's prelude \u00a9\n{text}" for text in texts] * 4)
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == (
        f"{len(texts)} texts of {len(NAMES)} kernels in Metal 3.1, 3.2, 4.0, 4.1: 0 refused"
    )


def test_a_version_that_the_compiler_does_not_take_is_left_out_and_named(compiler, capsys):
    compiler.knows(unknown="*-std=metal4.*")
    assert compile_metal.main() == 0
    said = capsys.readouterr().out
    assert "Metal 3.2: taken\nMetal 4.0: not taken (error: unknown: -std=metal4.0)\n" in said
    assert "in Metal 3.1, 3.2: 0 refused" in said
    assert {call[3] for call in compiler.asked if len(call) == 5} == {
        "-std=metal3.1", "-std=metal3.2"
    }  # fmt: skip


def test_a_compiler_that_takes_no_version_fails(compiler, capsys):
    compiler.knows(unknown="*-std=*")
    assert compile_metal.main() == 1
    said = capsys.readouterr().out
    assert said.endswith("takes no version of Metal's language that MLX asks for.\n")


def test_an_option_that_is_not_known_is_no_version_that_is_not_taken(compiler, capsys):
    compiler.knows(unknown="*-fmetal-math-mode=*")
    assert compile_metal.main() == 1
    said = capsys.readouterr().out
    assert "Metal 3.2: taken" in said
    assert f"4.1: {3 * len(generated())} refused" in said


def test_a_text_that_is_refused_is_named_with_its_version(compiler, capsys):
    (name,) = NAMES
    compiler.knows(word=f"void custom_kernel_moeflux_{name}")
    assert compile_metal.main() == 1
    said = capsys.readouterr().out
    template = dict(variants(name)[0].template)
    words = f"error: it holds void custom_kernel_moeflux_{name}"
    for version in prelude.LANGUAGES:
        assert f"{name} {template}, Metal {version}:\n{words}\n" in said
    assert f"{4 * len(generated())} refused" in said


MEND = "install Xcode, and from Xcode 26 on run `xcodebuild -downloadComponent MetalToolchain`"


def test_without_a_compiler_one_line_says_what_to_install(compiler, capsys):
    compiler.knows(unknown="*--version")
    assert compile_metal.main() == 1
    assert capsys.readouterr().out == (
        f"xcrun runs no Metal compiler (error: unknown: --version and more); {MEND}.\n"
    )
    (compiler.folder / "xcrun").unlink()
    assert compile_metal.main() == 1
    assert capsys.readouterr().out == (f"There is no xcrun here; on a Mac {MEND}.\n")


@pytest.mark.usefixtures("compiler")
def test_without_a_prelude_one_line_says_why(monkeypatch, capsys):
    def lacking():
        raise prelude.PreludeMissing("pip gets no wheel")

    monkeypatch.setattr(prelude, "text", lacking)
    assert compile_metal.main() == 1
    assert capsys.readouterr().out.endswith("pip gets no wheel\n")


def test_texts_are_generated_where_no_emulator_runs(monkeypatch):
    monkeypatch.setattr(harness, "missing", lambda: "the emulator needs Linux")
    monkeypatch.delenv("MOEFLUX_REQUIRE_EMULATOR", raising=False)
    variants.cache_clear()
    try:
        assert all(variants(name) for name in NAMES)
    finally:
        variants.cache_clear()
    with pytest.raises(pytest.skip.Exception), harness.emulated():
        pass


@pytest.mark.slow
def test_the_command_compiles_every_kernel(tmp_path):
    harness.require(prelude.missing(), "MOEFLUX_REQUIRE_EMULATOR")
    compiler = Compiler(tmp_path)
    compiler.knows(copies=False)
    done = subprocess.run(
        [sys.executable, "tools/compile_metal.py"],
        cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    count = int(done.stdout.splitlines()[-1].split()[0])
    assert f"{count} texts of {len(kernels())} kernels in Metal" in done.stdout
    assert count >= len(kernels())
    versions = len(prelude.LANGUAGES)
    assert len(compiler.asked) == 1 + versions + count * versions
