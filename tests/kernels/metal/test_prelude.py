"""Oracle: MLX's wheel for macOS, and libraries made here that hold its prelude or another text."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import types
import zipfile
from pathlib import Path

import pytest

from tests.kernels.harness import require
from tests.kernels.metal import prelude

VERSION = importlib.metadata.version("mlx")
TEXT = (
    "\n// Someone's line.\n// Auto generated source for mlx/backend/metal/kernels/utils.h\n"
    "#include <metal_stdlib>\nusing namespace metal;\ntypedef bfloat bfloat16_t;\n"
    + "// padding \u00a9\n" * 1000
    + "inline int elem_to_loc(int x);\n"
)


def library(text: str = TEXT) -> bytes:
    """Bytes around a text, as a linker lays strings out."""
    return b"\xcf\xfa\xed\xfe\0other\0" + text.encode() + b"\0behind\0"


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """No library is installed or kept. Returns where one would be installed, and a folder."""
    monkeypatch.setattr(prelude, "mx", types.SimpleNamespace(__file__=tmp_path / "mlx" / "core.so"))
    monkeypatch.setattr(prelude, "cache_directory", lambda: tmp_path)
    forget()
    yield tmp_path / prelude.LIBRARY, tmp_path
    forget()


def forget() -> None:
    """As in a new process."""
    prelude.text.cache_clear()
    prelude.missing.cache_clear()


def write_wheel(folder: Path, name: str) -> None:
    """A wheel for macOS that holds the library under `name`."""
    file = folder / f"mlx_metal-{VERSION}-py3-none-macosx_14_0_arm64.whl"
    about = f"mlx_metal-{VERSION}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: mlx-metal\nVersion: {VERSION}\n"
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr(name, library())
        wheel.writestr(f"{about}/METADATA", metadata)
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-macosx_14_0_arm64\n")


def ends(status: int, name: str | None = None):
    """A stand-in for `subprocess.run`: pip that ends with a status and leaves such a wheel."""

    def run(command, **_):
        if name is not None:
            write_wheel(Path(command[command.index("--dest") + 1]), name)
        return subprocess.CompletedProcess(command, status, "", "")

    return run


def test_it_is_the_installed_mlx_s():
    require(prelude.missing(), "MOEFLUX_REQUIRE_EMULATOR")
    text = prelude.text()
    assert text.lstrip().startswith("//")
    # A whole text: the last definitions of MLX's utils are there, and braces match.
    assert "schedule_row_tile" in text
    assert text.count("{") == text.count("}")
    # lint.ENDS stand for all versions only while no condition is an upper limit.
    conditions = re.findall(r"__METAL_VERSION__(?!\)? &&)\s*(\S+ \d+)", text)
    assert conditions
    assert all(condition.startswith(">= ") for condition in conditions), conditions


def test_text_in_a_library_is_found_whole():
    assert prelude.cut(library(), "made here") == TEXT
    # The last string of a file.
    assert prelude.cut(library()[: -len(b"\0behind\0")], "made here") == TEXT


MARK = "// Auto generated source for mlx/backend/metal/kernels/utils.h"
UNKNOWN = {
    "another prelude": (TEXT.replace(MARK, "// Written by hand"), "0 times, not once"),
    "two of them": (f"{TEXT}\0{TEXT}", "2 times, not once"),
    "no using directive": (TEXT.replace("using namespace metal;", ""), "using namespace metal;"),
    "a part": (TEXT[:200], "without"),
    "too much": (TEXT + "x" * prelude._MOST, "without []"),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_another_text_is_refused(what):
    text, words = UNKNOWN[what]
    with pytest.raises(prelude.PreludeUnknown, match=re.escape(words)) as error:
        prelude.cut(library(text), "made here")
    assert str(error.value).startswith("made here holds")
    assert str(error.value).endswith("change prelude.py.")


def test_no_utf_8_is_refused():
    with pytest.raises(prelude.PreludeUnknown):
        prelude.cut(library().replace("\u00a9".encode(), b"\xff"), "made here")


def test_a_mac_reads_what_it_computes_with(elsewhere, monkeypatch):
    installed, folder = elsewhere
    installed.parent.mkdir(parents=True)
    installed.write_bytes(library())
    monkeypatch.setattr(prelude.subprocess, "run", lambda *args, **kwargs: pytest.fail("pip"))
    assert prelude.text() == TEXT
    assert prelude.missing() is None
    assert not list(folder.glob("*.metal"))


def test_elsewhere_pip_gets_the_wheel_of_the_same_version_once(elsewhere, monkeypatch):
    _, folder = elsewhere
    wheels = folder / "wheels"
    wheels.mkdir()
    write_wheel(wheels, prelude.LIBRARY)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    assert prelude.text() == TEXT
    forget()
    monkeypatch.setattr(prelude.subprocess, "run", lambda *args, **kwargs: pytest.fail("pip"))
    assert prelude.text() == TEXT


@pytest.mark.usefixtures("elsewhere")
def test_a_wheel_without_the_library_is_an_error(monkeypatch):
    monkeypatch.setattr(prelude.subprocess, "run", ends(0, "mlx/lib/other.dylib"))
    with pytest.raises(prelude.PreludeUnknown, match=r"holds no mlx/lib/libmlx\.dylib"):
        prelude.missing()


def test_where_pip_gets_no_wheel_the_reason_is_pip_s(elsewhere, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(elsewhere[1]))
    reason = prelude.missing()
    assert reason is not None
    assert f"mlx-metal=={VERSION}" in reason
    assert "No matching distribution" in reason
    monkeypatch.setattr(prelude.subprocess, "run", ends(0))
    assert prelude.missing() == reason
    forget()
    assert str(prelude.missing()).endswith("it said nothing")
