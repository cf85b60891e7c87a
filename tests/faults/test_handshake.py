"""Oracle: the same text without faults. Reads that go wrong, hosts that stop, interrupts, memory
that is freed and models that are closed cost a line or nothing, and no time."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_moeflux.conversion.convert import convert

ROOT = Path(__file__).parents[2]
WAYS = [
    pytest.param("cpu", 2000, marks=pytest.mark.slow),
    pytest.param("threads", 1000, marks=pytest.mark.slow),
    pytest.param("gpu", 150, marks=pytest.mark.gpu),
]

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="needs ld.so and a C compiler"
)


@pytest.fixture(scope="module")
def packed(two_layers, tmp_path_factory):
    """Experts with checksums."""
    return convert(two_layers / "qwen3.5-tiny", tmp_path_factory.mktemp("handshake") / "packed")


@pytest.mark.parametrize(("where", "rounds"), WAYS)
def test_whatever_goes_wrong(tmp_path, packed, where, rounds):
    if where == "gpu" and mx.default_device() == mx.cpu:
        pytest.skip("MLX drives no GPU here")
    shim = tmp_path / "faults.so"
    source = Path(__file__).with_name("faults.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True)
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.handshake", packed, str(rounds), where],
        env=os.environ | {"LD_PRELOAD": str(shim)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    found = told["found"]
    harmless = ("short", "interrupted", "slow", "stalls", "stopped", "late")
    allowed = {f"{kind}: right" for kind in harmless} | {"Ctrl-C: right", "Ctrl-C: interrupted"}
    allowed |= {"closed: right", "closed: one line"}
    allowed |= {
        f"{kind}: {o}" for kind in ("fails", "gone", "wrong") for o in ("right", "one line")
    }
    outcomes = {name: count for name, count in found.items() if ":" in name}
    assert set(outcomes) <= allowed, found
    assert sum(outcomes.values()) == rounds
    assert "WRONG AFTERWARDS" not in found
    assert found["other path"] > rounds / 20, found
    assert found["fails: right"] > rounds / 50, found
    assert found["steps afterwards"] > rounds, found
    assert max(told["longest"].values()) < 2.0, told


CHILD = """
    import sys
    import mlx.core as mx
    from mlx_moeflux.kernels.runtime import device
    from mlx_moeflux.loading import load_model
    from tests.faults.handshake import PLAYED

    path, where = sys.argv[1:]
    if where in PLAYED:
        mx.set_default_device(mx.cpu)
        device.pull_for = PLAYED[where]
    model = load_model(path, expert_memory="97%", handshake=True, expert_threads=2)
    model.store.resize_all(dict.fromkeys(model.store.layers, 8))
    cache = model.make_cache()
    model(mx.array([[5, 6, 7]]), cache)
    print("begun", flush=True)
    for i in range(10**6):
        mx.eval(model(mx.array([[5 + i * 7 % 80]]), cache if i % 50 else model.make_cache()))
"""


@pytest.mark.parametrize("where", [pytest.param(way.values[0], marks=way.marks) for way in WAYS])
def test_signals_end_the_process(packed, where):
    for i in range(6):
        number = (signal.SIGTERM, signal.SIGINT)[i % 2]
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(CHILD), packed, where],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as child:
            try:
                assert child.stdout.readline() == "begun\n", child.stderr.read()
                time.sleep(0.1 + 0.07 * i)
                child.send_signal(number)
                start = time.monotonic()
                _, words = child.communicate(timeout=60)
                assert time.monotonic() - start < 4.0
            finally:
                child.kill()  # one that hangs is not waited for
        if number == signal.SIGTERM:
            assert child.returncode == -number
        else:
            assert words.rstrip().endswith("KeyboardInterrupt"), words
