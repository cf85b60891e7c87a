"""Oracle: files and dates of this test, and a reader that counts."""

from __future__ import annotations

import json
import os
from datetime import date, timedelta
from pathlib import Path

import pytest

from mlx_moeflux.errors import UnsupportedError
from mlx_moeflux.experts.streaming.store import DEFAULT_THREADS
from mlx_moeflux.measure import disk


@pytest.fixture
def kept(tmp_path, monkeypatch) -> Path:
    """The file that the speed of this disk is kept in; nothing large is written."""
    monkeypatch.setenv("MOEFLUX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(disk, "FILE_BYTES", 16 << 20)
    monkeypatch.setattr(disk, "DISK_SECONDS", 0.2)
    return tmp_path / "cache" / f"disk-{os.stat(tmp_path).st_dev:x}.json"


@pytest.fixture
def direct(monkeypatch) -> list[Path]:
    """Files that were measured by direct reads alone, at 2 bytes a second."""
    files = []

    def measure(experts, *, threads, readers=("direct", "pread")):
        assert threads == DEFAULT_THREADS
        if readers != ("direct",):
            return 1.0
        files.extend(disk.expert_files(experts))
        return 2.0

    monkeypatch.setattr(disk, "disk_bandwidth", measure)
    return files


def test_a_temporary_file_is_measured_once_and_removed(tmp_path, kept):
    folder = tmp_path / "empty"
    folder.mkdir()
    found = disk.disk_speed(folder)
    assert list(folder.iterdir()) == []
    if found is None:
        pytest.skip("this file system allows no reads past the page cache")
    assert found.bytes_per_second > 1e6
    assert found.age == "today"
    entry = json.loads(kept.read_text())
    assert entry == {"bytes_per_second": found.bytes_per_second, "day": date.today().isoformat()}
    day = date.today() - timedelta(days=3)
    kept.write_text(json.dumps({"bytes_per_second": 5e9, "day": day.isoformat()}))
    assert disk.disk_speed(folder) == (5e9, day)
    assert disk.disk_speed(folder).age == "3 days ago"


@pytest.mark.parametrize("content", [
    "", "[]", '{"bytes_per_second": 1}', '{"bytes_per_second": NaN, "day": "2026-01-01"}',
    '{"bytes_per_second": 0, "day": "2026-01-01"}', '{"bytes_per_second": 1, "day": "1.1.26"}',
    '{"bytes_per_second": [], "day": "2026-01-01"}', '{"bytes_per_second": 1, "day": 5}',
])  # fmt: skip
def test_what_was_kept_and_cannot_be_read_is_measured_anew(content, tmp_path, kept, direct):
    kept.parent.mkdir()
    kept.write_text(content)
    assert disk.disk_speed(tmp_path).bytes_per_second == 1.0
    assert json.loads(kept.read_text())["bytes_per_second"] == 1.0


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="direct reads see the page cache")
def test_the_models_own_file_is_read_if_it_is_large(tmp_path, kept, direct, monkeypatch):
    monkeypatch.setattr(disk, "LEAST_FILE_BYTES", 8 << 20)
    model = tmp_path / "model"
    (model / "experts").mkdir(parents=True)
    for name, size in (("a.bin", 7 << 20), ("experts/b.bin", 9 << 20)):
        (model / name).write_bytes(bytes(size))
    (model / "link.bin").symlink_to("nothing")
    os.mkfifo(model / "pipe")
    assert disk.disk_speed(model).bytes_per_second == 2.0
    assert direct == [model / "experts" / "b.bin"]
    kept.unlink()
    assert disk.disk_speed(model / "a.bin").bytes_per_second == 1.0
    kept.unlink()
    # Of a folder that is not there yet, the one above it is not searched.
    assert disk.disk_speed(model / "new" / "hub").bytes_per_second == 1.0


def test_a_disk_that_cannot_be_measured_is_unknown(tmp_path, kept, monkeypatch):
    def refuse(name, experts):
        raise UnsupportedError("no")

    monkeypatch.setattr(disk, "make_reader", refuse)
    assert disk.disk_speed(tmp_path) is None
    assert not kept.exists()
    monkeypatch.setattr(disk, "_fill", lambda fd: (_ for _ in ()).throw(OSError("full")))
    assert disk.disk_speed(tmp_path) is None
