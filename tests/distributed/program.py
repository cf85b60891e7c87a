"""What each rank of a test runs: ``program.py FOLDER JOB ARGUMENTS``; see launch.py."""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moeflux.errors import MoefluxError
from mlx_moeflux.loading import load_model

PROMPT, STEPS = 40, 5
RANK = int(os.environ.get("MLX_RANK", "0"))
FOLDER = Path(sys.argv[1]) if len(sys.argv) == 4 else Path()


def tokens_of(batch: int, vocabulary: int) -> mx.array:
    return mx.array(np.random.default_rng(1).integers(0, vocabulary, (batch, PROMPT + STEPS)))


def logits_of(model: Any, batch: int = 1) -> np.ndarray:
    """A prompt, then steps: ``[batch, PROMPT + STEPS, V]``."""
    tokens, cache = tokens_of(batch, model.config.vocab_size), model.make_cache()
    parts = [model(tokens[:, :PROMPT], cache)]
    parts += [model(tokens[:, t : t + 1], cache) for t in range(PROMPT, PROMPT + STEPS)]
    return np.array(mx.concatenate(parts, axis=1))


def logits(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Logits of several models; of each layer lookups, misses, bytes read and tokens."""
    found = {}
    for i, case in enumerate(cases):
        batch = case.pop("batch", 1)
        with load_model(case.pop("path"), distributed=True, **case) as model:
            found[f"logits{i}"] = logits_of(model, batch)
            layers = model.store.stats().layers.values()
            counts = [[one.lookups, one.misses, one.bytes_read, one.tokens] for one in layers]
            found[f"counts{i}"] = np.array(counts)
    return found


def load(path: str, **options: Any) -> dict[str, Any]:
    """Nothing but loading."""
    with load_model(path, distributed=True, **options):
        return {}


def forever(path: str) -> dict[str, Any]:
    """Steps without end, of which FOLDER/runningR tells."""
    with load_model(path, distributed=True, expert_memory="50%") as model:
        tokens = tokens_of(1, model.config.vocab_size)
        while True:
            cache = model.make_cache()
            for t in range(PROMPT):
                mx.eval(model(tokens[:, t : t + 1], cache))
                if t == 2:
                    (FOLDER / f"running{RANK}").touch()


def cut_ring(path: str) -> dict[str, Any]:
    """Steps without end; rank 1 shuts its ring's connections down. FOLDER/aliveR is touched until
    the end, FOLDER/cut holds the time of the cut."""

    def touch() -> None:
        while True:
            (FOLDER / f"alive{RANK}").touch()
            time.sleep(0.05)

    ring = connections()
    with load_model(path, distributed=True, expert_memory="50%") as model:
        threading.Thread(target=touch, daemon=True).start()
        tokens = tokens_of(1, model.config.vocab_size)
        for round_ in itertools.count():
            cache = model.make_cache()
            for t in range(PROMPT):
                mx.eval(model(tokens[:, t : t + 1], cache))
                if RANK == 1 and round_ == 0 and t == 10:
                    (FOLDER / "cut").write_text(str(time.time()))
                    for number in ring:
                        with socket.socket(fileno=os.dup(number)) as one:
                            one.shutdown(socket.SHUT_RDWR)


def connections() -> list[int]:
    """Numbers of the open files that are connected sockets."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        if os.path.exists(entry) and str(os.readlink(entry)).startswith("socket:"):
            found.append(int(entry.name))
    return found


JOBS = {job.__name__: job for job in (logits, load, forever, cut_ring)}


def main() -> None:
    job, arguments = sys.argv[2:]
    mx.distributed.init(strict=True, backend="ring")
    try:
        found = JOBS[job](**json.loads(arguments))
    except MoefluxError as error:
        sys.exit(f"error: {error}")  # as the command line does
    np.savez(FOLDER / f"rank{RANK}.npz", **found)


if __name__ == "__main__":
    main()
