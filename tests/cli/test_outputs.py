"""Files and streams that cannot be read or written: one line, status 1, no partial file."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mlx_moeflux.checkpoint import files
from mlx_moeflux.checkpoint.files import write_atomically, write_output
from mlx_moeflux.cli import main
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.errors import CheckpointError, InputError
from mlx_moeflux.experts.telemetry.events import Chosen
from mlx_moeflux.experts.telemetry.forecast import Profile
from mlx_moeflux.experts.telemetry.trace import Trace, TraceInfo, TraceWriter
from mlx_moeflux.loading import BUNDLED_MODEL, load, load_model
from mlx_moeflux.measure.benchmark import report

needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
MODEL = str(BUNDLED_MODEL)


def shell(command: str, folder: Path) -> tuple[int, str, list[str]]:
    """Return status, stdout and the lines of stderr, apart from the plan.

    The streams are buffered, whatever the environment says: only then is something left for
    Python's flush at exit.
    """
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    script = command.replace("RUN", f"'{sys.executable}' -m mlx_moeflux")
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stderr.splitlines() if not line.startswith("experts ")]
    return done.returncode, done.stdout, lines


@pytest.mark.parametrize("command", ["RUN policies", pytest.param(
    "RUN generate --max-tokens 2 --verbose false -p 'def f'", marks=pytest.mark.slow
)])  # fmt: skip
class TestStreams:
    """In processes of their own, because the streams are the process's."""

    @needs_full
    def test_stdout_is_full_or_closed(self, tmp_path, command):
        for redirection, why in (("> /dev/full", "No space left on device"), (">&-", "Bad file")):
            status, _, lines = shell(f"{command} {redirection}", tmp_path)
            (line,) = lines
            assert status == 1
            assert line.startswith(f"error: the output cannot be read or written: {why}")

    def test_closed_stderr_costs_nothing_but_its_lines(self, tmp_path, command):
        status, text, lines = shell(f"{command}; {command} 2>&-", tmp_path)
        assert (status, lines) == (0, [])
        assert text[: len(text) // 2] == text[len(text) // 2 :] != ""
        status, _, lines = shell(f"{command} --nonsense 2>&-", tmp_path)
        assert status != 0
        assert lines == []

    @needs_full
    def test_what_cannot_be_said_is_a_status(self, tmp_path, command):
        assert shell("RUN trace show /nowhere 2>/dev/full", tmp_path) == (1, "", [])
        assert shell(f"{command} --nonsense 2>/dev/full", tmp_path) == (2, "", [])


@pytest.fixture
def small_files():
    """Files of this process have at most 20 kB, as with ``ulimit -f``."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize(
    "arguments",
    [
        ["cache_prompt", "--prompt", "def f", "--prompt-cache-file", "state"],
        ["convert", "--model", MODEL, "--out", "out"],
        ["convert", "--model", MODEL, "--out", "out", "--layout", "safetensors"],
    ],
)
def test_a_file_that_gets_too_large(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    lines = capsys.readouterr().err.splitlines()
    assert "error: " in lines[-1]
    assert "File too large" in lines[-1]
    assert len([line for line in lines if not line.startswith("experts ")]) == 1
    left = {file.name for file in tmp_path.rglob("*") if file.is_file()}
    if arguments[0] == "convert":
        assert left <= {".conversion.json"}
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (-1, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        )
        assert main(arguments) == 0
        load_model(tmp_path / "out").close()
    else:
        assert not left


INFO = TraceInfo(4, 2, (0,), {0: 100})


@pytest.mark.usefixtures("small_files")
def test_what_a_trace_has_before_the_disk_is_full_can_be_read(tmp_path):
    ids, weights = np.zeros((500, 2), np.uint32), np.zeros((500, 2), np.float32)
    trace = TraceWriter(tmp_path / "trace", INFO)
    for token in range(20):
        trace(Chosen(0, 500 * token, ids, weights))
    with pytest.raises(InputError, match="trace cannot be written: File too large"):
        trace.close()
    assert len(Trace.open(tmp_path / "trace").calls) == 4


@needs_full
def test_a_trace_on_a_full_disk():
    with pytest.raises(InputError, match="/dev/full cannot be written: No space left"):
        TraceWriter("/dev/full", INFO).close()


@pytest.fixture
def pipe(tmp_path) -> Path:
    """Like a device, a rename would remove it."""
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.parametrize("arguments", [["cache_prompt", "--prompt", "def", "--prompt-cache-file"]])
def test_a_device_is_not_replaced(pipe, arguments, capsys):
    assert main([*arguments, str(pipe)]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == f"error: Writing {pipe} failed: it is no regular file."
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert [file.name for file in pipe.parent.iterdir()] == ["pipe"]


def test_outputs_are_regular_files(pipe, tmp_path):
    times = Profile(1.0, 0.0, (1.0,))
    for write in (times.save, lambda file: write_output(file, b"")):
        with pytest.raises(InputError, match="pipe cannot be written: it is no regular file"):
            write(pipe)
        with pytest.raises(InputError, match="cannot be written: No such file"):
            write(tmp_path / "none" / "file")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    with pytest.raises(InputError, match="pipe cannot be read: it is no regular file"):
        report.write_markdown(None, pipe)


def test_what_is_appended_to_may_have_any_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "markdown", lambda _: "a table\n")
    (tmp_path / "results.md").write_bytes(b"caf\xe9\n\n")
    report.write_markdown(None, tmp_path / "results.md")
    assert (tmp_path / "results.md").read_bytes() == b"caf\xe9\n\na table\n"


def refuse(monkeypatch, name: str) -> None:
    """Let no file of this name be opened for reading, also by root."""
    real = files.open_regular

    def opened(file, *flags):
        if Path(file).name == name:
            raise PermissionError(13, "Permission denied", str(file))
        return real(file, *flags)

    monkeypatch.setattr(files, "open_regular", opened)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_without_permission(tmp_path, monkeypatch, name):
    refuse(monkeypatch, name)
    for act in (lambda: convert(BUNDLED_MODEL, tmp_path / "out"), lambda: load(BUNDLED_MODEL)):
        with pytest.raises((CheckpointError, ValueError), match=f"{name} cannot be read: Permiss"):
            act()
    assert not (tmp_path / "out" / "config.json").exists()
    monkeypatch.undo()
    convert(BUNDLED_MODEL, tmp_path / "out")
    assert (tmp_path / "out" / name).read_bytes() == (BUNDLED_MODEL / name).read_bytes()


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_bytes(b"old")

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(file, b"new")
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]
