"""One small synthetic checkpoint for all tests here."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_moeflux.conversion.synthesize import synthesize


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    return synthesize("qwen3.5-tiny", tmp_path_factory.mktemp("benchmark") / "model")
