"""Oracle: a Metal that only takes notes."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_moeflux import generate, load
from mlx_moeflux.cli import main
from mlx_moeflux.errors import ExpertFileError, InputError, UnsupportedError
from mlx_moeflux.loading import BUNDLED_MODEL
from mlx_moeflux.measure.profile.capture import gpu_capture
from mlx_moeflux.models.moe import SparseMoeBlock


@pytest.fixture
def loaded():
    model, tokenizer = load(BUNDLED_MODEL)
    with model:
        yield model, tokenizer


@pytest.fixture
def notes(monkeypatch, loaded):
    """What a Metal that only takes notes was asked for, after the model was loaded."""
    taken = []
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx.metal, "start_capture", lambda path: taken.append(("start", path)))
    monkeypatch.setattr(mx.metal, "stop_capture", lambda: taken.append(("stop", "")))
    return taken


def test_one_layer_of_one_step(notes, loaded, tmp_path, monkeypatch):
    model, tokenizer = loaded
    expected = generate(model, tokenizer, "def f(x):", max_tokens=6)
    original = SparseMoeBlock.__call__

    def spy(self, *arguments):
        notes.append(("layer", self.layer))
        return original(self, *arguments)

    monkeypatch.setattr(SparseMoeBlock, "__call__", spy)
    file = tmp_path / "x.gputrace"
    kind = type(model.layers[2])
    with gpu_capture(model, file, layer=2, token=3):
        assert generate(model, tokenizer, "def f(x):", max_tokens=6) == expected
    start, stop = notes.index(("start", str(file))), notes.index(("stop", ""))
    assert notes[start + 1 : stop] == [("layer", 2)]
    assert len([n for n in notes if n[0] in ("start", "stop")]) == 2
    # Before it: six layers of the prompt, of two steps, and two layers of the third.
    assert start == 6 + 2 * 6 + 2
    assert type(model.layers[2]) is kind


def test_a_failure_ends_the_capture(notes, loaded, tmp_path, monkeypatch):
    model, tokenizer = loaded

    def fails(self, *arguments):
        if ("start", str(file)) in notes:
            raise ExpertFileError("no.")
        return original(self, *arguments)

    original, file = SparseMoeBlock.__call__, tmp_path / "x.gputrace"
    monkeypatch.setattr(SparseMoeBlock, "__call__", fails)
    with pytest.raises(ExpertFileError), gpu_capture(model, file, layer=0, token=1):
        generate(model, tokenizer, "def f(x):", max_tokens=6)
    assert notes == [("start", str(file)), ("stop", "")]


def test_metal_that_refuses(notes, loaded, tmp_path, monkeypatch):
    def refuse(path):
        raise RuntimeError("[metal::start_capture] Capture layer is not inserted.")

    model, tokenizer = loaded
    monkeypatch.setattr(mx.metal, "start_capture", refuse)
    with (
        pytest.raises(UnsupportedError, match="MTL_CAPTURE_ENABLED=1"),
        gpu_capture(model, tmp_path / "x.gputrace", token=1),
    ):
        generate(model, tokenizer, "def f(x):", max_tokens=6)
    assert notes == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layer": 6}, "layer 6 does not exist"),
        ({"layer": -1}, "layer -1 does not exist"),
        ({"token": 0}, "capture token is 0"),
        ({"token": 9}, "ended after 5 decode steps"),
    ],
)
def test_mistakes(notes, loaded, tmp_path, options, words):
    model, tokenizer = loaded
    with (
        pytest.raises(InputError, match=words),
        gpu_capture(model, tmp_path / "x.gputrace", **options),
    ):
        generate(model, tokenizer, "def f(x):", max_tokens=6)
    assert notes == []


@pytest.mark.parametrize("name", ["x.txt", "there.gputrace"])
def test_a_file_that_exists_or_has_another_ending(notes, loaded, tmp_path, name):
    (tmp_path / "there.gputrace").mkdir()
    with (
        pytest.raises(InputError, match="give another name"),
        gpu_capture(loaded[0], tmp_path / name),
    ):
        pass


@pytest.mark.skipif(mx.metal.is_available(), reason="here it works")
@pytest.mark.parametrize("command", ["generate", "benchmark"])
def test_elsewhere_it_is_one_line(command, capsys):
    assert main([command, "--gpu-capture", "x.gputrace"]) == 1
    err = capsys.readouterr().err.strip().splitlines()
    assert err[-1] == "error: a GPU capture needs Metal, which this machine does not have."
