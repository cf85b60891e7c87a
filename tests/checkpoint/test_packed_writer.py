"""Crashes, full disks and resumption of a conversion; the oracle is the bytes meant to be there."""

import errno
import json
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from mlx_moeflux.checkpoint.formats.packed import PackedExperts, PackedWriter, verify
from mlx_moeflux.errors import ExpertFileError


@dataclass(frozen=True)
class Part:
    name: str
    dtype: str
    shape: tuple


PARTS = [Part(f"{p}_proj.weight", "U8", (5, 11)) for p in ("gate", "up", "down")]


def block(layer, expert):
    return [bytes([layer, expert, i]) * 18 + b"!" for i in range(3)]


def write_block(out, expert, parts):
    for component, data in zip(out.plan.components, parts, strict=True):
        out.write(expert, component.name, 0, data)


def write_layer(writer, layer):
    with writer.layer(layer, PARTS) as out:
        for e in range(writer.num_experts):
            write_block(out, e, block(layer, e))


def assert_holds(directory, layers, experts):
    packed = PackedExperts.open(directory)
    assert packed.layers == tuple(layers)
    for layer in layers:
        for i, refs in enumerate(packed.refs(layer).values()):
            for e in range(experts):
                raw = bytearray(55)
                refs[e].read_into(memoryview(raw))
                assert raw == block(layer, e)[i]
    verify(directory)
    assert sorted(os.listdir(directory / "experts")) == [
        "index.json", *(f"layer_{layer:02d}.bin" for layer in layers),
    ]  # fmt: skip


def test_finished_layers_are_kept_and_skipped(tmp_path):
    first = PackedWriter(tmp_path, 2, "a")
    write_layer(first, 3)

    def interrupted():
        with first.layer(4, PARTS) as out:
            write_block(out, 0, block(4, 0))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert sorted(os.listdir(tmp_path / "experts")) == [".progress.json", "layer_03.bin"]
    inode = (tmp_path / "experts" / "layer_03.bin").stat().st_ino
    second = PackedWriter(tmp_path, 2, "a")
    assert [second.done(layer) for layer in (3, 4)] == [True, False]
    write_layer(second, 4)
    second.finish([3, 4])
    assert (tmp_path / "experts" / "layer_03.bin").stat().st_ino == inode
    assert_holds(tmp_path, [3, 4], 2)


def test_a_finished_directory_is_done_and_finishing_again_changes_nothing(tmp_path):
    writer = PackedWriter(tmp_path, 2, "a")
    write_layer(writer, 0)
    writer.finish()
    again = PackedWriter(tmp_path, 2, "a")
    assert again.done(0)
    again.finish([0])
    assert_holds(tmp_path, [0], 2)


def test_a_finished_layer_whose_file_changed_size_is_not_done(tmp_path):
    writer = PackedWriter(tmp_path, 2, "a")
    write_layer(writer, 0)
    os.truncate(tmp_path / "experts" / "layer_00.bin", 100)
    again = PackedWriter(tmp_path, 2, "a")
    assert not again.done(0)
    with pytest.raises(ExpertFileError, match="layer 0 is not written"):
        again.finish([0])
    write_layer(again, 0)
    again.finish([0])
    assert_holds(tmp_path, [0], 2)


@pytest.mark.parametrize("place", [0, 20, 16_384, -1])
@pytest.mark.parametrize("finished", [False, True])
def test_layers_that_are_kept_are_checked(tmp_path, place, finished):
    """A machine that stopped may have lost bytes of files that were complete."""
    first = PackedWriter(tmp_path, 2, "a")
    for layer in (0, 3):
        write_layer(first, layer)
    if finished:
        first.finish()
    file = tmp_path / "experts" / "layer_03.bin"
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    writer = PackedWriter(tmp_path, 2, "a")
    assert [writer.done(layer) for layer in (0, 3)] == [True, False]
    with pytest.raises(ExpertFileError, match="layer 3 is not written"):
        writer.finish()
    write_layer(writer, 3)
    writer.finish()
    assert_holds(tmp_path, [0, 3], 2)


@pytest.mark.parametrize(("source", "experts"), [("b", 2), ("a", 3)])
def test_the_layers_of_another_unfinished_source_are_not_mixed_in(source, experts, tmp_path):
    write_layer(PackedWriter(tmp_path, 2, "a"), 3)
    (tmp_path / "experts" / "notes.txt").write_text("the user's own")
    writer = PackedWriter(tmp_path, experts, source)
    assert not writer.done(3)
    assert os.listdir(tmp_path / "experts") == ["notes.txt"]


@pytest.mark.parametrize("damage", [False, True])
def test_the_finished_experts_of_another_source_are_never_overwritten(damage, tmp_path):
    writer = PackedWriter(tmp_path, 2, "a")
    write_layer(writer, 3)
    writer.finish()
    if damage:
        (tmp_path / "experts" / "index.json").write_text("{}")
    with pytest.raises(ExpertFileError, match="already holds the experts of another"):
        PackedWriter(tmp_path, 2, "a" if damage else "b")
    assert (tmp_path / "experts" / "layer_03.bin").exists()


def test_a_damaged_progress_file_only_costs_the_work(tmp_path):
    write_layer(PackedWriter(tmp_path, 2, "a"), 0)
    (tmp_path / "experts" / ".progress.json").write_text('{"format": 1')
    writer = PackedWriter(tmp_path, 2, "a")
    assert not writer.done(0)
    write_layer(writer, 0)
    writer.finish()
    assert_holds(tmp_path, [0], 2)


