"""MLX's memory while text is generated: freed buffers bounded, and on Metal the weights wired.

MLX keeps freed buffers for reuse, without a bound that anybody chose: here it keeps what one call
of the model may allocate. Metal pages out what it was not told to keep: trunk, bank and state are
wired while tokens are made, never more than the recommended working set, and all limits are put
back afterwards.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

LEAST_CACHE_BYTES = 64 << 20


@dataclass(frozen=True)
class Needs:
    """What one generation wants: bytes of freed buffers, and bytes that stay in memory.

    owner: Generations of one owner share what stays.
    """

    owner: int
    cache: int
    wired: int

    @classmethod
    def of(cls, model: Any, *, prompt_tokens: int, positions: int) -> Needs:
        """cache: What a call on the prompt may allocate. wired: Trunk, experts, and the state
        after `positions` tokens."""
        weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
        bank = model.store.nbytes
        return cls(
            owner=id(model),
            cache=max(LEAST_CACHE_BYTES, model.activation_bytes(prompt_tokens)),
            wired=weights + bank + model.state_bytes(positions),
        )


class Limits:
    """MLX's limits, which are the process's: changed with the first generation that is under
    way, following those that come and go, and put back with the last."""

    def __init__(self):
        self._lock = threading.Lock()
        self._needs: list[Needs] = []
        self._cache: int | None = None
        self._wired: int | None = None

    @contextmanager
    def held(self, needs: Needs) -> Iterator[None]:
        """Grant `needs` meanwhile, as far as the limits that were found allow."""
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
            # The limit must not change under work that is under way.
            mx.synchronize()
        if self._needs:
            self._tighten(on_metal)
            return
        mx.set_cache_limit(self._cache)
        if self._wired is not None:
            mx.set_wired_limit(self._wired)
        self._cache = self._wired = None

    def _tighten(self, on_metal: bool) -> None:
        if self._cache is None:
            # A limit is only told when it is changed.
            self._cache = mx.set_cache_limit(LEAST_CACHE_BYTES)
        limit = min(self._cache, sum(needs.cache for needs in self._needs))
        mx.set_cache_limit(limit)
        if mx.get_cache_memory() > limit:
            # Or every buffer that is freed would go back to the system from now on.
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


def housekept(generate: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """A generator function ``(prompt [T], model, *, max_tokens=...)`` that sets the limits from
    its first step to its last, or until it is closed."""

    @functools.wraps(generate)
    def kept(prompt: mx.array, model: Any, **options: Any) -> Iterator[Any]:
        context, tokens = model.config.max_position_embeddings, prompt.shape[0]
        new = options.get("max_tokens", -1)
        positions = context if new < 0 or options.get("prompt_cache") else tokens + new
        needs = Needs.of(model, prompt_tokens=tokens, positions=min(context, positions))
        with LIMITS.held(needs):
            yield from generate(prompt, model, **options)

    return kept
