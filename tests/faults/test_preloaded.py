"""Oracle: the same process without faults. Every form and reader, with reads that are short, fail,
are interrupted, lie, are slow, or whose disk is gone, below Python and below the native threads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.loading import BUNDLED_MODEL
from tests.checkpoint.foreign import write_fp8
from tests.checkpoint.test_moeflux_directory import pack

GOLDEN = Path(__file__).parents[1] / "golden"
TWIN, YARN = GOLDEN / "text_top3", GOLDEN / "deepseek_v3_yarn40"
HARMLESS = {"short": (1, 2), "interrupted": (3, 2), "slow": (5, 7)}
ERRORS = {"fails": (2, 4, "Input/output error"), "gone": (6, 1, "No such device")}

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="needs ld.so and a C compiler"
)

CHILD = """
    import ctypes, json, sys
    import mlx.core as mx
    import numpy as np
    from mlx_moeflux.errors import MoefluxError
    from mlx_moeflux.experts.io import native_pool, read_pool
    from mlx_moeflux.experts.io.native_pool import NativePool
    from mlx_moeflux.loading import load_model

    path, where, threads, reader, cases = sys.argv[1:]
    if threads == "python":
        native_pool.library = lambda: None
    read_pool.SMALL_BYTES = 0
    shim = ctypes.CDLL(None)
    memory = "25%" if "mlx" in path else "97%"
    model = load_model(path, expert_memory=memory, expert_reader=reader, expert_threads=2)
    ids = mx.array(np.random.default_rng(0).integers(0, 60, (1, 12)))

    def logits():
        model.release()  # so that everything is read again
        return np.array(model(ids))

    right, found = logits(), {}
    assert np.isfinite(right).all()
    found["native"] = isinstance(model.store._pool, NativePool)
    for name, (kind, every) in json.loads(cases).items():
        shim.set_fault(kind, every, where.encode())
        try:
            outcome = "same" if np.array_equal(logits(), right) else "other"
        except MoefluxError as error:
            outcome = str(error)
        faults = shim.count_faults()
        shim.set_fault(0, 1, b"")
        found[name] = outcome, faults, bool(np.array_equal(logits(), right))
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    out = tmp_path_factory.mktemp("shim") / "faults.so"
    source = Path(__file__).with_name("faults.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", out, source, "-ldl"], check=True)
    return out


def packed(tmp_path: Path) -> tuple[Path, str]:
    return convert(TWIN, tmp_path / "text_top3"), "/layer_"


def stock(tmp_path: Path) -> tuple[Path, str]:
    return Path(shutil.copytree(TWIN, tmp_path / "text_top3")), "model.safetensors"


def fp8(tmp_path: Path) -> tuple[Path, str]:
    return write_fp8(YARN, tmp_path, (48, 40)), ".safetensors"


def moeflux(tmp_path: Path) -> tuple[Path, str]:
    return pack(BUNDLED_MODEL, tmp_path, bits=4, places="one directory"), "/layer_"


def gguf(tmp_path: Path) -> tuple[Path, str]:
    pytest.importorskip("gguf")
    from tests.checkpoint import gguf_files

    return gguf_files.write(tmp_path / "model.gguf", lambda name: "Q8_0"), ".gguf"


WAYS = [("native", "pread"), ("native", "direct")] + [
    ("python", name) for name in ("pread", "direct", "mmap")
]
CASES = [
    pytest.param(
        form, *way,
        marks=[] if form is packed and way in WAYS[:2] else pytest.mark.slow,
        id="-".join((form.__name__, *way)),
    )
    for form in (packed, stock, moeflux, fp8, gguf)
    for way in WAYS
]  # fmt: skip


@pytest.mark.parametrize(("form", "threads", "reader"), CASES)
def test_reads_that_go_wrong(tmp_path, shim, form, threads, reader):
    (directory, where), way = form(tmp_path), (threads, reader)
    cases = dict(HARMLESS)
    cases |= {name: (kind, every) for name, (kind, every, _) in ERRORS.items()}
    cases["wrong"] = 4, 3
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), directory, where, *way, json.dumps(cases)],
        env=os.environ | {"LD_PRELOAD": str(shim)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # Decoded forms have no native threads.
    assert found.pop("native") == (threads == "native" and form is not fp8)
    assert set(found) == set(cases)
    for name, (outcome, faults, right_afterwards) in found.items():
        assert right_afterwards, name
        if reader == "mmap":
            # No call reads a mapping.
            assert (outcome, faults) == ("same", 0), name
            continue
        assert faults > 0, name
        if name in HARMLESS:
            assert outcome == "same", name
        elif name in ERRORS:
            assert ERRORS[name][2] in outcome
            assert where in outcome
            assert "\n" not in outcome
        elif form is packed:
            assert "differs from its checksum" in outcome
        else:
            assert outcome == "other", "other forms have no checksums"
