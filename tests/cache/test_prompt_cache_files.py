"""Oracle: the same prompt without a cache. Damaged files and other users of the directory lose or
mix nothing and change no text."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_moeflux.cache.prompt.cache import PromptCache
from mlx_moeflux.cache.prompt.disk import PromptDirectory
from mlx_moeflux.cache.state import files as statefile
from tests.models_at_hand import model_of, reply, texts

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    with model_of("hybrid", tmp_path_factory.mktemp("hybrid")) as model:
        yield model


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "prompts"


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/*"), key=lambda path: path.stat().st_size)


@contextlib.contextmanager
def warned(match: str):
    """Exactly one warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert len(caught) == 1, [str(w.message) for w in caught]
    text = str(caught[0].message)
    assert match in text
    assert "\n" not in text


def fill(model, directory, *prompts, **options):
    with PromptCache(directory, every=None, **options) as cache:
        for prompt in prompts:
            reply(model, prompt, cache, breakpoints=[40])


def flipped(at):
    def change(path, _):
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    return change


def cut(path, _):
    path.write_bytes(path.read_bytes()[:-7])


def emptied(path, _):
    path.write_bytes(b"")


def foreign(path, _):
    mx.save_safetensors(str(path), {"tokens": mx.array([1, 2, 3])})


def exchanged(path, other):
    path.write_bytes(other.read_bytes())


FAULTS = {
    "flipped in the state": (flipped(-2000), "digest does not match"),
    "flipped in the tokens": (flipped(-3), "not what its name says"),
    "flipped in the facts": (flipped(60), "A stored prompt is ignored"),
    "cut short": (cut, "is truncated"),
    "empty": (emptied, "too few for a safetensors header"),
    "of another program": (foreign, "no mlx_moeflux.prompt file"),
    "another node's": (exchanged, "not what its name says"),
}


# Each fault once, but those that a digest or a header finds as it finds others.
USUAL = {"flipped in the state": "beginning", "flipped in the tokens": "end", "cut short": "end"}
USUAL |= {"another node's": "beginning"}


