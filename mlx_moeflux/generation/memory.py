"""Limits of MLX's memory during generations: freed buffers, and on Metal wired memory.

MLX keeps freed buffers for reuse; the limit is what one call of the model may allocate. The earlier
limit is restored after the last generation.

Metal may page out memory that is not wired. The first generation that wants it wires trunk, bank
and state, up to the recommended working set, and the process keeps that limit: Macs have panicked
where several streams ran under a wired limit, and a process that is killed may leave memory wired
until the next start.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_moeflux.backend import is_lost
from mlx_moeflux.checks import shown
from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.budget import AUTO, format_bytes, parse_budget
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.models.protocol import LoadedModel

LEAST_CACHE_BYTES = 64 << 20
OFF = "off"


def parse_wired_memory(value: str | float | None) -> str | int | None:
    """Return "auto", "off", bytes, or None, which is "auto" for a single sequence and "off" for
    batches.

    Raises:
        InputError: It is none of these, or more than Metal recommends.
    """
    if value is None or (isinstance(value, str) and value in (AUTO, OFF)):
        return value
    try:
        nbytes = parse_budget(value, _most_wired() or 0)
    except InputError as error:
        raise InputError(
            f"wired_memory is {shown(value)}; give auto, off or an amount such as 20GB."
        ) from error
    most = _most_wired()
    if nbytes is not None and most is not None and nbytes > most:
        raise InputError(
            f"wired_memory is {format_bytes(nbytes)}, but Metal recommends at most "
            f"{format_bytes(most)}; give less, or auto."
        )
    return AUTO if nbytes is None else nbytes


def _most_wired() -> int | None:
    """Return the bytes that Metal recommends to use, or None where MLX computes elsewhere."""
    if device.kind() != "metal":
        return None
    return int(mx.device_info(mx.gpu)["max_recommended_working_set_size"])


@dataclass(frozen=True)
class Needs:
    """Bytes of freed buffers and of wired memory that one generation needs; 0 wires nothing."""

    cache: int
    wired: int

    @classmethod
    def of(
        cls, model: LoadedModel, *, prompt_tokens: int, state_bytes: int, batch: bool = False
    ) -> Needs:
        """Return the needs of a generation: `cache` for the activations of a prompt call, `wired`
        as ``model.runtime.wired_memory`` says: for trunk, bank, state and a head that drafts if it
        is "auto"."""
        wired = model.runtime.wired_memory
        if wired == OFF or (wired is None and batch):
            wired = 0
        elif not isinstance(wired, int):
            weights = dict(tree_flatten(model.parameters())).values()
            wired = sum(array.nbytes for array in weights) + state_bytes
            if (streaming := model.store.streaming) is not None:
                wired += streaming.nbytes
            if model.plan is not None:
                wired += model.plan.draft_bytes
        cache = max(LEAST_CACHE_BYTES, model.activation_bytes(prompt_tokens))
        return cls(cache=cache, wired=wired)


class Limits:
    """MLX's limits, which are process-wide, for all generations under way; thread-safe.

    The first generation changes the limit of freed buffers, and the end of the last restores it.
    The limit of wired memory changes once in a process.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._needs: list[Needs] = []
        self._cache: int | None = None
        self._wired = False

    @contextmanager
    def held(self, needs: Needs) -> Iterator[None]:
        """Apply `needs` inside the block, never above the limits found at first."""
        with self._lock:
            if needs.wired and not self._wired and not self._needs:
                self._wire(needs.wired)
            self._needs.append(needs)
            self._apply()
        try:
            yield
        finally:
            # In a forked process MLX would wait for ever, and another thread may hold the lock.
            if not is_lost():
                with self._lock:
                    self._needs.remove(needs)
                    self._apply()

    def _wire(self, nbytes: int) -> None:
        """Set the limit of wired memory, which must not change while work is under way."""
        if (most := _most_wired()) is not None:
            self._wired = True
            mx.synchronize()
            mx.set_wired_limit(min(most, nbytes))

    def _apply(self) -> None:
        if not self._needs:
            if self._cache is not None:
                mx.set_cache_limit(self._cache)
            self._cache = None
            return
        if self._cache is None:
            # MLX returns a limit only when it changes it.
            self._cache = mx.set_cache_limit(LEAST_CACHE_BYTES)
        limit = min(self._cache, sum(needs.cache for needs in self._needs))
        mx.set_cache_limit(limit)
        if mx.get_cache_memory() > limit:
            # Above the limit MLX would return every freed buffer to the system.
            mx.clear_cache()


LIMITS = Limits()


def with_memory_limits(
    generate: Callable[..., Generator[Any, None, None]],
) -> Callable[..., Generator[Any, None, None]]:
    """Decorate a generator function ``(prompt [T], model, *, max_tokens=...)`` to hold the limits
    from its first step until it ends or is closed."""

    @functools.wraps(generate)
    def limited(prompt: mx.array, model: LoadedModel, **options: Any) -> Generator[Any, None, None]:
        context, tokens = model.config.max_position_embeddings, prompt.shape[0]
        new = options.get("max_tokens", -1)
        positions = context if new < 0 or options.get("prompt_cache") else tokens + new
        if (rest := model.store.rest) is not None:
            rest.restore()
        state_bytes = model.state_bytes(min(context, positions))
        needs = Needs.of(model, prompt_tokens=tokens, state_bytes=state_bytes)
        with LIMITS.held(needs):
            yield from generate(prompt, model, **options)

    return limited
