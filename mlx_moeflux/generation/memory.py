"""Limits of MLX's memory during a generation: freed buffers, and on Metal wired memory.

MLX keeps freed buffers for reuse; the limit is what one call of the model may allocate. Metal may
page out memory that is not wired; trunk, bank and state are wired up to the recommended working
set. The earlier limits are restored after the last generation.
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

LEAST_CACHE_BYTES = 64 << 20


@dataclass(frozen=True)
class Needs:
    """Bytes of freed buffers and of wired memory that one generation needs.

    owner: Generations of one owner share the wired bytes.
    """

    owner: int
    cache: int
    wired: int

    @classmethod
    def of(cls, model: Any, *, prompt_tokens: int, positions: int) -> Needs:
        """Return the needs of a generation: `cache` for the activations of a prompt call, `wired`
        for trunk, bank, and the state after `positions` tokens."""
        weights = sum(array.nbytes for array in dict(tree_flatten(model.parameters())).values())
        bank = model.store.nbytes
        return cls(
            owner=id(model),
            cache=max(LEAST_CACHE_BYTES, model.activation_bytes(prompt_tokens)),
            wired=weights + bank + model.state_bytes(positions),
        )


class Limits:
    """MLX's limits, which are process-wide, for all generations under way; thread-safe.

    The first generation changes them, and the end of the last restores them.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._needs: list[Needs] = []
        self._cache: int | None = None
        self._wired: int | None = None

    @contextmanager
    def held(self, needs: Needs) -> Iterator[None]:
        """Apply `needs` inside the block, never above the limits found at first."""
        with self._lock:
            self._needs.append(needs)
            self._apply()
        try:
            yield
        finally:
            with self._lock:
                self._needs.remove(needs)
                self._apply()

    def _apply(self) -> None:
        on_metal = mx.metal.is_available() and mx.default_device() != mx.cpu
        if on_metal:
            # The limit must not change while work is under way.
            mx.synchronize()
        if self._needs:
            self._tighten(on_metal)
            return
        if self._cache is not None:
            mx.set_cache_limit(self._cache)
        if self._wired is not None:
            mx.set_wired_limit(self._wired)
        self._cache = self._wired = None

    def _tighten(self, on_metal: bool) -> None:
        if self._cache is None:
            # MLX returns a limit only when it changes it.
            self._cache = mx.set_cache_limit(LEAST_CACHE_BYTES)
        limit = min(self._cache, sum(needs.cache for needs in self._needs))
        mx.set_cache_limit(limit)
        if mx.get_cache_memory() > limit:
            # Above the limit MLX would return every freed buffer to the system.
            mx.clear_cache()
        if not on_metal:
            return
        wired: dict[int, int] = {}
        for needs in self._needs:
            wired[needs.owner] = max(needs.wired, wired.get(needs.owner, 0))
        most = int(mx.device_info(mx.gpu)["max_recommended_working_set_size"])
        before = mx.set_wired_limit(min(most, sum(wired.values())))
        if self._wired is None:
            self._wired = before


LIMITS = Limits()


def with_memory_limits(
    generate: Callable[..., Generator[Any, None, None]],
) -> Callable[..., Generator[Any, None, None]]:
    """Decorate a generator function ``(prompt [T], model, *, max_tokens=...)`` to hold the limits
    from its first step until it ends or is closed."""

    @functools.wraps(generate)
    def limited(prompt: mx.array, model: Any, **options: Any) -> Generator[Any, None, None]:
        context, tokens = model.config.max_position_embeddings, prompt.shape[0]
        new = options.get("max_tokens", -1)
        positions = context if new < 0 or options.get("prompt_cache") else tokens + new
        model.store.restore()
        needs = Needs.of(model, prompt_tokens=tokens, positions=min(context, positions))
        with LIMITS.held(needs):
            yield from generate(prompt, model, **options)

    return limited