@pytest.mark.parametrize(
    ("which", "fault"),
    [
        pytest.param(which, fault, marks=[pytest.mark.slow] * (USUAL.get(fault) != which))
        for which in ("beginning", "end")
        for fault in FAULTS
    ],
)
def test_a_bad_file_is_ignored_with_one_warning(model, directory, fault, which):
    (prompt,) = texts(1)
    expected, _ = reply(model, prompt)
    fill(model, directory, prompt)
    by_end = sorted(files(directory), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    assert len(by_end) == 2
    beginning, end = by_end
    change, message = FAULTS[fault]
    path, other = (beginning, end) if which == "beginning" else (end, beginning)
    change(path, other)
    with PromptCache(directory, every=None) as cache:
        with warned(message):
            got = [reply(model, prompt, cache, breakpoints=[40]) for _ in range(2)]
        assert [ids for ids, _ in got] == [expected, expected]
        assert [read for _, read in got] == [49 if which == "beginning" else 9, 0]
    with PromptCache(directory, every=None) as cache:
        assert reply(model, prompt, cache) == (expected, 0)


def test_a_parent_is_used_later_than_its_child_whichever_threads_say_so(tmp_path, monkeypatch):
    """The pruning removes children first. The first thread is slow to set its time."""
    files, root = PromptDirectory(tmp_path, 1 << 20), SimpleNamespace(key="model")
    parent, child = SimpleNamespace(key="parent"), SimpleNamespace(key="child")
    paths = [files._path(root, node) for node in (parent, child)]
    paths[0].parent.mkdir()
    for path in paths:
        path.touch()
    begun, utime = threading.Event(), os.utime

    def slow(*args, **options):
        if not begun.is_set():
            begun.set()
            time.sleep(0.1)
        utime(*args, **options)

    monkeypatch.setattr(os, "utime", slow)
    first = threading.Thread(target=files.touch, args=([parent], root))
    first.start()
    assert begun.wait(10)
    files.touch([parent, child], root)
    first.join()
    files.close()
    late, early = (path.stat().st_mtime_ns for path in paths)
    assert late > early


def test_files_that_belong_to_nobody_are_left_alone(model, directory):
    (prompt,) = texts(1)
    fill(model, directory, prompt)
    folder = next(directory.iterdir())
    (folder / "notes.txt").write_text("mine")
    (directory / "more").mkdir()
    (directory / "more" / "x.safetensors").write_text("mine too")
    fill(model, directory, *texts(2), disk_bytes=1)
    left = [path for path in files(directory) if path.name not in ("notes.txt", "x.safetensors")]
    assert left == []
    assert (folder / "notes.txt").exists()
    assert (directory / "more" / "x.safetensors").exists()


def test_nothing_is_written_twice(model, directory):
    prompts = texts(1, 2)
    fill(model, directory, *prompts)
    before = {path: path.read_bytes() for path in files(directory)}
    for _ in range(2):
        with PromptCache(directory, every=None) as cache:
            for prompt in prompts:
                assert reply(model, prompt, cache, breakpoints=[40])[1] == 0
            assert cache.bytes_written == 0
    assert {path: path.read_bytes() for path in files(directory)} == before
    # 40 tokens once, two ends.
    assert len(before) == 3


def test_the_directory_keeps_to_its_limit_and_loses_the_oldest_ends_first(model, directory):
    prompts = texts(*range(5))
    fill(model, directory, *prompts[:1])
    size = sum(path.stat().st_size for path in files(directory))
    with PromptCache(directory, every=None, memory_bytes=1, disk_bytes=2 * size) as cache:
        for prompt in prompts:
            reply(model, prompt, cache)
            cache.flush()
            assert sum(path.stat().st_size for path in files(directory)) <= 2 * size
        assert reply(model, prompts[-1], cache)[1] == 0
        assert reply(model, prompts[0], cache)[1] == 9
    stale, fresh = (directory / "x" / f".{name}.tmp" for name in ("stale", "fresh"))
    stale.parent.mkdir()
    for path in (stale, fresh):
        path.write_text("half")
    os.utime(stale, (0, 0))
    fill(model, directory, *texts(9))
    assert not stale.exists()
    assert fresh.exists()


@pytest.mark.slow
def test_files_that_another_process_removed_are_not_missed(model, directory):
    (prompt,) = texts(1)
    expected, _ = reply(model, prompt)
    with PromptCache(directory, every=None, memory_bytes=1) as cache:
        reply(model, prompt, cache, breakpoints=[40])
        cache.flush()
        for path in files(directory):
            path.unlink()
        assert reply(model, prompt, cache) == (expected, 49)
        cache.flush()
        assert reply(model, prompt, cache) == (expected, 0)
        # In memory it goes on, and what stands on it is written whole again.
    with PromptCache(directory, every=None) as cache:
        reply(model, prompt, cache, breakpoints=[40])
        for path in files(directory):
            path.unlink()
        longer = [*prompt, 5, 6]
        reply(model, longer, cache)
    with PromptCache(directory, every=None) as cache:
        assert reply(model, longer, cache)[1] == 0


def test_a_full_disk_costs_one_warning(model, directory, monkeypatch):
    (prompt,) = texts(1)
    expected, _ = reply(model, prompt)

    def full(fd):
        raise OSError(28, "No space left on device")

    with PromptCache(directory, every=None) as cache:
        monkeypatch.setattr(statefile.os, "fsync", full)
        assert reply(model, prompt, cache)[0] == expected
        with warned("the disk is full"):
            cache.flush()
        monkeypatch.undo()
        assert reply(model, prompt, cache) == (expected, 0)
        assert files(directory) == []


WRITE = """
import sys, time
from pathlib import Path
from mlx_moeflux.cache.state import files as statefile
from mlx_moeflux.cache.prompt.cache import PromptCache
from mlx_moeflux.cache.prompt.disk import PromptDirectory
from tests.models_at_hand import TWIN, model_of, reply, texts

directory, which, slow = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "slow"
replace = statefile.os.replace
def slowly(*names):
    print("written", flush=True)
    time.sleep(60 if slow else 0)
    replace(*names)
statefile.os.replace = slowly
with model_of("hybrid", Path(directory)) as model, PromptCache(directory, every=None) as cache:
    for prompt in texts(which, which + 1):
        print(reply(model, prompt, cache, breakpoints=[40])[0], flush=True)
"""


def start(directory, which, speed):
    return subprocess.Popen(
        [sys.executable, "-c", WRITE, str(directory), str(which), speed],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_kill_in_the_middle_of_a_write_leaves_nothing_that_is_believed(model, directory):
    prompts = texts(1, 2)
    expected = [reply(model, prompt)[0] for prompt in prompts]
    fill(model, directory, prompts[1])
    process = start(directory, 1, "slow")
    try:
        for line in process.stdout:
            if line == "written\n":
                break
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert any(path.suffix == ".tmp" for path in files(directory))
    with PromptCache(directory, every=None) as cache:
        for prompt, ids, read in zip(prompts, expected, [9, 0], strict=True):
            assert reply(model, prompt, cache) == (ids, read)


@pytest.mark.slow
def test_two_processes_share_a_directory(model, directory):
    prompts = texts(1, 2, 3)
    expected = [reply(model, prompt)[0] for prompt in prompts]
    directory.mkdir()
    with PromptCache(directory, every=None) as mine:
        processes = [start(directory, which, "fast") for which in (1, 2)]
        said = [process.communicate(timeout=120)[0].splitlines() for process in processes]
        assert [process.returncode for process in processes] == [0, 0]
        for lines, pair in zip(said, (expected[:2], expected[1:]), strict=True):
            assert [line for line in lines if line != "written"] == [str(ids) for ids in pair]
        for prompt, ids in zip(prompts, expected, strict=True):
            assert reply(model, prompt, mine) == (ids, 0)
        assert mine.bytes_written == 0
    assert all(path.suffix == ".safetensors" for path in files(directory))


def test_writing_does_not_hold_up_the_reply(model, directory, monkeypatch):
    replace, (prompt,), replied = os.replace, texts(1), threading.Event()

    def slowly(*names):
        assert replied.wait(60)
        replace(*names)

    monkeypatch.setattr(statefile.os, "replace", slowly)
    with PromptCache(directory, every=None) as cache:
        reply(model, prompt, cache)
        assert not [path for path in files(directory) if path.suffix != ".tmp"]
        replied.set()
    assert len(files(directory)) == 1


def test_the_directory_is_not_looked_through_after_every_file(model, directory, monkeypatch):
    looks, glob = [], Path.glob

    def counted(path, pattern, **options):
        looks.append(pattern)
        return glob(path, pattern, **options)

    state = model.make_cache()
    model(mx.array([[1, 2, 3]]), state)
    with PromptCache(directory, disk_bytes=10_000_000) as cache:
        cache.store(model, [0, 2, 3], state)
        cache.flush()
        monkeypatch.setattr(Path, "glob", counted)
        for i in range(1, 41):
            cache.store(model, [i, 2, 3], state)
        cache.flush()
        parts = cache.bytes_written // (10_000_000 // 64)
        assert 3 <= parts <= 10
        assert parts - 2 <= len(looks) <= parts
