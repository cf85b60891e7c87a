"""Traces: which experts every token chose, in a compact file. No MLX. Format: docs/trace-format.md.

:class:`TraceWriter` is a listener of a store's events, :class:`Trace` what can be replayed.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

from mlx_moeflux.checkpoint.files import read_whole, unwritable
from mlx_moeflux.checks import is_natural, is_positive
from mlx_moeflux.errors import InputError, UnsupportedError
from mlx_moeflux.experts.policies.eviction import ExpertRequest
from mlx_moeflux.experts.policies.named import NONE, label
from mlx_moeflux.experts.telemetry.events import (
    Chosen,
    Event,
    Guess,
    Hit,
    Miss,
    PrefetchDrop,
    PrefetchEnd,
    PrefetchStart,
    ReadEnd,
    Resize,
)
from mlx_moeflux.installation import install_command

FORMAT, VERSION = "mlx_moeflux.trace", 2
READABLE = (1, VERSION)
MAX_HEADER_BYTES = 1 << 20
MOST_TRACE_BYTES = 1 << 32
MAX_U16 = 65535  # layers and experts of the records

ROWS = struct.Struct("<cxxxI")  # kind, N
CALL = struct.Struct("<cBHIQQ")  # kind, K, layer, N, token, nanoseconds
RESULT = struct.Struct("<cxHIIIQd")  # kind, layer, hits, prefetched, misses, bytes, seconds
GUESS = struct.Struct("<cBH")  # kind, count, layer
PREFETCH = struct.Struct("<cxHH")  # kind, layer, expert
RESIZE = struct.Struct("<cxHI")  # kind, layer, slots
# Columns of Trace.to_numpy and their dtypes.
COLUMNS = (
    *(("call", np.int64), ("layer", np.uint16), ("token", np.int64)),
    *(("rank", np.uint8), ("expert", np.uint16), ("weight", np.float32)),
    *(("sequence", np.int32), ("prompt", np.bool_), ("token_id", np.int32)),
    *(("nanoseconds", np.int64), ("guessed", np.bool_), ("read_ahead", np.bool_)),
)
KINDS = {PrefetchStart: b"P", PrefetchEnd: b"A", PrefetchDrop: b"D"}


@dataclass(frozen=True)
class TraceInfo:
    """The description of the model and the run of a trace.

    model: The checkpoint's identity. block_bytes: MoE layer id -> bytes of one expert. slots: MoE
    layer id -> slots, None where everything was resident. cold: The banks were empty at the
    beginning, so that a replay must give the recorded hits.
    """

    num_experts: int
    experts_per_token: int
    layers: tuple[int, ...]
    block_bytes: Mapping[int, int]
    model: str = ""
    slots: Mapping[int, int] | None = None
    eviction: str = ""
    prefetch: str = NONE
    cold: bool = True

    @classmethod
    def of(cls, store: Any, *, experts_per_token: int, model: str = "") -> TraceInfo:
        """Describe `store` as it is now.

        Raises:
            InputError: It has no events to listen to.
        """
        if store.block_bytes is None:
            raise InputError(f"{type(store).__name__} has no events; it cannot be traced.")
        run = {}
        if (streaming := store.streaming) is not None:
            run["slots"], run["cold"] = streaming.slots, streaming.cold
            run["eviction"] = label(streaming.eviction)
            run["prefetch"] = label(streaming.prefetch) if streaming.prefetch else NONE
        return cls(
            num_experts=store.num_experts,
            experts_per_token=experts_per_token,
            layers=tuple(store.layers),
            block_bytes=store.block_bytes,
            model=model,
            **run,
        )

    def to_json(self) -> dict[str, Any]:
        """The header of the file."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {"format": FORMAT, "version": VERSION, **data}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TraceInfo:
        """Inverse of :meth:`to_json`; JSON's keys are strings."""
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        for name in ("block_bytes", "slots"):
            if known.get(name) is not None:
                known[name] = {int(layer): int(n) for layer, n in known[name].items()}
        info = cls(**{**known, "layers": tuple(known["layers"])})
        if not info.plausible():
            raise ValueError("a field has another type or is out of range")
        return info

    def plausible(self) -> bool:
        """Return True if every field has its type, and numbers that the records can hold."""
        per_layer = [self.block_bytes] + ([] if self.slots is None else [self.slots])
        return (
            all(is_positive(n) for n in (self.num_experts, self.experts_per_token))
            and self.experts_per_token <= self.num_experts < MAX_U16
            and all(is_natural(layer) and layer <= MAX_U16 for layer in self.layers)
            and all(set(of) == set(self.layers) for of in per_layer)
            and all(is_positive(n) and n < 1 << 63 for of in per_layer for n in of.values())
            and len(set(self.layers)) == len(self.layers) > 0
            and all(isinstance(s, str) for s in (self.model, self.eviction, self.prefetch))
            and isinstance(self.cold, bool)
        )


