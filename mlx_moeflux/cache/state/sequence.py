"""State of a whole sequence: snapshots, checkpoints by position, files."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import mlx.core as mx

from mlx_moeflux.cache.base import BaseCache, check_positions
from mlx_moeflux.cache.state.files import Format, open_file, to_host, write_file
from mlx_moeflux.cache.state.spec import StateSpec, adopt, check_arrays, export
from mlx_moeflux.errors import CacheError
from mlx_moeflux.state_arrays import ArraySpec

STATE_FORMAT = Format("mlx_moeflux.state", 1)

# As many as an API client may set in one request.
MAX_CHECKPOINTS = 4


class Snapshot:
    """An immutable moment of a state.

    It shares its arrays with the state, so the next token copies the buffers that it writes to.
    position: Tokens seen by the longest sequence. logits: ``[V]`` after the last one, if given.
    nbytes: Bytes of all arrays.
    """

    def __init__(self, entries: Iterable[BaseCache], logits: mx.array | None):
        self.entries = tuple(copy.deepcopy(entry) for entry in entries)
        self.logits = logits
        self.position = max(check_positions(self.entries))
        mx.eval([entry._arrays() for entry in self.entries], logits)

    @property
    def nbytes(self) -> int:
        logits = 0 if self.logits is None else self.logits.nbytes
        return logits + sum(entry.nbytes for entry in self.entries)


class Owner(Protocol):
    """The model, as far as a state calls it."""

    identity: str

    def state_spec(self) -> StateSpec: ...


class SequenceState(list):
    """List of one cache entry per layer, as ``model.make_cache()`` returns it. Not thread-safe.

    owner: The model that made it, which knows the arrays of a file; None for none.
    max_checkpoints: Limit of :meth:`checkpoint`; a lower one applies from its next call.
    """

    def __init__(
        self,
        entries: Iterable[BaseCache] = (),
        owner: Owner | None = None,
    ):
        super().__init__(entries)
        self.owner = owner
        self.max_checkpoints = MAX_CHECKPOINTS
        # Least recently used first.
        self._checkpoints: dict[int, Snapshot] = {}

    @property
    def position(self) -> int:
        """Return the tokens seen by the longest sequence.

        Raises:
            CacheError: The entries disagree.
        """
        return max(check_positions(self))

    @property
    def nbytes(self) -> int:
        """Return the bytes of all entries, unused rows included, without the checkpoints."""
        return sum(entry.nbytes for entry in self)

    def spec(self) -> StateSpec:
        """Return the kinds and arrays that the entries must have.

        Raises:
            CacheError: The state has no model.
        """
        if self.owner is None:
            raise CacheError("This state knows no model; make it with model.make_cache().")
        return self.owner.state_spec()

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceState:
        """Return an independent state that shares arrays, without the checkpoints."""
        other = type(self)(copy.deepcopy(list(self), memo), self.owner)
        other.max_checkpoints = self.max_checkpoints
        return other

    def watch(self, positions: Iterable[int]) -> None:
        """Make recurrent layers keep their states at these positions when they pass them."""
        positions = list(positions)
        for entry in self:
            if not entry.declared.grows:
                entry.watch(positions)

    # In memory.

    def snapshot(self, logits: mx.array | None = None) -> Snapshot:
        """Return a snapshot of this moment. logits: ``[V]`` after the last token, kept with it.

        Evaluates: the state.
        """
        return Snapshot(self, logits)

    def restore(self, snapshot: Snapshot) -> None:
        """Take the state of `snapshot` and drop checkpoints of later positions.

        Raises:
            CacheError: The snapshot is of another kind of model.
        """
        mine, its = ([entry.kind for entry in entries] for entries in (self, snapshot.entries))
        if mine != its:
            raise CacheError(
                f"The snapshot has {len(its)} entries of other kinds than this state's "
                f"{len(mine)}; restore it into a state of its own model."
            )
        self[:] = [copy.deepcopy(entry) for entry in snapshot.entries]
        self.forget_after(snapshot.position)

    def reset(self) -> None:
        """Make the state empty and drop all checkpoints."""
        self[:] = [type(entry)() for entry in self]
        self._checkpoints.clear()

    def truncate(self, position: int) -> None:
        """Drop all tokens from `position` on.

        Raises:
            CacheError: The state has fewer tokens, or a recurrent layer cannot go back.
        """
        excess = self.position - position
        if position < 0 or excess < 0:
            raise CacheError(
                f"There is no position {position} in a state of {self.position} tokens; give one "
                "that was passed."
            )
        if excess and not all(entry.is_trimmable() for entry in self):
            raise CacheError(
                f"A model with recurrent layers cannot go back from {self.position} to {position} "
                "tokens by truncation; restore a snapshot or a checkpoint taken there."
            )
        for entry in self:
            entry.trim(excess)
        self.forget_after(position)

    # Checkpoints.

    @property
    def checkpoints(self) -> list[int]:
        """Return the positions of all checkpoints, ascending."""
        return sorted(self._checkpoints)

    def checkpoint(self, position: int | None = None) -> int:
        """Store a checkpoint of this moment and return its position.

        position: The expected position, checked. Above ``max_checkpoints`` the least recently used
        checkpoint is dropped, but never that of position 0 nor this one.

        Raises:
            CacheError: The state is at another position.
        """
        now = self.position
        if position not in (None, now):
            raise CacheError(f"The state is at position {now}, not {position}; checkpoint there.")
        snapshot = self.snapshot()
        self._checkpoints.pop(now, None)
        self._checkpoints[now] = snapshot
        oldest = [p for p in self._checkpoints if p not in (0, now)]
        excess = max(len(self._checkpoints) - self.max_checkpoints, 0)
        for old in oldest[:excess]:
            del self._checkpoints[old]
        return now

    def restore_to(self, position: int) -> None:
        """Restore a checkpoint and drop those of later positions.

        Raises:
            CacheError: No checkpoint has exactly this position.
        """
        if position not in self._checkpoints:
            raise CacheError(
                f"There is no checkpoint at position {position}; there are {self.checkpoints}."
            )
        self._checkpoints[position] = self._checkpoints.pop(position)
        self.restore(self._checkpoints[position])

    def forget(self, position: int) -> None:
        """Drop the checkpoint of a position, if it exists; the state does not change."""
        self._checkpoints.pop(position, None)

    def forget_after(self, position: int) -> None:
        """Drop all checkpoints of later positions."""
        for later in [p for p in self._checkpoints if p > position]:
            del self._checkpoints[later]

    # Files.

    def save(
        self,
        path: str | os.PathLike[str],
        logits: mx.array | None = None,
        *,
        notes: Mapping[str, str] | None = None,
    ) -> int:
        """Write the state of one sequence to a safetensors file and return its size in bytes.

        logits: ``[V]`` after the last token, which :meth:`load` returns. notes: Strings for
        :func:`read_notes`. The same state gives the same bytes.

        Raises:
            CacheError: The state holds several sequences, or the disk is full or failed.
        """
        spec, position = self.spec(), self.position
        arrays = export(self)
        if logits is not None:
            arrays["logits"] = logits
        facts = {
            "identity": spec.identity,
            "position": str(position),
            "kinds": json.dumps([entry.kind for entry in self]),
            "notes": json.dumps(dict(notes or {}), sort_keys=True),
        }
        return write_file(path, STATE_FORMAT, facts=facts, arrays=to_host(arrays))

    def load(self, path: str | os.PathLike[str]) -> mx.array | None:
        """Take the state of a file, drop checkpoints of later positions, return its logits.

        Raises:
            CacheError: The file is damaged, of another version, or of another model; the state
                does not change.
        """
        spec, file = self.spec(), open_file(path, STATE_FORMAT)
        if file.facts.get("identity") != spec.identity:
            raise CacheError(
                f"{file.path} was saved by another model (or dtype, or experts per token); "
                "load the model that it belongs to."
            )
        position = file.number("position")
        kinds = [entry.kind for entry in spec.entries]
        if file.json("kinds") != kinds:
            raise CacheError(f"{file.path} has entries of other kinds than {kinds}; remove it.")
        expected = spec.expected(position) if position else {}
        if "logits" in file.specs:
            expected["logits"] = ArraySpec(file.specs["logits"].dtype, (spec.vocabulary,))
        check_arrays(file.path, file.specs, expected)
        arrays = file.read()
        logits = arrays.pop("logits", None)
        adopt(self, arrays, position=position)
        self.forget_after(position)
        return logits


def read_notes(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the notes of a saved state without reading its arrays.

    Raises:
        CacheError: The file is no saved state.
    """
    notes = open_file(path, STATE_FORMAT).json("notes")
    return {k: v for k, v in notes.items() if isinstance(v, str)} if isinstance(notes, dict) else {}
