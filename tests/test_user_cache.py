"""Oracle: the modes that were set here, and files whose content is known."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from mlx_moeflux import user_cache


@pytest.fixture
def root(monkeypatch, tmp_path):
    """A folder below one that nobody else can write to."""
    if not user_cache.is_private(tmp_path):
        pytest.skip("the temporary folder lies below one that others may rename")
    monkeypatch.setenv("MOEFLUX_CACHE_DIR", str(tmp_path / "own"))
    return tmp_path / "own"


def test_where_files_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/somebody")
    for name in ("MOEFLUX_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert user_cache.root() == Path("/home/somebody/.cache/mlx_moeflux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert user_cache.root() == Path("/xdg/mlx_moeflux")
    monkeypatch.setenv("MOEFLUX_CACHE_DIR", "~/kept")
    assert user_cache.root() == Path("/home/somebody/kept")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOEFLUX_CACHE_DIR", "kept")
    assert user_cache.root() == tmp_path / "kept"


def test_folders_are_the_users_alone(root):
    folder = user_cache.private("cuda", "v1")
    assert folder == root.resolve() / "cuda" / "v1"
    for made in (root, root / "cuda", folder):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert user_cache.private("cuda", "v1") == folder


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_write_to_is_refused(root, mode):
    user_cache.private("cuda")
    (root / "cuda").chmod(mode)
    assert user_cache.private("cuda") is None


def test_folders_above_keep_their_names(root):
    user_cache.private("cuda")
    root.chmod(0o777)
    assert user_cache.private("cuda") is None
    root.chmod(0o1777)
    assert user_cache.private("cuda") == root.resolve() / "cuda"


def test_a_folder_of_somebody_else_is_refused(root, monkeypatch):
    user_cache.private("cuda")
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    assert user_cache.private("cuda") is None


def test_a_link_to_an_open_folder_is_refused(root, tmp_path):
    user_cache.private()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (root / "cuda").symlink_to(tmp_path / "open")
    assert user_cache.private("cuda") is None


def test_no_folder_where_none_can_be_made(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MOEFLUX_CACHE_DIR", str(tmp_path / "file"))
    assert user_cache.private("cuda") is None
    (tmp_path / "round").symlink_to(tmp_path / "round")
    monkeypatch.setenv("MOEFLUX_CACHE_DIR", str(tmp_path / "round"))
    assert user_cache.private("cuda") is None


def test_a_file_is_replaced_at_once(tmp_path, monkeypatch):
    file = tmp_path / "file"
    user_cache.write(file, b"one")
    user_cache.write(file, b"two")
    assert file.read_bytes() == b"two"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        user_cache.write(file, b"three")
    assert [(f.name, f.read_bytes()) for f in tmp_path.iterdir()] == [("file", b"two")]