class Rows(NamedTuple):
    """What the N rows of a call are: numbers of their sequences, ids of their tokens, and whether
    these were read as part of a prompt, each ``[N]``. Those of padding mean nothing."""

    sequences: np.ndarray
    token_ids: np.ndarray
    prompt: np.ndarray

    @classmethod
    def together(cls, parts: Sequence[Rows]) -> Rows:
        """Return the rows of several sequences that are read in one call."""
        return cls(*map(np.concatenate, zip(*parts, strict=True)))


@dataclass
class Result:
    """The outcome of a recorded call: hits, those of them that were prefetched, misses; bytes that
    were read on demand and the seconds of their reads, summed over threads."""

    hits: int = 0
    prefetched: int = 0
    misses: int = 0
    nbytes: int = 0
    seconds: float = 0.0


@dataclass
class Call:
    """One call of a layer: ids ``[N, K]`` uint16 (E: padding), weights ``[N, K]`` float16.

    token: Tokens that the layer had seen before.
    nanoseconds: Since the beginning of the trace, when the ids were known.
    dropped: Experts that were being read ahead for this call and were given up.
    guess: The experts of the next layer as guessed after this call, None without a look-ahead and
    while the prefetcher is switched off.
    prefetches: Those that were then read ahead.
    resized: (layer, slots) of what was resized after it.
    result: None if the recording ended within the call or had nothing to look up.
    next_layer: The layer that `guess` and `prefetches` are of.
    rows: What the rows are: sequences, counted from 0 in the order in which they came, int32; ids
    of tokens, int32; prompts, bool: read in a call with more tokens of the sequence, or as its
    first token. None where no model said it, and in files of version 1.
    """

    layer: int
    token: int
    ids: np.ndarray
    weights: np.ndarray
    nanoseconds: int = 0
    dropped: tuple[int, ...] = ()
    guess: tuple[int, ...] | None = None
    prefetches: tuple[int, ...] = ()
    resized: tuple[tuple[int, int], ...] = ()
    result: Result | None = None
    next_layer: int | None = None
    rows: Rows | None = None


