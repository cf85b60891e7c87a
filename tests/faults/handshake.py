"""A program that lets a handshake go wrong, again and again; test_handshake.py starts it with
faults.c preloaded. It prints JSON: how often what happened, and the longest time beyond the
disk's by what happened.

    python -m tests.faults.handshake MODEL ROUNDS WHERE

WHERE: gpu; cpu, where a played kernel copies blocks; threads, where threads write slots.

Oracle: the same text without faults, bit for bit; or an error in one line.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial

import mlx.core as mx
import numpy as np

from mlx_moeflux.errors import MoefluxError
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.loading import load_model
from tests.experts.streaming.waiting import PlayedPull, PlayedPullWithoutCopies

STEPS, SLOTS = 6, 8
# Of faults.c: its number, and a fault in one of so many reads.
READS = {
    "short": (1, (1, 3)),
    "fails": (2, (2, 12)),
    "interrupted": (3, (2, 3)),
    "wrong": (4, (2, 12)),
    "slow": (5, (2, 9)),
    "gone": (6, (2, 12)),
    "stalls": (7, (9, 30)),
}
# What happens in a round, and its weight. A second of a stalled read or of a stopped process is
# much of the time of all rounds.
CHANCES = {
    **{"short": 12, "fails": 25, "interrupted": 8, "wrong": 15, "slow": 3, "gone": 10},
    **{"stalls": 0.6, "stopped": 0.3, "Ctrl-C": 25, "closed": 4, "late": 5},
}
STOPPED_SECONDS = 3.0
PLAYED = {"cpu": PlayedPull, "threads": PlayedPullWithoutCopies}


class Stop:
    """Delivers KeyboardInterrupt some time from now."""

    def __enter__(self):
        signal.signal(signal.SIGALRM, self._raise)
        return self

    def after(self, seconds):
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def _raise(self, *_):
        raise KeyboardInterrupt

    def __exit__(self, *_):
        signal.setitimer(signal.ITIMER_REAL, 0)


def text(model, ids, after_prompt=lambda: None):
    """Logits after each step of a text."""
    cache = model.make_cache()
    model(mx.array([ids[:3]]), cache, last_only=True)
    after_prompt()
    steps = (model(mx.array([[token]]), cache, last_only=True) for token in ids[3 : 3 + STEPS])
    return [np.array(logits.astype(mx.float32)) for logits in steps]


def begin_faults(shim, kind, every, chance):
    """Let reads go wrong; in most rounds a single one, so that the other path reads well."""
    shim.set_fault(kind, every, b"layer_")
    shim.limit_faults(chance < 0.6)


def disturb(on_gpu, over, builds):
    """Free MLX's memory and build kernels, in a thread of its own. `builds` gets [begin, end] of
    each, which is not counted as time of a step."""
    for i in itertools.count():
        if over.wait(0.02):
            return
        mx.clear_cache()
        x = mx.full((64 + i % 7,), float(i))
        if on_gpu and i % 50 == 0:
            body = f"y[threadIdx.x] = x[threadIdx.x] + {i}.0f;"
            kernel = mx.fast.cuda_kernel(
                name=f"new_{i}", input_names=["x"], output_names=["y"], source=body
            )
            launch = {"grid": (64, 1, 1), "threadgroup": (64, 1, 1)}
            (x,) = kernel(inputs=[x], output_shapes=[(64,)], output_dtypes=[mx.float32], **launch)
            builds.append([time.monotonic(), math.inf])
        mx.eval(x)
        if builds:
            builds[-1][1] = min(builds[-1][1], time.monotonic())


def shared(builds, start, end):
    """Seconds of `builds` from `start` to `end`."""
    return sum(max(0.0, min(b, end) - max(a, start)) for a, b in list(map(tuple, builds)))


def main(path, rounds, where):
    on_gpu = where == "gpu"
    if not on_gpu:
        mx.set_default_device(mx.cpu)
        device.pull_for = PLAYED[where]
    shim, chance = ctypes.CDLL(None), random.Random(3)

    def open_model():
        found = load_model(path, expert_memory="97%", handshake=True, expert_threads=2)
        found.store.resize_all(dict.fromkeys(found.store.layers, SLOTS))
        return found

    ids = np.random.default_rng(0).integers(5, 90, 3 + STEPS).tolist()
    model = open_model()
    with load_model(path, expert_memory="97%", expert_threads=2) as plain:
        right = text(plain, ids)
    assert all(np.isfinite(y).all() for y in right)
    for off in (None, "the other path"):  # kernels of both paths are compiled from now on
        model.store._handshake.off = off
        assert all(map(np.array_equal, text(model, ids), right))
    model.store._handshake.off = None
    found, longest, steps, over = Counter(), {}, 0, threading.Event()
    builds: list[list[float]] = []
    disturbing = threading.Thread(target=disturb, args=(on_gpu, over, builds))
    disturbing.start()
    for number in range(rounds):
        (kind,) = chance.choices([*CHANCES], [*CHANCES.values()])
        helper, allowed, closing = None, 0.0, None
        own = model.store._handshake
        before = own.steps
        if chance.random() < 0.7:
            model.release()
        begin, in_steps = None, chance.random() < 0.7
        if kind in READS:
            code, (least, most) = READS[kind]
            begin = partial(begin_faults, shim, code, chance.randint(least, most), chance.random())
            if not in_steps:
                begin()
        elif kind == "stopped":
            pid, seconds = os.getpid(), STOPPED_SECONDS
            wait = chance.random() * 0.02
            command = f"sleep {wait}; kill -STOP {pid}; sleep {seconds}; kill -CONT {pid}"
            helper, allowed = subprocess.Popen(["sh", "-c", command]), seconds
        elif kind == "closed":
            closing = threading.Timer(chance.random() * 0.02, model.close)
            closing.start()
        elif kind == "late" and not on_gpu:
            own._pull.late = True
        start = time.monotonic()
        try:
            try:
                with Stop() as stop:
                    if kind == "Ctrl-C":
                        stop.after(max(chance.random() * 0.03, 1e-5))
                    result = text(model, ids, begin if begin and in_steps else lambda: None)
                outcome = "right" if all(map(np.array_equal, result, right)) else "WRONG BITS"
            except MoefluxError as error:
                outcome = "TWO LINES" if "\n" in str(error) else "one line"
            except KeyboardInterrupt:
                outcome = "interrupted"
        except KeyboardInterrupt:
            outcome = "interrupted"
        end = time.monotonic()
        took = end - start - shared(builds, start, end)
        if kind == "stalls":
            # Reads of one call may stall one after another.
            allowed = 1.0 * shim.count_faults()
        shim.set_fault(0, 1, b"")
        longest[kind] = max(longest.get(kind, 0.0), took - allowed)
        found[f"{kind}: {outcome}"] += 1
        if helper is not None:
            helper.wait()
        if closing is not None:
            closing.join()
            model.close()
            steps += own.steps
            model = open_model()
        elif not on_gpu:
            own._pull.late = False
        own = model.store._handshake
        found["other path"] += own.off is not None
        own.off, before = None, own.steps
        if number % 5 == 0:
            if not all(map(np.array_equal, text(model, ids), right)):
                found["WRONG AFTERWARDS"] += 1
            found["steps afterwards"] += own.steps - before
    over.set()
    disturbing.join()
    steps += model.store._handshake.steps
    model.close()
    built = max((b - a for a, b in builds), default=0.0)
    print(json.dumps({"found": found, "longest": longest, "steps": steps, "built": built}))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
