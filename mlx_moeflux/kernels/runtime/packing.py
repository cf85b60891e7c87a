"""Arrays that lie in one buffer, of which a launch takes one input for all of them.

MLX spends about 0.75 us of the host's time on every input of every launch, traced or not, and a
layer's parameters are some thirty arrays: a decode step waits for that, not for the GPU. Here
parameters stay arrays of their own, views of a buffer that :data:`PLACES` knows; a kernel that is
given several of one buffer takes the buffer and finds them by constants in its text. An array that
is given twice is taken once, so that any array may stand where a call has none. Nothing else
changes, and no function that launches needs to know. On an H100 it took a step of the 35B shape
from 4.2 to 5.9 ms down to 3.0 to 4.3 (docs/notes/benchmarks.md).

Arrays of equally many rows may lie *by rows*: each begins after as many bytes as the ones before it
have a row, times the rows, which a kernel reads off the buffer's shape. So banks of any number of
slots share one text: on an H100 compiling those of a prefill took 3 s for each number of slots.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_moeflux.kernels.runtime import views

# Where an array may begin (files are read into some: direct reads ask for blocks of the disk), and
# what `start` counts: constants are ints, buffers have gigabytes.
ALIGNED, UNIT = 4096, 16
WORD = 4
# MLX counts elements of an axis with 31 bits.
MOST_BYTES = WORD * (2**31 - 1)

TYPES = {
    mx.float32: "float",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.uint32: "uint32_t",
    mx.int32: "int32_t",
    mx.uint8: "uint8_t",
}


class Place:
    """The place of an array: `start` units of 16 bytes into `buffer`, or into each of its rows; the
    array's type in a kernel, and the length of its first axis."""

    __slots__ = ("buffer", "by_rows", "rows", "start", "type")

    def __init__(self, buffer: mx.array, start: int, array: mx.array):
        self.type, self.rows = TYPES[array.dtype], array.shape[0]
        self.buffer, self.by_rows = buffer, buffer.ndim == 2
        self.start = start // UNIT // (self.rows if self.by_rows else 1)


# By id() of the array; its Packing keeps it alive as long as it is here.
PLACES: dict[int, Place] = {}


class _Deaths:
    """Counts packings that are gone: other arrays may have their ids now."""

    count = 0


