"""Oracle: the kernel's own text, which the files must give back word for word."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_moeflux.kernels import cuda_cache, kept_files
from mlx_moeflux.kernels.metal import CudaBackend
from tests.kernels.harness import scratch_kernel

BODY = """
    if (thread_position_in_grid.x < uint(x_shape[0])) y[thread_position_in_grid.x] = simd_sum(x[0]);
"""


@pytest.fixture
def kernel():
    return scratch_kernel("cuda_cache", inputs=("x", "mask"), outputs=("y",), body=BODY)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    if not kept_files.is_private(tmp_path):
        pytest.skip("the temporary folder lies below one that others may rename")
    monkeypatch.setenv("MOEFLUX_CACHE_DIR", str(tmp_path / "own"))
    return tmp_path / "own" / cuda_cache.FOLDER


@pytest.fixture
def built(monkeypatch):
    """What MLX is asked to build."""
    asked = []
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **keywords: asked.append(keywords))
    return asked


def included(text):
    (path,) = re.findall(r'^#include "(.*)"$', text, re.M)
    return Path(path)


def test_mlx_is_handed_files_to_include(kernel, folder, built):
    CudaBackend().build(kernel)
    (asked,) = built
    header, body = kernel.cuda_text()
    assert included(asked["header"]).read_text() == header
    assert included(asked["source"]).read_text() == body
    assert included(asked["source"]).parent == folder.resolve()
    assert asked["input_names"] == ["x", "mask"]
    # MLX looks for the names of shapes in what it is handed.
    assert "x_shape" in asked["source"]
    assert "mask_shape" not in asked["source"]


def test_the_same_text_is_the_same_file_and_a_spoilt_one_is_mended(kernel, folder, built):
    CudaBackend().build(kernel)
    file = included(built[0]["header"])
    file.write_text("#error spoilt")
    CudaBackend().build(kernel)
    assert built[0] == built[1]
    assert file.read_text() == kernel.cuda_text()[0]


@pytest.mark.parametrize("name", ['quo"te', "bräu", "back\\slash", "new\nline"])
def test_text_stays_inline_where_a_path_cannot_be_included(
    kernel, built, monkeypatch, tmp_path, name
):
    monkeypatch.setenv("MOEFLUX_CACHE_DIR", str(tmp_path / name))
    CudaBackend().build(kernel)
    assert (built[0]["header"], built[0]["source"]) == kernel.cuda_text()


def test_text_stays_inline_without_a_private_folder(kernel, folder, built):
    CudaBackend().build(kernel)
    folder.chmod(0o777)
    CudaBackend().build(kernel)
    assert (built[1]["header"], built[1]["source"]) == kernel.cuda_text()


def test_text_stays_inline_where_nothing_can_be_written(kernel, folder, built, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept_files, "write", full)
    CudaBackend().build(kernel)
    assert (built[0]["header"], built[0]["source"]) == kernel.cuda_text()