@dataclass(repr=False)
class Trace:
    """Calls in the order in which they were made."""

    info: TraceInfo
    calls: list[Call] = field(default_factory=list)
    complete: bool = True
    """Whether the file was closed properly; otherwise its end is missing."""

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a file that :class:`TraceWriter` wrote. One that was cut off is read to its last
        whole record.

        Raises:
            InputError: It is not a trace, of another version, or damaged.
        """
        data = read_whole(Path(path), most=MOST_TRACE_BYTES, error=InputError)
        end = data.find(b"\n", 0, MAX_HEADER_BYTES)
        trace = cls(_header(path, data[: max(end, 0)]), complete=False)
        reader = _Records(os.fspath(path), data, end + 1, trace)
        reader.read()
        return trace

    @property
    def tokens(self) -> int:
        """Tokens that passed the layer that saw most."""
        seen = dict.fromkeys(self.info.layers, 0)
        for call in self.calls:
            seen[call.layer] += len(call.ids)
        return max(seen.values(), default=0)

    def recorded(self) -> Result:
        """The sum of all results."""
        total = Result()
        for result in (call.result for call in self.calls if call.result is not None):
            for name in Result.__dataclass_fields__:
                setattr(total, name, getattr(total, name) + getattr(result, name))
        return total

    def to_numpy(self) -> dict[str, np.ndarray]:
        """Return one row for each expert of each token of each layer, in the order of the calls;
        padding is left out.

        Returns:
            Columns of equal length: ``call``, int64, the place in :attr:`calls`; ``layer``, uint16;
            ``token``, int64, counted by the layer; ``rank``, uint8, its place among the token's
            experts; ``expert``, uint16; ``weight``, float32; ``sequence``, int32, ``prompt``, bool,
            and ``token_id``, int32, see :attr:`Call.rows` (-1, False and -1 without them);
            ``nanoseconds``, int64, of the call; ``guessed``, bool, by the look-ahead before this
            call; ``read_ahead``, bool, for it.
        """
        columns: dict[str, list[np.ndarray]] = {name: [np.empty(0, dt)] for name, dt in COLUMNS}
        ahead: dict[int, Call] = {}  # layer -> the call that guessed and read for its next one
        for i, call in enumerate(self.calls):
            token, rank = np.nonzero(call.ids < self.info.num_experts)
            expert = call.ids[token, rank]
            before = ahead.pop(call.layer, None)
            guess, read = ((), ()) if before is None else (before.guess or (), before.prefetches)
            if call.next_layer is not None:
                ahead[call.next_layer] = call
            row = (i, call.layer, call.token + token, rank, expert, call.weights[token, rank])
            row += (-1, False, -1) if call.rows is None else (
                call.rows.sequences[token], call.rows.prompt[token], call.rows.token_ids[token]
            )  # fmt: skip
            arrived = [one for one in read if one not in call.dropped]
            row += (call.nanoseconds, np.isin(expert, guess), np.isin(expert, arrived))
            for (name, dtype), values in zip(COLUMNS, row, strict=True):
                columns[name].append(np.broadcast_to(values, token.shape).astype(dtype))
        return {name: np.concatenate(parts) for name, parts in columns.items()}

    def to_pandas(self) -> Any:
        """Return :meth:`to_numpy` as a ``pandas.DataFrame``.

        Raises:
            UnsupportedError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise UnsupportedError(
                f"a table needs pandas; install it with {install_command('mlx_moeflux[pandas]')}."
            ) from None
        return pandas.DataFrame(self.to_numpy())

    def __repr__(self) -> str:
        # A cell of a notebook prints its last value: all calls would be megabytes.
        end = "" if self.complete else ", cut off"
        return f"Trace({self.tokens} tokens, {len(self.calls)} calls{end}, {self.info})"

    def __iter__(self) -> Iterator[Call]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)


def requests_of(trace: Trace) -> list[ExpertRequest]:
    """Return the request of every call; cached for each trace."""
    known = trace.__dict__.get("_asked")
    if known is None or len(known) != len(trace.calls):
        E = trace.info.num_experts
        known = [ExpertRequest.of(call.ids, E, call.token) for call in trace.calls]
        trace.__dict__["_asked"] = known
    return known


