"""What is in the place of a file and is none: a pipe, a device, a folder. One line, at once."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from mlx_moeflux.checkpoint.files import read_whole
from mlx_moeflux.checkpoint.formats.gguf import gguf_metadata
from mlx_moeflux.cli import main
from mlx_moeflux.errors import CheckpointError, MoefluxError
from mlx_moeflux.experts.telemetry.forecast import Profile
from mlx_moeflux.experts.telemetry.trace import Trace
from mlx_moeflux.kernels import dispatch
from mlx_moeflux.loading import BUNDLED_MODEL, load, load_model

TWIN = Path(__file__).parents[1] / "golden" / "text_top3"


def pipe(file: Path) -> None:
    os.mkfifo(file)


def device(file: Path) -> None:
    file.symlink_to("/dev/zero")


every_kind = pytest.mark.parametrize("make", [pipe, device, Path.mkdir])


@pytest.fixture(autouse=True)
def _at_once():
    """A read that waits ends the test."""
    signal.alarm(20)
    yield
    signal.alarm(0)


def names(directory: Path) -> list[str]:
    found = (file for file in directory.rglob("*") if file.is_file())
    return sorted(str(file.relative_to(directory)) for file in found)


@every_kind
@pytest.mark.parametrize(
    ("source", "name"),
    [(BUNDLED_MODEL, name) for name in names(BUNDLED_MODEL)]
    + [(TWIN, name) for name in ("config.json", "model.safetensors")],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_every_file_of_a_checkpoint(tmp_path, source, name, make):
    directory = shutil.copytree(source, tmp_path / "model", copy_function=os.symlink)
    (directory / name).unlink()
    make(directory / name)
    with pytest.raises(MoefluxError) as caught:
        (load if source == BUNDLED_MODEL else load_model)(directory, expert_memory="100%")
    assert "\n" not in str(caught.value)
    assert Path(name).name in str(caught.value)


@every_kind
def test_files_that_are_given(tmp_path, monkeypatch, make):
    file = tmp_path / "it.gguf"
    make(file)
    monkeypatch.setenv(dispatch.ENVIRONMENT, str(file))
    for read in (gguf_metadata, Trace.open, Profile.open, lambda _: dispatch.read()):
        with pytest.raises(MoefluxError, match=r"it\.gguf cannot be read: (it is no reg|Is a dir)"):
            read(file)


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    file = tmp_path / "config.json"
    file.write_bytes(b" " * 11)
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read: it has 11 bytes"):
        read_whole(file, most=10)


def test_results_are_not_appended_to_a_device(capsys):
    assert main(["benchmark", "--markdown", "/dev/full"]) == 1
    assert capsys.readouterr().err == "error: /dev/full is no regular file; choose another.\n"
