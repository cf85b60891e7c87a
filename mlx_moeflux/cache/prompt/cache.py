"""Cache of prompt states, in memory and on disk, which share common beginnings."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moeflux.cache.prompt.disk import PromptDirectory
from mlx_moeflux.cache.prompt.tree import Held, Match, Node, best_start, deepest, shared
from mlx_moeflux.cache.state.sequence import SequenceState
from mlx_moeflux.cache.state.spec import StateSpec, adopt, export
from mlx_moeflux.errors import CacheError, InputError
from mlx_moeflux.state_arrays import ROW_AXIS

MEMORY_BYTES = 2_000_000_000
DISK_BYTES = 20_000_000_000
EVERY = 2048

# A shorter common beginning does not pay for storing a state.
LEAST_SHARED = 16


class Resumed:
    """A prompt and the state after its known beginning; made by :meth:`PromptCache.resume`.

    state: A ``model.make_cache()`` after the first `position` tokens. logits: ``[V]`` after the
    last token if the whole prompt is known, else None. experts: MoE layer id -> ids that were in
    memory then. stops: Positions that the state must :meth:`~SequenceState.watch` before it passes
    them; call :meth:`reached` afterwards.
    """

    def __init__(
        self,
        cache: PromptCache,
        model: Any,
        tokens: np.ndarray,
        *,
        state: SequenceState,
        position: int,
        logits: mx.array | None,
        experts: Mapping[int, list[int]],
        stops: Iterable[int],
    ):
        self._cache, self._model, self._tokens = cache, model, tokens
        self.state, self.position, self.logits = state, position, logits
        self.experts = experts
        self.stops = sorted({stop for stop in stops if position < stop < len(tokens)})

    @property
    def keeps_reply(self) -> bool:
        """Return True if the cache stores the state after the reply too, by :meth:`replied`."""
        return self._cache.replies

    def reached(self, position: int, logits: mx.array | None = None) -> None:
        """Store the state after `position` tokens, which it has passed. logits: ``[V]``."""
        self._cache.store(self._model, self._tokens[:position], self.state, logits)

    def replied(self, reply: Sequence[int]) -> None:
        """Store the state after the prompt and `reply`, if that is where the state is."""
        tokens = [*self._tokens.tolist(), *reply]
        if self.state.position == len(tokens):
            self._cache.store(self._model, tokens, self.state)


class PromptCache:
    """States at positions in prompts, for any number of models.

    directory: Folder of states that outlive the process; None keeps them in memory only.
    memory_bytes, disk_bytes: Limits above which the least recently used states are removed.
    every: Tokens between two positions at which the state of a long prompt is stored. It is stored
        also at the end, at the caller's breakpoints, and where the prompt first differs from an
        earlier one. Models without recurrent layers need none of these: they continue from any
        token.
    replies: Store the state after a reply too, from which the next turn of a conversation goes on.
    warm: Return the experts that were in memory, for the generator to read again.

    All methods may be called from any thread.

    Raises:
        CacheError: The directory cannot be made. InputError: A limit is not positive.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        memory_bytes: int = MEMORY_BYTES,
        disk_bytes: int = DISK_BYTES,
        every: int | None = EVERY,
        replies: bool = False,
        warm: bool = True,
    ):
        for name, number in {
            "memory_bytes": memory_bytes, "disk_bytes": disk_bytes, "every": every,
        }.items():  # fmt: skip
            if number is not None and number < 1:
                raise InputError(f"{name} is {number}; it must be at least 1.")
        self.memory_bytes, self.every = memory_bytes, every
        self.replies, self.warm = replies, warm
        self.tokens_reused = self.tokens_asked = 0
        self._disk = None if directory is None else PromptDirectory(directory, disk_bytes)
        self._roots: dict[str, Node] = {}
        self._held = Held()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """Return the number of stored positions of all models."""
        return self._held.nodes

    @property
    def nbytes(self) -> int:
        """Return the bytes of all states in memory."""
        return self._held.nbytes

    @property
    def bytes_written(self) -> int:
        """Return the bytes that this object wrote to the directory."""
        return self._disk.written if self._disk else 0

    def resume(
        self, model: Any, tokens: Sequence[int], *, breakpoints: Iterable[int] = ()
    ) -> Resumed:
        """Return the longest known beginning of a prompt. breakpoints: More positions to store.

        Warn once of each damaged file.
        """
        spec, state = model.state_spec(), model.make_cache()
        ids = np.asarray(tokens, np.int32)
        cut = all(entry.declared.grows for entry in state)
        with self._lock:
            root = self._root(spec)
            while True:
                match = best_start(root, ids, cut=cut)
                # _gathered() removed a node whose file is gone or damaged: match again.
                with contextlib.suppress(CacheError):
                    arrays = self._gathered(match, root, spec, state)
                    break
            stops = set(breakpoints)
            if not cut:
                stops |= set(range(self.every, len(ids), self.every)) if self.every else set()
            begun = set(stops)
            if not cut:
                common = shared(root, ids)
                if common - match.tokens >= LEAST_SHARED:
                    stops.add(common)
            ranks, known = model.store.ranks, [match.tokens, "logits" in arrays]
            if ranks is not None and not ranks.same([*known, sorted(map(int, stops))]):
                # Ranks that know different beginnings read the whole prompt.
                match, arrays, stops = Match(root, 0), {}, begun
            self._use(match.node, root)
            self._held.shrink(self.memory_bytes)
            self.tokens_asked += len(ids)
            self.tokens_reused += match.tokens
        logits = arrays.pop("logits", None)
        if match.tokens:
            adopt(state, arrays, position=match.tokens)
        return Resumed(
            self,
            model,
            ids,
            state=state,
            position=match.tokens,
            logits=logits if match.tokens == len(ids) else None,
            experts=match.node.experts if self.warm else {},
            stops=stops,
        )

    def store(
        self,
        model: Any,
        tokens: Sequence[int] | np.ndarray,
        state: Sequence[Any],
        logits: mx.array | None = None,
    ) -> None:
        """Store the state after `tokens`, unless it is stored already.

        The state has seen these tokens, and watched their end if it has seen more. Evaluates: a
        copy of what the state added since the last stored position.

        Raises:
            CacheError: The state has not seen so many tokens, or did not watch there.
        """
        ids = np.array(tokens, np.int32)
        seen = [entry.seen() for entry in state]
        if any(one != seen[0] or one[0] < len(ids) for one in seen):
            raise CacheError(f"The state has seen {seen[0]} tokens, not these {len(ids)}.")
        with self._lock:
            root = self._root(model.state_spec())
            parent = deepest(root, ids)
            known = parent.end == len(ids)
            if known and (parent.has_logits or logits is None):
                return
            node = parent if known else parent.add(ids[parent.end :].copy())
            try:
                arrays = export(state, node.end - len(node.tokens), node.end)
            except CacheError:
                if not known:
                    node.remove()
                raise
            if logits is not None:
                arrays["logits"] = mx.array(logits)
            node.experts = _experts_in_memory(model.store)
            mx.eval(arrays)
            node.hold(arrays)
            if self._disk:
                node.disk = ""
                for one in node.path():
                    if not one.disk and one.arrays is not None:
                        self._disk.write_later(one, root)
            self._use(node, root)
            self._held.shrink(self.memory_bytes)

    def flush(self) -> None:
        """Wait until all states are on disk."""
        if self._disk:
            self._disk.flush()
            with self._lock:
                self._held.shrink(self.memory_bytes)

    def close(self) -> None:
        """Finish pending writes and free all states in memory."""
        if self._disk:
            self._disk.close()
        self._roots.clear()
        self._held = Held()

    def __enter__(self) -> PromptCache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _root(self, spec: StateSpec) -> Node:
        root = self._roots.setdefault(spec.identity, Node.root(spec.identity, self._held))
        if self._disk:
            self._disk.update(root)
        return root

    def _gathered(
        self, match: Match, root: Node, spec: StateSpec, state: Sequence[Any]
    ) -> dict[str, mx.array]:
        """Return all arrays of the state after a match.

        Raises:
            CacheError: A file of its path cannot be read; its node was removed from the tree.
        """
        path, held = match.node.path(), []
        for node in path:
            if node.arrays is None:
                assert self._disk is not None  # only stored nodes lose their arrays
                try:
                    node.hold(self._disk.read(node, root, spec))
                except CacheError:
                    node.remove()
                    raise
            held.append(node.arrays)
        if not held:
            return {}
        arrays = dict(held[-1])
        if not match.whole:
            arrays.pop("logits", None)
        for i, entry in enumerate(state):
            for name in [f"layers.{i}.{f.name}" for f in entry.declared.fields if f.grows]:
                rows = mx.concatenate([one[name] for one in held], axis=ROW_AXIS)
                arrays[name] = rows[:, :, : match.tokens]
        mx.eval(arrays)
        return arrays

    def _use(self, node: Node, root: Node) -> None:
        path = node.path()
        for one in path[::-1]:
            self._held.use(one)
        if self._disk:
            self._disk.touch([one for one in path if one.disk == "stored"], root)


def _experts_in_memory(store: Any) -> dict[int, list[int]]:
    if (streaming := store.streaming) is None:
        return {}
    return {layer: sorted(streaming.residents(layer)) for layer in streaming.slots}
