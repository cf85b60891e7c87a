"""Numbers of 5,000 digits, halves of surrogate pairs, 1e19, and pipes, in every file that the
package writes and reads again: one line each, and the live state stays as it was."""

from __future__ import annotations

import json
import os
import shutil
import signal
import warnings
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_moeflux.cache.prompt.cache import PromptCache
from mlx_moeflux.cache.state.sequence import read_notes
from mlx_moeflux.cli import main
from mlx_moeflux.errors import InputError, MoefluxError
from mlx_moeflux.experts.telemetry.trace import Trace
from mlx_moeflux.loading import load_model
from mlx_moeflux.measure.tune import Tuning

TWIN = Path(__file__).parent / "golden" / "deepseek_v3_groups"
IDS = list(range(1, 20))
DIGITS = "9" * 5000
VALUES = [DIGITS, f'"{DIGITS}"', '"\\ud800"', "10000000000000000000", "1e19", "NaN", "[[]]"]


@pytest.fixture(autouse=True)
def _at_once():
    signal.alarm(60)
    yield
    signal.alarm(0)


@pytest.fixture(scope="module")
def model():
    with load_model(TWIN, expert_memory="50%") as model:
        yield model


def line_of(action) -> str:
    with pytest.raises(MoefluxError) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 600
    return text


def with_value(content: dict, name: str, value: str) -> str:
    return json.dumps(content | {name: "MARK"}).replace('"MARK"', value)


def with_fact(file: Path, name: str, value: str) -> None:
    """Set a fact of a safetensors file's metadata."""
    data = file.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:size])
    header["__metadata__"] = json.loads(json.dumps(header["__metadata__"]))
    meta = with_value(header["__metadata__"], name, value)
    text = json.dumps(header | {"__metadata__": "META"}).replace('"META"', meta).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[size:])


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", ["position", "version", "kinds", "identity", "digest"])
def test_state(model, tmp_path, name, value):
    state = model.make_cache()
    model(mx.array([IDS]), cache=state)
    state.save(tmp_path / "state")
    with_fact(tmp_path / "state", name, value)
    live = model.make_cache()
    model(mx.array([IDS[:3]]), cache=live)
    assert "state" in line_of(lambda: live.load(tmp_path / "state"))
    assert live.position == 3


@pytest.mark.parametrize("value", VALUES)
def test_notes(model, tmp_path, value):
    state = model.make_cache()
    model(mx.array([IDS]), cache=state)
    state.save(tmp_path / "state")
    with_fact(tmp_path / "state", "notes", value)
    line_of(lambda: read_notes(tmp_path / "state"))


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", ["end", "parent", "identity", "experts", "version"])
def test_node(model, tmp_path, name, value):
    def run():
        with PromptCache(tmp_path) as cache:
            resumed = cache.resume(model, IDS)
            logits = model(mx.array([IDS[resumed.position :]]), cache=resumed.state)[0, -1]
            resumed.reached(len(IDS), logits)
        return logits

    expected = run()
    (file,) = tmp_path.rglob("*.safetensors")
    with_fact(file, name, value)
    with warnings.catch_warnings(record=True) as said, PromptCache(tmp_path) as cache:
        warnings.simplefilter("always")
        resumed = cache.resume(model, IDS)
        if resumed.logits is None:
            found = model(mx.array([IDS[resumed.position :]]), cache=resumed.state)[0, -1]
        else:
            found = resumed.logits
    assert mx.array_equal(found, expected)
    for warning in said:
        assert "\n" not in str(warning.message)
        assert len(str(warning.message)) < 600


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(
    "name", ["num_experts", "experts_per_token", "layers", "block_bytes", "slots", "model", "cold"]
)
def test_trace(model, tmp_path, name, value):
    with model.trace(tmp_path / "trace"):
        mx.eval(model(mx.array([IDS])))
    line, records = (tmp_path / "trace").read_bytes().split(b"\n", 1)
    text = with_value(json.loads(line), name, value).encode()
    (tmp_path / "trace").write_bytes(text + b"\n" + records)
    if name == "model" and value.startswith('"'):
        assert Trace.open(tmp_path / "trace").calls
    else:
        assert "is not a trace" in line_of(lambda: Trace.open(tmp_path / "trace"))


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(
    "name", ["model", "expert_memory", "expert_reader", "expert_threads", "prefetch"]
)
def test_tuning(model, tmp_path, name, value):
    tuning = Tuning(model.identity, "50%", "pread", 2, "none", 0.1, 0.01, (0.1,))
    tuning.save(tmp_path / "tuning")
    content = json.loads((tmp_path / "tuning").read_text())
    (tmp_path / "tuning").write_text(with_value(content, name, value))
    if name == "expert_memory" and value == "10000000000000000000":
        load_model(TWIN, tuning=tmp_path / "tuning").close()  # as much as there is
    else:
        line_of(lambda: load_model(TWIN, tuning=tmp_path / "tuning"))


@pytest.mark.parametrize("threads", [0, -1, 257, 10**19, 2.0, "8", True])
def test_threads(threads):
    with pytest.raises(InputError, match="threads cannot read experts; give 1 to 256"):
        load_model(TWIN, expert_threads=threads)


@pytest.mark.parametrize("budget", ["9" * 400 + "%", "1" + "0" * 400 + "GB", float("inf"), "[]"])
def test_budgets(budget):
    line_of(lambda: load_model(TWIN, expert_memory=budget))


@pytest.mark.parametrize("name", ["state", "trace", "tuning", "node.safetensors"])
def test_a_pipe_in_their_place(model, tmp_path, name):
    os.mkfifo(tmp_path / name)
    reads = {
        "state": lambda: model.make_cache().load(tmp_path / name),
        "trace": lambda: Trace.open(tmp_path / name),
        "tuning": lambda: load_model(TWIN, tuning=tmp_path / name),
    }
    if name in reads:
        assert "no regular file" in line_of(reads[name])
        return
    with PromptCache(tmp_path / "cache") as cache:
        resumed = cache.resume(model, IDS)
        model(mx.array([IDS]), cache=resumed.state)
        resumed.reached(len(IDS))
    (file,) = (tmp_path / "cache").rglob("*.safetensors")
    file.unlink()
    shutil.move(tmp_path / name, file)
    with PromptCache(tmp_path / "cache") as cache, pytest.warns(UserWarning, match="no regular"):
        assert cache.resume(model, IDS).position == 0


@pytest.mark.parametrize(
    "words",
    [
        ["--seed", DIGITS],
        ["--expert-threads", "1" + "0" * 19],
        ["--expert-memory", DIGITS + "%"],
        ["--max-context", "1" + "0" * 19],
        ["--extra-eos-token", DIGITS],
        ["--chat-template-config", '{"a": ' + DIGITS + "}"],
        ["--prompt", "\udcff"],
    ],
)
def test_flags(words, capsys):
    try:
        status = main(["generate", "--max-tokens", "1", *words])
    except SystemExit as end:
        status = end.code
    errors = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert status in (1, 2)
    assert len(errors) == 1
