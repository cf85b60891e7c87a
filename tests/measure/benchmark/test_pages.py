"""Oracle: a file that was just read is in memory, one that was evicted is not."""

from __future__ import annotations

import fcntl
import os
import sys

import pytest

from mlx_moeflux.measure.benchmark import pages

linux = pytest.mark.skipif(
    sys.platform != "linux" or not pages.can_evict(), reason="reads /proc, evicts pages"
)


@pytest.mark.parametrize(
    ("missing", "there", "title", "note"),
    [
        ([], [], "cold disk", ""),
        (["posix_fadvise"], ["F_NOCACHE"], "past the page cache", "not emptied: files are written"),
        (["posix_fadvise"], [], "page cache not emptied", "this system offers no way"),
    ],
)
def test_how_a_disk_is_read_is_said(monkeypatch, missing, there, title, note):
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: None, raising=False)
    monkeypatch.delattr(fcntl, "F_NOCACHE", raising=False)
    for name in missing:
        monkeypatch.delattr(os, name)
    for name in there:
        monkeypatch.setattr(fcntl, name, 48, raising=False)
    found = pages.cold_reads()
    assert found.title == title
    assert note in found.note
    assert bool(found.note) != pages.can_evict()


@linux
def test_evicted_and_read_again(tmp_path):
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_bytes(os.urandom(4 << 20))
    assert pages.cached_share(files) > 0.95
    assert pages.evict(files)
    if pages.cached_share(files) > 0.02:
        pytest.skip("this file system keeps its pages")
    before = pages.bytes_from_disk()
    files[0].read_bytes()
    assert 0.45 < pages.cached_share(files) < 0.55
    assert pages.bytes_from_disk() - before in (0, *range(4 << 20, 5 << 20))


def test_an_empty_file_has_no_pages(tmp_path):
    file = tmp_path / "empty"
    file.touch()
    assert pages.cached_share([file]) is None


@linux
def test_the_peak_of_this_process_only_grows():
    before = pages.peak_process_bytes()
    held = bytearray(os.urandom(1 << 20) * 64)
    assert pages.peak_process_bytes() >= before > len(held) // 64
