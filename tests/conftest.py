"""Options of the test run."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--model", type=Path, help="a published checkpoint, for -m real")


@pytest.fixture
def real_model(request: pytest.FixtureRequest) -> Path:
    path = request.config.getoption("--model")
    if path is None:
        pytest.fail("give the checkpoint: pytest -m real --model DIR")
    return path
