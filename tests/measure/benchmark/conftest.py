"""One small synthetic checkpoint for all tests here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_moeflux.conversion.synthesize import synthesize
from mlx_moeflux.measure.benchmark import sides


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    return synthesize("qwen3.5-tiny", tmp_path_factory.mktemp("benchmark") / "model")


@pytest.fixture(scope="module")
def nothing_is_collected():
    """For tests that do not look at the memory that a program holds: each time that it is measured
    the garbage collector passes over all objects of a whole run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sides, "gc", SimpleNamespace(collect=lambda: 0))
        yield
