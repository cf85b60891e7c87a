"""What a benchmark is asked for."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mlx_moeflux.errors import InputError
from mlx_moeflux.profiling.capture import check_capture


@dataclass(frozen=True)
class Options:
    """What to measure.

    expert_memory: Budgets. contexts: Prompt lengths. batch_sizes: Sequences. All are swept.
    compare: "mlx-lm" or None. cold: Empty the page cache and the banks before every trial, and
    the page cache after every token. profile: Time the stages
    of a prompt, decode steps and batched steps after the trials. trace: A file for its slices.
    capture: Options of :func:`~mlx_moeflux.profiling.capture.gpu_capture` for one more run.
    load: More options of :func:`~mlx_moeflux.loading.load_model`.
    """

    expert_memory: tuple[str, ...] = ("auto",)
    contexts: tuple[int, ...] = (512,)
    generation_tokens: int = 1024
    batch_sizes: tuple[int, ...] = (1,)
    trials: int = 5
    delay: float = 0.0
    prefill_step_size: int | None = None
    compare: str | None = None
    cold: bool = False
    threads: int = 8
    reader: str = "auto"
    seed: int = 0
    profile: bool = False
    trace: Path | None = None
    capture: dict[str, Any] | None = None
    load: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values; those of `load` as text."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        load = {name: str(value) for name, value in self.load.items()}
        return plain | {"load": load, "trace": None if self.trace is None else str(self.trace)}

    def check(self) -> None:
        """Raise :class:`InputError` for what cannot be measured."""
        for name, least in (("trials", 1), ("generation_tokens", 2)):
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least {least}.")
        for name in ("contexts", "batch_sizes"):
            if min(getattr(self, name)) < 1:
                raise InputError(f"{name} has {min(getattr(self, name))}; give at least 1.")
        if self.prefill_step_size is not None and self.prefill_step_size < 1:
            raise InputError(f"prefill_step_size is {self.prefill_step_size}; give at least 1.")
        if self.compare not in (None, "mlx-lm"):
            raise InputError(f"there is no comparison with '{self.compare}'; give mlx-lm.")
        if self.compare and "experts_per_token" in self.load:
            raise InputError("with fewer experts a token there is nothing to compare with.")
        if self.capture is not None:
            check_capture(self.capture["file"])
        if self.cold and not hasattr(os, "posix_fadvise"):
            raise InputError("this system cannot empty its page cache; leave out --cold.")