class Packing:
    """Arrays in one buffer, for as long as this object lives.

    buffer: uint32. arrays: Views of it, of the shapes and dtypes asked for. starts: Bytes.
    """

    arrays: Sequence[mx.array] = ()

    def __init__(self, buffer: mx.array, like: Sequence[tuple[Sequence[int], mx.Dtype]]):
        """`buffer` is 1-d and has :func:`packed_bytes` bytes, or has the shape :func:`by_rows`.
        Evaluates: the views, short ones too."""
        self.buffer = buffer
        self.starts, _ = _starts(like, 1 if buffer.ndim == 2 else ALIGNED)
        self.arrays = [
            _view(buffer, start, shape, dtype)
            for start, (shape, dtype) in zip(self.starts, like, strict=True)
        ]
        mx.eval(self.arrays)
        views.keep([buffer, *self.arrays])
        for array, start in zip(self.arrays, self.starts, strict=True):
            PLACES[id(array)] = Place(buffer, start, array)

    @classmethod
    def of(cls, arrays: Sequence[mx.array]) -> Packing:
        """Copies of `arrays`. Evaluates: the buffer."""
        like = [(array.shape, array.dtype) for array in arrays]
        starts, end = _starts(like)
        parts: list[mx.array] = []
        for array, start, stop in zip(arrays, starts, [*starts[1:], end], strict=True):
            words = _words(array)
            parts += [words, mx.zeros(((stop - start - words.nbytes) // WORD,), mx.uint32)]
        buffer = mx.concatenate(parts)
        mx.eval(buffer)
        return cls(buffer, like)

    def __del__(self):
        # Keep them until they are counted: until then no other array gets their ids.
        gone = [PLACES.pop(id(array), None) for array in self.arrays]
        _Deaths.count += 1
        del gone

    def __deepcopy__(self, memo: object) -> None:
        """Copies of the views are arrays like any other."""


def fits(like: Sequence[tuple[Sequence[int], mx.Dtype]]) -> bool:
    """Return True for several arrays whose shapes and dtypes fit in one buffer."""
    known = all(dtype in TYPES for _, dtype in like)
    most = min(MOST_BYTES, largest_buffer() or MOST_BYTES)
    return len(like) > 1 and known and packed_bytes(like) <= most


def largest_buffer() -> int | None:
    """Bytes that an array may have on Metal; None on other back ends."""
    return int(mx.device_info(mx.gpu)["max_buffer_length"]) if mx.metal.is_available() else None


def packed_bytes(like: Sequence[tuple[Sequence[int], mx.Dtype]]) -> int:
    """Bytes of a buffer for arrays of these shapes and dtypes."""
    return _starts(like)[1]


def by_rows(like: Sequence[tuple[Sequence[int], mx.Dtype]]) -> tuple[int, int] | None:
    """The shape of a buffer for arrays of these shapes and dtypes by rows; None if they differ in
    the length of their first axis, or rows are not whole units."""
    counts = {shape[0] for shape, _ in like}
    sizes = [math.prod(shape[1:]) * dtype.size for shape, dtype in like]
    if len(counts) != 1 or any(size % UNIT for size in sizes):
        return None
    return counts.pop(), sum(sizes) // WORD


def _starts(
    like: Sequence[tuple[Sequence[int], mx.Dtype]], aligned: int = ALIGNED
) -> tuple[list[int], int]:
    starts, end = [], 0
    for shape, dtype in like:
        starts.append(end)
        end += -(-math.prod(shape) * dtype.size // aligned) * aligned
    return starts, end


def _words(array: mx.array) -> mx.array:
    """The bytes of an array as uint32, and zeros up to the next."""
    odd = -array.nbytes % WORD
    flat = array.reshape(-1)
    if odd:
        flat = mx.concatenate([flat, mx.zeros((odd // array.itemsize,), array.dtype)])
    return flat.view(mx.uint32)


def _view(buffer: mx.array, start: int, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    count, first = math.prod(shape), start // WORD
    words = buffer.reshape(-1)[first : first - (-count * dtype.size // WORD)]
    return words.view(dtype)[:count].reshape(shape)


class Binding(NamedTuple):
    """The source of one input of a kernel.

    source: Index of the array that is passed. type: The element type, if the input is a part of
    that array. rows: True if the body reads the length of its first axis. by_rows: True if the
    parts of that array are interleaved by rows.
    """

    source: int
    type: str = ""
    rows: bool = False
    by_rows: bool = False


class Arrangement(NamedTuple):
    """Fewer arrays in the place of a kernel's inputs.

    sources: Of which input each is, and whether it is that input's buffer. template: The
    constants that say what is where.
    """

    bindings: tuple[Binding, ...]
    sources: tuple[tuple[int, bool], ...]
    template: dict[str, int]


class Arranger:
    """Finds arrangements of one kernel's inputs, each once.

    shaped: Of the inputs whose shape the body reads, whether it reads the first axis alone; an
        input of which it reads more stays what it is.
    """

    def __init__(self, names: Sequence[str], shaped: Mapping[str, bool]):
        self.names, self.shaped = tuple(names), dict(shaped)
        self._known: dict[tuple[int, ...], Arrangement | None] = {}
        self._deaths = 0

    def __call__(self, arrays: Sequence[mx.array]) -> tuple[Arrangement, list[mx.array]] | None:
        """The inputs of a call with those of one buffer as one; None: they stay what they are."""
        deaths, ids = _Deaths.count, tuple(map(id, arrays))
        found: tuple[Any, ...] = tuple(map(PLACES.get, ids))
        places, twice = any(found), len(set(ids)) < len(ids)
        if not places and not twice:
            return None
        key = tuple(map(id, found)) if places else ()
        if twice:
            key += tuple(map(ids.index, ids))
        if self._deaths != deaths:
            self._known, self._deaths = {}, deaths
        try:
            arrangement = self._known[key]
        except KeyError:
            arrangement = self._known[key] = _arrangement(self.names, self.shaped, arrays, found)
        if arrangement is None:
            return None
        taken = [found[i].buffer if whole else arrays[i] for i, whole in arrangement.sources]
        return arrangement, taken


def _arrangement(
    names: Sequence[str],
    shaped: Mapping[str, bool],
    arrays: Sequence[mx.array],
    found: Sequence[Place | None],
) -> Arrangement | None:
    places = [p if shaped.get(n, True) else None for n, p in zip(names, found, strict=True)]
    lying = {id(a): id(p.buffer) for a, p in zip(arrays, places, strict=True) if p is not None}
    shared = {buffer for buffer, count in Counter(lying.values()).items() if count > 1}
    if not shared and len({*map(id, arrays)}) == len(arrays):
        return None
    known: dict[Any, int] = {}
    bindings, sources, template = [], [], {}
    for i, (name, array, place) in enumerate(zip(names, arrays, places, strict=True)):
        part = place if place is not None and id(place.buffer) in shared else None
        # An array whose shape is read stays apart from others whose shape is read.
        source = id(part.buffer) if part else (id(array), name if name in shaped else "")
        if not part and name not in shaped:
            source = next((s for s in known if isinstance(s, tuple) and s[0] == id(array)), source)
        if source not in known:
            known[source] = len(sources)
            sources.append((i, part is not None))
        if not part:
            bindings.append(Binding(known[source]))
            continue
        template[f"{name}_at"] = part.start
        if name in shaped and not part.by_rows:
            template[f"{name}_rows"] = part.rows
        bindings.append(Binding(known[source], part.type, name in shaped, part.by_rows))
    return Arrangement(tuple(bindings), tuple(sources), template)


def source_names(names: Sequence[str], bindings: Sequence[Binding]) -> tuple[str, ...]:
    """Return the names of the arrays that are passed: a buffer has a name of its own, others have
    that of their first input."""
    found: dict[int, str] = {}
    for name, binding in zip(names, bindings, strict=True):
        called = f"packed{binding.source}" if binding.type else name
        found.setdefault(binding.source, called)
    return tuple(found[source] for source in range(len(found)))


def opening(names: Sequence[str], bindings: Sequence[Binding]) -> str:
    """Return the beginning of a kernel's body in Metal's language, which defines all `names`."""
    sources, lines = source_names(names, bindings), []
    for name, binding in zip(names, bindings, strict=True):
        source = sources[binding.source]
        if binding.type:
            pointer = f"const device {binding.type}*"
            at = f"ulong({name}_at) * {UNIT // WORD}" + f" * {source}_shape[0]" * binding.by_rows
            lines.append(f"{pointer} {name} = ({pointer})({source} + {at});")
        elif source != name:
            lines.append(f"auto {name} = {source};")
        if binding.rows:
            rows = f"{source}_shape[0]" if binding.by_rows else f"{name}_rows"
            lines.append(f"const int {name}_shape[1] = {{{rows}}};")
    return "\n".join([*lines, ""])
