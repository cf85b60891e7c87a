"""Options of the test run, and how a run of everything is spread over processes."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

MOST_PROCESSES = 8
# Each process has a core: libraries that start a thread for every core only get in the way.
ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "RAYON_NUM_THREADS")
# Thousands of tests need the same memory again: what glibc gives back is faulted in anew.
KEPT_MEMORY = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
# Child processes read the package's bytecode: compiling it takes longer than most of them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Stock products of float32 are TF32 on some GPUs unless this is 0: 11 bits in what tests compare
# with.
os.environ.setdefault("MLX_ENABLE_TF32", "0")
# The package's own choice of kernels, not what somebody measured on this machine.
TABLE = Path(__file__).parents[1] / "mlx_moeflux" / "kernels" / "dispatch.json"
os.environ.setdefault("MOEFLUX_DISPATCH", str(TABLE))

# On a busy machine every time limit is too short.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--model", type=Path, help="a published checkpoint, for -m real")


def pytest_configure() -> None:
    """Handle Ctrl-C, which the background processes of some shells ignore from their start: tests
    send it to themselves and to their children. Children give memory back as those of users do:
    glibc reads its variables when a process starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTEST_XDIST_WORKER" in os.environ:
        for name in KEPT_MEMORY:
            os.environ.pop(name, None)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Without paths and without -n, and where pytest-xdist is there, a process for each core; the
    tests of a file stay together, because they share models."""
    option = config.option
    everything = (
        config.args_source is not pytest.Config.ArgsSource.ARGS
        and "not slow" in option.markexpr
        and not (option.usepdb or option.trace or option.collectonly)
    )
    there = config.pluginmanager.hasplugin("xdist") and not hasattr(config, "workerinput")
    if not (everything and there and option.numprocesses is None and option.dist == "no"):
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if cores > 1:
        option.numprocesses, option.dist = min(cores, MOST_PROCESSES), "loadfile"
        for name in ONE_THREAD:
            os.environ.setdefault(name, "1")
        for name in KEPT_MEMORY:
            os.environ.setdefault(name, "4000000000")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """On the CPU: a GPU would compile for minutes what lays out the cases. From then on the garbage
    collector leaves out thousands of tests, with which a round takes a second, and its rounds over
    all that lives, a fifth of a second each, come a tenth as often."""
    import mlx.core as mx  # reads the variable above

    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, 100)
        mx.set_default_device(device)


@pytest.fixture(scope="session", autouse=True)
def nothing_waits_for_the_disk():
    """What is written here need not outlast a loss of power: to wait until it has reached the disk
    takes milliseconds for each of thousands of files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # which refuses what is no open file, too
        yield


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory) -> Path:
    """A folder with two layers of qwen3.5-tiny, a delta net's and one of attention, the same of
    qwen4-exp-tiny, and two layers of deepseek-tiny and glm-5-tiny, each in a folder of its name."""
    from mlx_moeflux.conversion import synthesize

    root = tmp_path_factory.mktemp("two-layers")
    with pytest.MonkeyPatch.context() as patch:
        for family, options in (("qwen3.5-tiny", {}), ("qwen4-exp-tiny", {"ple_layer_ids": (1,)})):
            options |= {"full_attention_interval": 2}
            shape = dataclasses.replace(synthesize.SHAPES[family], **options)
            patch.setitem(synthesize.SHAPES, family, shape)
        for family in ("qwen3.5-tiny", "qwen4-exp-tiny", "deepseek-tiny", "glm-5-tiny"):
            synthesize.synthesize(family, root / family, layers=2, experts=16)
    return root


@pytest.fixture(scope="session")
def two_bundled_layers(tmp_path_factory) -> Path:
    """The bundled model's first delta net and its first layer of attention, in a third of its time;
    the text is no sentence, but does not stay on one token."""
    import mlx.core as mx

    from mlx_moeflux.loading import BUNDLED_MODEL

    kept, prefix = (0, 2), "language_model.model.layers."
    path = tmp_path_factory.mktemp("two-bundled-layers")

    def of_two(named: dict) -> dict:
        found = {}
        for name, value in named.items():
            head, _, rest = name.removeprefix(prefix).partition(".")
            if not name.startswith(prefix):
                found[name] = value
            elif int(head) in kept:
                found[f"{prefix}{kept.index(int(head))}.{rest}"] = value
        return found

    config = json.loads((BUNDLED_MODEL / "config.json").read_text())
    config |= {key: of_two(config[key]) for key in ("quantization", "quantization_config")}
    types = [config["text_config"]["layer_types"][layer] for layer in kept]
    config["text_config"] |= {
        "num_hidden_layers": 2, "layer_types": types, "full_attention_interval": 2
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    tensors = mx.load(str(BUNDLED_MODEL / "model.safetensors"))
    mx.save_safetensors(str(path / "model.safetensors"), of_two(tensors), {"format": "mlx"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL / name, path)
    return path


@pytest.fixture
def uncompiled():
    """What ``mx.compile`` returned runs as it is: for what follows from steps that are traced,
    where the CPU would compile 46 kernels at first. That a trace gives what its model gives is
    tests/models/test_compiled.py's."""
    import mlx.core as mx

    if mx.default_device() == mx.cpu:
        mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()


@pytest.fixture
def buffers_are_free(monkeypatch):
    """Buffers of reads do not count: on a GPU they are larger than all experts of a twin."""
    from mlx_moeflux.loading import stores

    monkeypatch.setattr(stores, "staging_bytes", lambda *args: 0)
    monkeypatch.setattr(stores, "_shared_bytes", lambda *args: 0)


@pytest.fixture
def real_model(request: pytest.FixtureRequest) -> Path:
    path = request.config.getoption("--model")
    if path is None:
        pytest.fail("give the checkpoint: pytest -m real --model DIR")
    return path
