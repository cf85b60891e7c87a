"""Seconds from the start of a process to a model's first token, with nothing kept and with all.

    python -m benchmarks.startup [--model DIR] [--runs 3]

The first process starts with an empty cache of its own (``MOEFLUX_CACHE_DIR``; on NVIDIA also for
what MLX compiles itself), the others find what it left. The age of the process is the system's;
Linux only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROMPT = "Once upon a time there was a"


def age() -> float:
    """Seconds since this process was started, interpreter and all."""
    after_name = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def first_token(model: str | None) -> None:
    """Print how old this process was after each step."""
    laps = {"python": age()}
    import mlx.core as mx

    laps["import mlx"] = age()
    from mlx_moeflux import stream_generate
    from mlx_moeflux.loading import BUNDLED_MODEL, load

    laps["import mlx_moeflux"] = age()
    loaded, tokenizer = load(model or BUNDLED_MODEL)
    laps["load"] = age()
    next(stream_generate(loaded, tokenizer, PROMPT, max_tokens=2))
    laps["first token"] = age()
    print(", ".join(f"{what} {seconds:.2f}" for what, seconds in laps.items()))
    from mlx_moeflux.kernels.runtime import launcher

    if (files := launcher.cuda_files()) is not None:
        print(f"  {mx.device_info(mx.gpu)['device_name']}: {files.count}")


def main() -> None:
    """Run one process after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="the bundled one")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        first_token(args.model)
        return
    command = [sys.executable, "-m", "benchmarks.startup", "--once"]
    command += ["--model", args.model] if args.model else []
    with tempfile.TemporaryDirectory() as folder:
        environment = {k: v for k, v in os.environ.items() if k != "MLX_PTX_CACHE_DIR"}
        environment["MOEFLUX_CACHE_DIR"] = folder
        for _ in range(args.runs):
            subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    main()
