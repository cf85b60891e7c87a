"""Oracle: a file that was just read is in memory, one that was evicted is not."""

from __future__ import annotations

import os
import sys

import pytest

from mlx_moeflux.measure.benchmark import pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, evicts pages")


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


def test_the_peak_of_this_process_only_grows():
    before = pages.peak_process_bytes()
    held = bytearray(os.urandom(1 << 20) * 64)
    assert pages.peak_process_bytes() >= before > len(held) // 64
