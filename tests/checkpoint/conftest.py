"""Builders of checkpoint files, right and wrong, that the tests of this folder share."""

import json
from pathlib import Path

import pytest


def build_safetensors(file: Path, header: dict | bytes, data: bytes = b"", *, length=None) -> None:
    """Write a safetensors file by hand; ``length`` overrides the announced header length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    announced = len(text) if length is None else length
    file.write_bytes(announced.to_bytes(8, "little") + text + data)


@pytest.fixture
def write_safetensors():
    """The builder above, as a fixture: test modules cannot import a conftest."""
    return build_safetensors