def test_a_progress_file_that_leads_outside_deletes_nothing(tmp_path):
    write_layer(PackedWriter(tmp_path, 2, "a"), 0)
    file = tmp_path / "experts" / ".progress.json"
    progress = json.loads(file.read_text())
    progress["layers"]["0"]["file"] = "../precious.bin"
    file.write_text(json.dumps(progress))
    (tmp_path / "precious.bin").write_text("x")
    PackedWriter(tmp_path, 2, "b")
    assert (tmp_path / "precious.bin").exists()


CALLS = ("posix_fallocate", "pwrite", "fsync", "replace")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_says_what_was_needed_and_keeps_what_is_finished(
    call, code, tmp_path, monkeypatch
):
    writer = PackedWriter(tmp_path, 2, "a")
    write_layer(writer, 0)

    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail, raising=False)
        with pytest.raises(ExpertFileError) as caught:
            write_layer(writer, 1)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert f"needs {2 * 16384} bytes" in message
    assert "are free" in message
    assert "layer_01.bin" in message
    assert isinstance(caught.value.__cause__, OSError)
    assert sorted(os.listdir(tmp_path / "experts")) == [".progress.json", "layer_00.bin"]
    again = PackedWriter(tmp_path, 2, "a")
    assert again.done(0)
    write_layer(again, 1)
    again.finish([0, 1])
    assert_holds(tmp_path, [0, 1], 2)


def test_an_input_output_error_names_file_and_offset(tmp_path, monkeypatch):
    real = os.pwrite

    def fails_later(fd, view, offset):
        if offset >= 16384:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, view, offset)

    monkeypatch.setattr(os, "pwrite", fails_later)
    with pytest.raises(ExpertFileError) as caught:
        write_layer(PackedWriter(tmp_path, 2, "a"), 1)
    assert "layer_01.bin.tmp at offset 16384" in str(caught.value)
    assert os.strerror(errno.EIO) in str(caught.value)


@pytest.mark.parametrize("name", [".progress.json", "index.json"])
def test_a_disk_that_is_full_for_the_index_leaves_no_half_of_it(name, tmp_path, monkeypatch):
    writer = PackedWriter(tmp_path, 2, "a")
    if name == "index.json":
        write_layer(writer, 0)
    real = os.replace

    def fail(source, target):
        if os.path.basename(target) == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(ExpertFileError, match="are free"):
            writer.finish() if name == "index.json" else write_layer(writer, 0)
    assert not [f for f in os.listdir(tmp_path / "experts") if f.endswith(".tmp") or f == name]


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="there is no fallocate to refuse")
@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_that_cannot_reserve_space_is_written_all_the_same(
    code, tmp_path, monkeypatch
):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    writer = PackedWriter(tmp_path, 2, "a")
    write_layer(writer, 0)
    writer.finish()
    assert_holds(tmp_path, [0], 2)


def test_a_platform_without_fallocate(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    writer = PackedWriter(tmp_path, 2, "a")
    write_layer(writer, 0)
    writer.finish()
    assert_holds(tmp_path, [0], 2)


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ExpertFileError, match="cannot be prepared"):
        PackedWriter(tmp_path / "file", 2, "a")


KILL_EVERYWHERE = """
import os, signal, sys, tempfile
from pathlib import Path
import mlx_moeflux.checkpoint.formats.packed as packed
from test_packed_writer import assert_holds, write_layer

LAYERS = (3, 4)
root = Path(sys.argv[1])

def convert(directory):
    writer = packed.PackedWriter(directory, 2, "source")
    for layer in LAYERS:
        if not writer.done(layer):
            write_layer(writer, layer)
    writer.finish(LAYERS)

def killed_at(directory, point):
    '''Run in a child that kills itself before (even) or after (odd) a call; False: it ended.'''
    child = os.fork()
    if not child:
        count = 0
        def guarded(real):
            def call(*args, **kwargs):
                nonlocal count
                for step in (0, 1):
                    if count == point:
                        os.kill(os.getpid(), signal.SIGKILL)
                    count += 1
                    if step == 0:
                        result = real(*args, **kwargs)
                return result
            return call
        for name in ("pwrite", "fsync", "replace", "unlink", "posix_fallocate", "ftruncate"):
            if hasattr(os, name):
                setattr(os, name, guarded(getattr(os, name)))
        packed.LayerWriter._commit = guarded(packed.LayerWriter._commit)
        convert(directory)
        os._exit(0)
    return os.waitpid(child, 0)[1] == signal.SIGKILL

point = 0
while True:
    directory = root / str(point)
    died = killed_at(directory, point)
    finished = (directory / "experts" / "index.json").exists()
    if finished:
        packed.verify(directory)
    writer = packed.PackedWriter(directory, 2, "source")
    left = set(os.listdir(directory / "experts"))
    assert not [name for name in left if name.endswith(".tmp")], left
    whole = [layer for layer in LAYERS if writer.done(layer)]
    files = {layer: directory / "experts" / f"layer_{layer:02d}.bin" for layer in LAYERS}
    found = {layer: file.read_bytes() for layer, file in files.items() if file.exists()}
    kept = {layer: files[layer].stat().st_ino for layer in whole}
    convert(directory)
    assert_holds(directory, LAYERS, 2)
    assert all(files[layer].read_bytes() == content for layer, content in found.items())
    assert all(files[layer].stat().st_ino == inode for layer, inode in kept.items())
    if not died:
        break
    point += 1
print(point)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_before_or_after_any_system_call_loses_at_most_one_layer(tmp_path):
    """Every point of a conversion at which the files can change, one killed process each."""
    done = subprocess.run(
        [sys.executable, "-c", KILL_EVERYWHERE, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.path.dirname(__file__)])},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30
