"""Which limits of MLX's command buffers decode fastest on this GPU.

MLX commits a command buffer, or ends a CUDA graph, once it holds so many operations or inputs of
so many megabytes, and a bank of experts is large. MLX reads the limits once in a process, so each
is tried in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from mlx_moeflux.backend import LIMITS, keep_limits
from mlx_moeflux.errors import InputError

MEGABYTES, OPERATIONS = LIMITS
# Besides what the package or MLX sets, which comes first.
CANDIDATES = (
    {},
    {MEGABYTES: "200"},
    {MEGABYTES: "1000"},
    {MEGABYTES: "4000"},
    {MEGABYTES: "4000", OPERATIONS: "100"},
)
# By how much others must be faster than the first, and how long a process may take.
MARGIN, SECONDS = 0.05, 600

_CHILD = """
import statistics, sys
from mlx_moeflux import load, stream_generate

path, memory, strict = sys.argv[1:]
model, tokenizer = load(path, expert_memory=memory, strict_config=strict == "True")
tps = []
for _ in range(4):
    for reply in stream_generate(model, tokenizer, [1, 2, 3], max_tokens=48):
        pass
    tps.append(reply.generation_tps)
print(statistics.median(tps[1:]))
"""


def tune_limits(
    model: str,
    expert_memory: str,
    *,
    strict_config: bool = True,
    candidates: Sequence[Mapping[str, str]] = CANDIDATES,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, str]:
    """Decode with each candidate in a process of its own, keep the fastest for later processes, and
    return it; empty: the first was as fast.

    Raises:
        InputError: A process failed, with its last line.
    """
    keep_limits({})  # or the children would begin with those
    arguments = (model, expert_memory, str(strict_config))
    speeds = [_speed(arguments, limits) for limits in candidates]
    for limits, speed in zip(candidates, speeds, strict=True):
        said = ", ".join(f"{name}={value}" for name, value in limits.items())
        report(f"command buffers, {said or 'as set'}: {speed:.1f} tokens/s")
    best = max(range(len(speeds)), key=speeds.__getitem__)
    chosen = dict(candidates[best]) if speeds[best] > (1 + MARGIN) * speeds[0] else {}
    keep_limits(chosen)
    return chosen


def _speed(arguments: Sequence[str], limits: Mapping[str, str]) -> float:
    """Return tokens a second of a process with these arguments and limits."""
    environment = {name: value for name, value in os.environ.items() if name not in LIMITS}
    try:
        child = subprocess.run(
            [sys.executable, "-c", _CHILD, *arguments],
            env=environment | dict(limits),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise InputError(f"decoding took more than {SECONDS} s with {dict(limits)}.") from error
    if child.returncode:
        last = (child.stderr.strip().splitlines() or ["no output"])[-1]
        raise InputError(f"decoding failed with {dict(limits)}: {last}")
    return float(child.stdout)
