"""ThreadSanitizer on the threads of handshake.c; that they give the right bytes is in
tests/experts/streaming/test_handshake.py."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_moeflux.experts.io.native_pool import SOURCES


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize("slots_written_by", ["kernels", "threads"])
def test_threads_do_not_race(tmp_path, slots_written_by):
    driver, made = Path(__file__).with_name("desk_threads.c"), tmp_path / "desk_threads"
    flags = "-g", "-O1", "-std=gnu11", "-fsanitize=thread", "-pthread", f"-I{SOURCES[0].parent}"
    built = subprocess.run(
        ["gcc", *flags, "-o", made, driver, "-lm"], capture_output=True, text=True, check=False
    )
    if built.returncode and "libtsan" in built.stderr:
        pytest.skip("needs gcc's ThreadSanitizer")
    assert built.returncode == 0, built.stderr
    # Where addresses are randomised widely, older sanitizers do not start.
    command = [*(["setarch", "-R"] if shutil.which("setarch") else []), str(made)]
    command += [slots_written_by] * (slots_written_by == "threads")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING: ThreadSanitizer" not in done.stderr, done.stderr
    compared, differ, failed = (int(word) for word in done.stdout.split() if word.isdigit())
    assert compared > 40_000
    assert differ == 0
    assert failed > 30