class TraceWriter:
    """A listener of a store that writes a trace; a context manager.

    Each call costs a few microseconds and ``24 + 4 N K`` bytes, about 3 kB a token for 40 layers.

    Raises:
        InputError: The file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], info: TraceInfo):
        self.path = Path(path)
        try:
            self._file = open(self.path, "wb", buffering=1 << 20)  # noqa: SIM115
        except OSError as cause:
            raise unwritable(path, cause) from cause
        header = json.dumps(info.to_json(), separators=(",", ":"))
        self._write(header.encode() + b"\n")
        self._began, self._layer, self._result = perf_counter_ns(), -1, Result()
        self._known, self._written, self._numbers = threading.local(), None, {}
        self._listeners = {
            Hit: self._hit,
            Miss: self._miss,
            ReadEnd: self._read,
            Chosen: self._chosen,
            Guess: self._guess,
            Resize: self._resize,
            **dict.fromkeys(KINDS, self._prefetch),
        }

    @property
    def rows(self) -> Rows | None:
        """The rows that the calls of this thread read from now on; None: unknown. A model sets
        it."""
        return getattr(self._known, "rows", None)

    @rows.setter
    def rows(self, rows: Rows | None) -> None:
        self._known.rows = rows

    def __call__(self, event: Event) -> None:
        """Take one event of a store; those after :meth:`close` are dropped."""
        if (listen := self._listeners.get(type(event))) is not None:
            listen(event)

    def _hit(self, event: Hit) -> None:
        self._result.hits += 1
        self._result.prefetched += event.prefetched

    def _miss(self, event: Miss) -> None:
        self._result.misses += 1

    def _read(self, event: ReadEnd) -> None:
        self._result.nbytes += event.nbytes
        self._result.seconds += event.seconds

    def _chosen(self, event: Chosen) -> None:
        self._end_of_call()
        self._layer = event.layer
        N, K = event.ids.shape
        now = perf_counter_ns() - self._began
        rows = self.rows
        if rows is not None and len(rows.token_ids) != N:
            rows = None
        self._write(
            b"" if rows is self._written else self._packed(rows),
            CALL.pack(b"C", K, event.layer, N, event.token, now),
            event.ids.astype("<u2").tobytes(),
            event.weights.astype("<f2").tobytes(),
        )

    def _packed(self, rows: Rows | None) -> bytes:
        """Return the record of rows, which holds for the calls after it."""
        self._written = rows
        if rows is None:
            return ROWS.pack(b"T", 0)
        numbers, known = self._numbers, rows.sequences.tolist()
        known = [numbers.setdefault(number, len(numbers)) for number in known]
        ids = rows.token_ids.astype("<i4").tobytes()
        numbered = np.array(known, "<i4").tobytes()
        return ROWS.pack(b"T", len(known)) + numbered + ids + rows.prompt.astype("u1").tobytes()

    def _guess(self, event: Guess) -> None:
        self._end_of_call()
        self._write(
            GUESS.pack(b"G", len(event.experts), event.layer),
            np.array(event.experts, "<u2").tobytes(),
        )

    def _prefetch(self, event: PrefetchStart | PrefetchEnd | PrefetchDrop) -> None:
        self._write(PREFETCH.pack(KINDS[type(event)], event.layer, event.expert))

    def _resize(self, event: Resize) -> None:
        self._end_of_call()
        self._write(RESIZE.pack(b"S", event.layer, event.slots))

    def close(self) -> None:
        """Write what is left; a second call does nothing.

        Raises:
            InputError: The disk is full or failed. What was written can be read.
        """
        if self._file.closed:
            return
        try:
            self._end_of_call()
            self._write(b"E")
        finally:
            try:
                self._file.close()
            except OSError as cause:
                raise unwritable(self.path, cause) from cause

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _write(self, *pieces: bytes) -> None:
        try:
            # In one write, because several threads may call a resident store.
            self._file.write(b"".join(pieces))
        except OSError as cause:
            raise unwritable(self.path, cause) from cause
        except ValueError:
            if not self._file.closed:
                raise

    def _end_of_call(self) -> None:
        r = self._result
        if r.hits or r.misses:
            self._write(
                RESULT.pack(b"R", self._layer, r.hits, r.prefetched, r.misses, r.nbytes, r.seconds)
            )
            self._result = Result()


class _Records:
    """Walks over the records of a file and fills a trace."""

    def __init__(self, path: str, data: bytes, position: int, trace: Trace):
        self._path, self._data, self._at, self._trace = path, data, position, trace
        self._rows: Rows | None = None

    def read(self) -> None:
        """All records, up to the end or to the first one that is cut off."""
        kinds = {b"T": self._tokens, b"C": self._call, b"R": self._result, b"G": self._guess}
        kinds |= {
            b"S": self._resize,
            b"P": self._prefetch,
            b"A": self._prefetch,
            b"D": self._prefetch,
        }
        while self._at < len(self._data):
            kind = self._data[self._at : self._at + 1]
            if kind == b"E":
                self._trace.complete = True
                return
            if kind not in kinds:
                self._damaged(f"there is no record of kind {kind!r}")
            try:
                kinds[kind]()
            except (struct.error, _CutOff):
                return

    def _tokens(self) -> None:
        _, N = self._fields(ROWS)
        if N == 0:
            self._rows = None
            return
        numbers, ids = self._array("<i4", N), self._array("<i4", N)
        self._rows = Rows(numbers, ids, self._array("u1", N).astype(bool))

    def _call(self) -> None:
        _, K, layer, N, token, nanoseconds = self._fields(CALL)
        info = self._trace.info
        if layer not in info.block_bytes or not K or not N or token >> 62:
            self._damaged(f"a call of layer {layer} with {N} tokens of {K} experts after {token}")
        ids, weights = self._array("<u2", N * K), self._array("<f2", N * K)
        if ids.max() > info.num_experts:
            self._damaged(f"expert {ids.max()} of {info.num_experts}")
        rows = self._rows
        if rows is not None and len(rows.token_ids) != N:
            self._damaged(f"a call of {N} tokens behind a record of {len(rows.token_ids)}")
        shape = (N, K)
        self._trace.calls.append(
            Call(layer, token, ids.reshape(shape), weights.reshape(shape), nanoseconds, rows=rows)
        )

    def _result(self) -> None:
        result = Result(*self._fields(RESULT)[2:])
        self._last().result = result

    def _guess(self) -> None:
        _, count, layer = self._fields(GUESS)
        last = self._last()
        last.guess, last.next_layer = tuple(self._array("<u2", count).tolist()), layer

    def _prefetch(self) -> None:
        kind, layer, expert = self._fields(PREFETCH)
        if kind == b"P":
            self._last().prefetches += (expert,)
            self._last().next_layer = layer
        elif kind == b"D":
            self._last().dropped += (expert,)

    def _resize(self) -> None:
        _, layer, slots = self._fields(RESIZE)
        trace = self._trace
        if trace.calls:
            trace.calls[-1].resized += ((layer, slots),)
        elif trace.info.slots is not None:
            trace.info = replace(trace.info, slots={**trace.info.slots, layer: slots})

    def _last(self) -> Call:
        if not self._trace.calls:
            self._damaged("it does not begin with a call")
        return self._trace.calls[-1]

    def _fields(self, form: struct.Struct) -> tuple[Any, ...]:
        values = form.unpack_from(self._data, self._at)
        self._at += form.size
        return values

    def _array(self, dtype: str, count: int) -> np.ndarray:
        nbytes = count * np.dtype(dtype).itemsize
        if self._at + nbytes > len(self._data):
            raise _CutOff
        array = np.frombuffer(self._data, dtype, count, self._at)
        self._at += nbytes
        return array

    def _damaged(self, what: str) -> None:
        raise InputError(f"{self._path} is damaged at offset {self._at}: {what}; record it again.")


class _CutOff(Exception):
    """The file ends within a record."""


def _header(path: str | os.PathLike[str], line: bytes) -> TraceInfo:
    try:
        data = json.loads(line)
        if data["format"] != FORMAT:
            raise KeyError("format")
        version = data["version"]
        info = TraceInfo.from_json(data)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise InputError(f"{path} is not a trace; record one with --trace FILE.") from None
    if version not in READABLE:
        raise InputError(f"{path} is a trace of version {version}; this package reads {VERSION}.")
    return info
