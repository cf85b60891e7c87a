"""Oracle: the contract of errors. Whatever is wrong with the input is one MoefluxError whose one
line names the file, the key or the limit; nothing is half-written."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.errors import (
    CheckpointError,
    ConfigError,
    ExpertFileError,
    InputError,
    MemoryBudgetError,
    MoefluxError,
    UnsupportedError,
)
from mlx_moeflux.loading import BUNDLED_MODEL, load, load_model

GOLDEN = Path(__file__).parent / "golden" / "text_top3"


@pytest.fixture
def model_dir(tmp_path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "model"))


def edit(directory: Path, **keys) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text())
    for key, value in keys.items():
        if value is ...:
            del config[key]
        else:
            config[key] = value
    file.write_text(json.dumps(config))


def edit_tensors(directory: Path, change) -> None:
    file = directory / "model.safetensors"
    tensors = mx.load(str(file))
    mx.eval(tensors)
    change(tensors)
    mx.save_safetensors(str(file), tensors)


def refused(kind: type[MoefluxError], action, *words: str) -> None:
    with pytest.raises(kind) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


CONFIGS = {
    "missing key": ({"hidden_size": ...}, ConfigError, ["config.json", "hidden_size"]),
    "wrong type": ({"hidden_size": "64"}, ConfigError, ["config.json", "hidden_size"]),
    "unknown key": ({"new_trick": 3}, ConfigError, ["new_trick", "strict_config"]),
    "zero": ({"num_experts": 0}, ConfigError, ["num_experts"]),
    "heads do not divide": ({"num_key_value_heads": 3}, ConfigError, ["num_key_value_heads"]),
    "more chosen than there are": ({"num_experts_per_tok": 99}, ConfigError, ["99"]),
    "other activation": ({"hidden_act": "gelu"}, UnsupportedError, ["hidden_act", "gelu"]),
    "other architecture": ({"model_type": "llama"}, UnsupportedError, ["llama", "config.json"]),
    "no architecture": ({"model_type": ...}, ConfigError, ["model_type"]),
    "more layers": ({"num_hidden_layers": 99, "layer_types": ...}, ConfigError, ["99", "tensors"]),
    "contradictory layers": ({"num_hidden_layers": 99}, ConfigError, ["layer_types"]),
    "other hidden size": ({"hidden_size": 512}, CheckpointError, ["512"]),
    "other expert count": ({"num_experts": 99}, CheckpointError, ["99", "experts"]),
    "contradictory rope": ({"rope_theta": 1.5}, ConfigError, ["rope_theta"]),
    "other rope": (
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
        UnsupportedError,
        ["llama3"],
    ),
    "awq": ({"quantization_config": {"quant_method": "awq"}}, UnsupportedError, ["awq"]),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_config(model_dir, case):
    keys, kind, words = CONFIGS[case]
    edit(model_dir, **keys)
    refused(kind, lambda: load_model(model_dir), *words)


def test_an_unknown_key_can_be_let_through(model_dir):
    tokens = mx.array([[1, 2, 3]])
    expected = load_model(model_dir)(tokens)
    edit(model_dir, new_trick=3, old_trick=None, no_trick=False)
    assert mx.array_equal(load_model(model_dir, strict_config=False)(tokens), expected)


def test_config_that_is_no_json(model_dir):
    (model_dir / "config.json").write_text("{")
    refused(ConfigError, lambda: load_model(model_dir), "config.json")
    (model_dir / "config.json").unlink()
    refused(ConfigError, lambda: load_model(model_dir), "config.json")


def test_tensors(model_dir):
    name = "model.layers.0.input_layernorm.weight"
    whole = (model_dir / "model.safetensors").read_bytes()

    def with_change(change, kind, *words):
        (model_dir / "model.safetensors").write_bytes(whole)
        edit_tensors(model_dir, change)
        refused(kind, lambda: load_model(model_dir), *words)

    with_change(lambda t: t.pop(name), CheckpointError, name, "lacks")
    with_change(lambda t: t.update(stray=t[name]), CheckpointError, "stray")
    with_change(lambda t: t.update({name: t[name][:-1] + 0}), CheckpointError, name, "shape")
    (model_dir / "model.safetensors").write_bytes(whole[:-5])
    refused(CheckpointError, lambda: load_model(model_dir), "model.safetensors", "truncated")
    (model_dir / "model.safetensors").write_bytes(whole + b"x")
    refused(CheckpointError, lambda: load_model(model_dir), "model.safetensors", "oversized")
    (model_dir / "model.safetensors").unlink()
    refused(CheckpointError, lambda: load_model(model_dir), str(model_dir))


def test_directories_and_options(tmp_path):
    refused(CheckpointError, lambda: load("no/such/model/here"), "no/such/model/here")
    refused(CheckpointError, lambda: load_model(tmp_path / "nothing"), "nothing")
    refused(MemoryBudgetError, lambda: load_model(BUNDLED_MODEL, expert_memory="1kB"), "663552")
    for memory in ("lots", "5 apples", "-3GB", "0%"):
        refused(InputError, lambda m=memory: load_model(BUNDLED_MODEL, expert_memory=m), memory)
    refused(InputError, lambda: load_model(BUNDLED_MODEL, expert_reader="carrier-pigeon"), "pigeon")
    refused(InputError, lambda: load_model(BUNDLED_MODEL, experts_per_token=5), "5", "1 to 4")
    refused(InputError, lambda: load_model(BUNDLED_MODEL, max_context=10**9), "8192")
    refused(InputError, lambda: load_model(BUNDLED_MODEL, eviction="magic"), "magic")


def test_the_budget_that_the_error_names_works():
    with load_model(BUNDLED_MODEL, expert_memory=663552) as model:
        assert set(model.plan.slots.values()) == {4}
        assert mx.isfinite(model(mx.array([[1, 2, 3]]))).all().item()
    refused(MemoryBudgetError, lambda: load_model(BUNDLED_MODEL, expert_memory=663551), "663552")


@pytest.mark.parametrize("layout", ["packed", "safetensors"])
def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch, layout):
    real, left = os.pwrite, [500_000]

    def filling(fd, data, offset):
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", filling)
    out = tmp_path / "out"
    refused((CheckpointError, ExpertFileError), lambda: convert(BUNDLED_MODEL, out, layout=layout))
    assert not (out / "config.json").exists()
    assert not list(out.rglob("*.safetensors"))
    monkeypatch.undo()
    convert(BUNDLED_MODEL, out, layout=layout)
    tokens = mx.array([[1, 2, 3]])
    assert mx.array_equal(load_model(out)(tokens), load_model(BUNDLED_MODEL)(tokens))


def test_free_space_is_looked_at_first(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    refused(MemoryBudgetError, lambda: convert(BUNDLED_MODEL, tmp_path / "out"), "1000", "free")


def test_a_directory_that_holds_something_is_not_touched(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    refused(InputError, lambda: convert(BUNDLED_MODEL, tmp_path), "not empty")
    refused(InputError, lambda: convert(BUNDLED_MODEL, BUNDLED_MODEL), "itself")
    assert [p.name for p in tmp_path.iterdir()] == ["precious.txt"]


@pytest.mark.slow
def test_two_conversions_into_one_directory(tmp_path):
    """The second, of another process, is refused; the lock goes with the first, even killed."""
    out = tmp_path / "out"
    code = (
        "import sys, os\nreal = os.pwrite\n"
        "os.pwrite = lambda *a: (print('go', flush=True), sys.stdin.readline(), real(*a))[2]\n"
        "from mlx_moeflux.conversion.convert import convert\n"
        f"convert({str(BUNDLED_MODEL)!r}, {str(out)!r}, layout='safetensors')\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with child:
        assert child.stdout.readline() == b"go\n"
        before = {f.name: f.stat().st_size for f in out.iterdir()}
        again = [sys.executable, "-m", "mlx_moeflux", "convert", "--layout", "safetensors"]
        again += ["--model", str(BUNDLED_MODEL), "--out", str(out)]
        second = subprocess.run(again, capture_output=True, text=True, check=False)
        assert (second.returncode, second.stdout) == (1, "")
        assert second.stderr.count("\n") == 1
        assert f"{out} is being written by another conversion" in second.stderr
        assert {f.name: f.stat().st_size for f in out.iterdir()} == before
        child.kill()
    convert(BUNDLED_MODEL, out, layout="safetensors")
    assert not [f.name for f in out.iterdir() if f.name.startswith(".") or f.suffix == ".tmp"]
    refused(InputError, lambda: convert(BUNDLED_MODEL, out, layout="safetensors"), "not empty")
    assert not (out / ".conversion.lock").exists()


def test_a_lock_that_its_owner_removed_is_not_taken(tmp_path, monkeypatch):
    """Between opening the file and locking it: the next owner may lock the next file."""
    out, lock = tmp_path / "out", fcntl.flock

    def late(fd, flags):
        (out / ".conversion.lock").unlink()
        lock(fd, flags)

    monkeypatch.setattr(fcntl, "flock", late)
    refused(InputError, lambda: convert(BUNDLED_MODEL, out), "another conversion")
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOLCK, "")))
    convert(BUNDLED_MODEL, out)


def kill_and_resume(tmp_path: Path, delay: float) -> None:
    out = tmp_path / f"out{delay}"
    code = (
        "import sys, os, time\nreal = os.pwrite\n"
        "os.pwrite = lambda *a: (time.sleep(0.0005), real(*a))[1]\n"
        "from mlx_moeflux.conversion.convert import convert\nprint('go', flush=True)\n"
        f"convert({str(BUNDLED_MODEL)!r}, {str(out)!r})\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    child.stdout.readline()
    time.sleep(delay)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    if not (out / "config.json").exists():
        with pytest.raises(MoefluxError):
            load_model(out)
        convert(BUNDLED_MODEL, out)
    clean = tmp_path / "clean"
    if not clean.exists():
        convert(BUNDLED_MODEL, clean)
    for file in clean.rglob("*"):
        if file.is_file() and file.name != "index.json":
            assert file.read_bytes() == (out / file.relative_to(clean)).read_bytes(), file.name
    assert not list(out.rglob("*.tmp"))


@pytest.mark.parametrize("delay", [pytest.param(0.05, marks=pytest.mark.slow), 0.4])
def test_kill_9_loses_nothing(tmp_path, delay):
    kill_and_resume(tmp_path, delay)


def test_kill_9_before_the_marker_is_whole_loses_nothing(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for name in (".conversion.lock", ".conversion.json.tmp"):
        (out / name).write_text("")
    convert(BUNDLED_MODEL, out)
    assert not [f.name for f in out.iterdir() if f.name.startswith(".") or f.suffix == ".tmp"]


@pytest.mark.slow
def test_kill_9_at_many_moments_loses_nothing(tmp_path):
    for step in range(25):
        kill_and_resume(tmp_path, 0.03 * step + 0.001)


@pytest.mark.parametrize("value", ["x" * 20_000, 10**4000, {"a": ["b"] * 4000}, "\n" * 5000])
def test_a_long_value_of_a_file_is_shortened(value):
    error = ConfigError(f"config.json: 'hidden_act' is {value!r}; only 'silu' is computed.")
    assert len(str(error)) <= 300
    assert str(error).startswith("config.json: 'hidden_act' is ")
    assert str(error).endswith("; only 'silu' is computed.")


def test_a_shortened_message_keeps_its_paths():
    paths = [f"/home/{'someone/' * 15}model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    error = ConfigError(f"{paths[0]} has tensor {'x' * 400!r}, and so has {paths[1]}; delete one.")
    for part in (*paths, "; delete one."):
        assert part in str(error)
    assert len(str(error)) < 500
