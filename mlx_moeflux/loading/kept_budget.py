"""The verdicts on budgets of ``expert_memory="auto"``, kept for a model, a reader and a machine.

One file each, ``budget-*.json`` beside the verdicts on kernels. A verdict holds while ``auto``
allows about as much as it did; then, or without the file, the budgets are compared anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from mlx_moeflux import user_cache
from mlx_moeflux._version import __version__
from mlx_moeflux.checkpoint.files import read_json_object
from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.policies.chooser import Cost
from mlx_moeflux.experts.policies.timed_budget import Verdict
from mlx_moeflux.kernels.verify import verdicts

# A budget that differs by less than this share is the same.
CLOSE = 0.25


def file(model: str, reader: str) -> Path:
    """Return the file for a model's identity and the name of a reader; it may not exist."""
    place = f"{model}, {reader}, {verdicts.place()}, {__version__}"
    digest = hashlib.blake2b(place.encode(), digest_size=6).hexdigest()
    return user_cache.root() / f"budget-{digest}.json"


def read(path: Path, budget_bytes: int) -> Verdict | None:
    """Return the verdict of a file that was written for about `budget_bytes`; None: there is
    none."""
    try:
        entry = read_json_object(path, error=InputError)
    except InputError:
        return None
    try:
        smaller, written = entry["smaller"], float(entry["budget_bytes"])
        costs = [Cost(*map(float, entry[name])) for name in ("with_larger", "with_smaller")]
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    close = abs(written - budget_bytes) <= CLOSE * budget_bytes
    sound = all(0 <= cost.stalled <= cost.seconds < float("inf") for cost in costs)
    if not isinstance(smaller, bool) or not close or not sound:
        return None
    return Verdict(smaller, *costs)


def write(path: Path, budget_bytes: int, verdict: Verdict) -> None:
    """Keep a verdict; if the file cannot be written, other processes compare anew."""
    entry: dict[str, Any] = {"budget_bytes": budget_bytes, **verdict._asdict()}
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        user_cache.write(path, json.dumps(entry, indent=1).encode())
