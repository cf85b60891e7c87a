"""Which GGUF file is meant: models, their shards, and other files in a folder or a repository.

Names are as published: `Model-Q4_K_M.gguf`, `Model-UD-Q4_K_XL.gguf`, `model.i1-Q4_K_M.gguf`, and
`Q8_0/Model-Q8_0-00001-of-00003.gguf` for a set of shards. The last part that names a type of block
is the quantisation.

Source: llama.cpp's `common/download.cpp` (tags, files beside a model) and `gguf-split` (shards).
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mlx_moeflux.checkpoint.files import format_size, opened, size_of, unreadable
from mlx_moeflux.checkpoint.formats.gguf_container import MAGIC
from mlx_moeflux.errors import CheckpointError, ChoiceError, InputError, UnsupportedError

SUFFIX = ".gguf"
MOST_LISTED, MOST_NAME = 40, 100
_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_QUANTISATION = re.compile(
    r"(?<![a-z0-9])(?:UD-|i1-)?"
    r"(?:(?:I|T)?Q\d(?:_[a-z0-9]{1,3})*|(?:MX|NV)FP\d(?:_MOE)?|B?F16|FP16|F32)(?![a-z0-9])",
    re.IGNORECASE,
)
_MAKER = re.compile(r"(?:UD|i1)-", re.IGNORECASE)

_PROJECTOR = "a vision projector (mmproj)"
_IMATRIX = "an importance matrix (imatrix), which only programs that quantise read"
_ADAPTER = "an adapter (LoRA)"
# What lies beside models, by name, and by the architecture or type at the head of the file.
_BESIDE_BY_NAME = {
    re.compile(pattern, re.IGNORECASE): what
    for pattern, what in {
        "mmproj": _PROJECTOR,
        "imatrix": _IMATRIX,
        "^ggml-(lora|adapter)|-lora$": _ADAPTER,
        "^(mtp|eagle3|dflash|dspark)-": "a draft model",
    }.items()
}
_BESIDE_BY_KIND = {
    b"clip": _PROJECTOR,
    b"mmproj": _PROJECTOR,
    b"imatrix": _IMATRIX,
    b"adapter": _ADAPTER,
}
# A key, the type "string" and a length below 256. Writers put these keys first.
_HEAD_BYTES = 4096
_HEAD_KIND = re.compile(rb"general\.(architecture|type)\x08\0{3}([^\0])\0{7}", re.DOTALL)


class GgufEntry(NamedTuple):
    """A GGUF file of a folder or repository.

    name: Its path there, with "/". beside: What it is, if it is no model.
    """

    name: str
    nbytes: int
    beside: str | None = None


class GgufModel(NamedTuple):
    """A model in one file or in shards.

    stem: Path without the shard's number and the suffix. count: Of its shards; 0: it has none.
    files: Those that are there, ordered. nbytes: Of all of them.
    """

    stem: str
    count: int
    files: tuple[str, ...]
    nbytes: int

    @property
    def label(self) -> str:
        """Return what one writes to choose it: its quantisation, or its name without a suffix."""
        parts = self.stem.rsplit("/", 2)[::-1]
        found = (match[0] for part in parts for match in [*_QUANTISATION.finditer(part)][-1:])
        return next(found, parts[0])

    def names(self) -> tuple[set[str], ...]:
        """Return what it answers to, in lower case; an earlier set goes before a later one."""
        paths = {self.stem, *self.files}
        label = self.label.casefold()
        return (
            {name.casefold() for path in paths for name in (path, path.rpartition("/")[2])},
            {label},
            {_MAKER.sub("", label)},
        )


def entries_of(sizes: Mapping[str, int]) -> list[GgufEntry]:
    """Return the GGUF files among the files of a repository, path -> bytes."""
    return [
        GgufEntry(name, nbytes, _beside(name))
        for name, nbytes in sizes.items()
        if name.endswith(SUFFIX) and name.count("/") <= 1
    ]


def entries_in(folder: Path) -> list[GgufEntry]:
    """Return the GGUF files of a folder and of the folders in it.

    Raises:
        CheckpointError: One cannot be read.
    """
    files = [*folder.glob(f"*{SUFFIX}"), *folder.glob(f"*/*{SUFFIX}")]
    return [
        GgufEntry(name := str(file.relative_to(folder).as_posix()), size_of(file),
                  _beside(name, _head(file)))
        for file in sorted(files) if file.is_file()
    ]  # fmt: skip


def find_gguf(path: Path, chosen: str | None = None, *, place: str | None = None) -> Path | None:
    """Return the GGUF file of a model, its first shard; None if `path` holds none.

    path: The file, one of its shards, or a directory that holds it or a folder with it. chosen:
    See :func:`choose`; without it a directory of safetensors is none of GGUF. place: What
    messages call the directory.

    Raises:
        CheckpointError: A shard is missing, or a file cannot be read.
        ChoiceError, InputError: See :func:`choose`; `path` is a file, and `chosen` is given too.
        UnsupportedError: The file is no model but lies beside models.
    """
    if path.is_file():
        if chosen is not None:
            raise InputError(f"{path} is a file already; leave out gguf_file.")
        head = _head(path)
        check_head(path, head)
        return shards(path)[0] if path.suffix == SUFFIX or head.startswith(MAGIC) else None
    if chosen is None and any(path.glob("*.safetensors")):
        return None
    model = choose(place or str(path), entries_in(path), chosen)
    return None if model is None else path / model.files[0]


def check_head(file: Path | str, head: bytes) -> str | None:
    """Return the ``general.architecture`` of a file that begins with `head`, None if it is not in
    there or not of 1 to 255 bytes.

    Raises:
        UnsupportedError: The file is no model but lies beside models.
    """
    beside = _beside("" if head.startswith(MAGIC) else Path(file).name, head)
    if beside is not None:
        raise UnsupportedError(f"{file} is {beside}; pass the GGUF file of the language model.")
    named = (kind for key, kind in _kinds(head) if key == b"architecture")
    return next((kind.decode(errors="replace") for kind in named), None)


def choose(place: str, entries: Sequence[GgufEntry], chosen: str | None = None) -> GgufModel | None:
    """Return the only model of `entries`, or the chosen one; None if there is none.

    chosen: A quantisation such as ``Q4_K_M``, with or without its maker's mark (``UD-``, ``i1-``),
    or a file's name; in any case of letters.

    Raises:
        ChoiceError: Several models are there, or `chosen` fits none or several.
        CheckpointError: A shard is missing.
        InputError: `chosen` is no text.
    """
    found = _models(entries)
    if chosen is not None:
        found = _chosen(place, entries, found, chosen)
    if len(found) > 1:
        there = f"{place} holds" if chosen is None else f"{place}: {chosen!r} fits"
        listed, first = _listed(found)
        raise ChoiceError(
            f"{there} {len(found)} GGUF models: {listed}; choose one with gguf_file "
            f"(--gguf-file {first}), or write :{first} behind the model."
        )
    for model in found:
        for number in range(1, model.count + 1):
            name = _shard_name(model.stem, number, model.count)
            if name not in model.files:
                raise _missing(f"{place}: {name}", model.count)
    return found[0] if found else None


def shards(path: Path) -> list[Path]:
    """Return the files of the set that `path` is one of, in order; `path` alone if it is in none.

    Raises:
        CheckpointError: One is missing.
    """
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    files, count = [], int(match["count"])
    for number in range(1, count + 1):
        file = path.with_name(_shard_name(match["stem"], number, count))
        if not file.is_file():
            raise _missing(file, count)
        files.append(file)
    return files or [path]


def check_shards(files: Sequence[Path], headers: Iterable[Mapping[str, Any]]) -> None:
    """Compare the names of a model's files with what their headers say.

    Raises:
        CheckpointError: A file is another shard than its name says.
    """
    for number, (file, header) in enumerate(zip(files, headers, strict=True)):
        own, count = (header.get(f"split.{key}") for key in ("no", "count"))
        if count and (own, count) != (number, len(files)):
            raise CheckpointError(
                f"{file} has split.no {own!r} (from 0) of split.count {count!r}, and its name says"
                " another; name the shards NAME-00001-of-00002.gguf and so on, as they were."
            )


def refuse_other_files(place: Path | str, entries: Sequence[GgufEntry]) -> None:
    """Raise CheckpointError if there are files of GGUF and none is a model."""
    if entries and all(entry.beside for entry in entries):
        first = min(entries)
        raise CheckpointError(
            f"{place} holds {first.name}, {first.beside}, and no model; add the GGUF file of the "
            "language model."
        )


def _models(entries: Iterable[GgufEntry]) -> list[GgufModel]:
    """Return the models of `entries`, the smallest first."""
    sets: dict[tuple[str, int], list[GgufEntry]] = defaultdict(list)
    for entry in entries:
        if entry.beside is None:
            match = _SHARD.fullmatch(entry.name)
            stem = match["stem"] if match else entry.name.removesuffix(SUFFIX)
            sets[stem, int(match["count"]) if match else 0].append(entry)
    models = (
        GgufModel(stem, count, tuple(sorted(e.name for e in own)), sum(e.nbytes for e in own))
        for (stem, count), own in sets.items()
    )
    return sorted(models, key=lambda model: (model.nbytes, model.stem))


def _chosen(
    place: str, entries: Sequence[GgufEntry], models: Sequence[GgufModel], chosen: str
) -> list[GgufModel]:
    """Return the models that `chosen` may mean: those of the first kind of name that fits any."""
    if not isinstance(chosen, str):
        raise InputError(f"gguf_file is {chosen!r}; give a name such as 'Q4_K_M'.")
    name = chosen.casefold()
    for kind in zip(*(model.names() for model in models), strict=True):
        found = [model for model, names in zip(models, kind, strict=True) if name in names]
        if found:
            return found
    listed = f"; there are {_listed(models)[0]}" if models else " and no other; leave out gguf_file"
    for entry in entries:
        if entry.beside and name in (entry.name.casefold(), Path(entry.name).name.casefold()):
            raise ChoiceError(f"{place}: {entry.name} is {entry.beside}, no model{listed}.")
    raise ChoiceError(f"{place} holds no GGUF model {_short(chosen)!r}{listed}.")


def _short(name: str) -> str:
    return name if len(name) <= MOST_NAME else f"{name[:MOST_NAME]}..."


def _listed(models: Sequence[GgufModel]) -> tuple[str, str]:
    """Return the models as one writes them, with their sizes, and the first of them."""
    labels = Counter(model.label.casefold() for model in models)
    names = [
        model.label if labels[model.label.casefold()] == 1 else model.files[0] for model in models
    ]
    names = [_short(name) for name in names]
    texts = [f"{n} {format_size(m.nbytes)}" for n, m in zip(names, models, strict=True)]
    more = [f"and {len(texts) - MOST_LISTED} more"] if len(texts) > MOST_LISTED else []
    return ", ".join(texts[:MOST_LISTED] + more), names[0]


def _beside(name: str, head: bytes = b"") -> str | None:
    """Return what a file is by its name or its first bytes, None for a model."""
    for _, kind in _kinds(head):
        if kind in _BESIDE_BY_KIND:
            return _BESIDE_BY_KIND[kind]
    stem = name.rpartition("/")[2].removesuffix(SUFFIX)
    return next((what for p, what in _BESIDE_BY_NAME.items() if p.search(stem)), None)


def _kinds(head: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield "architecture" or "type", and what the first bytes of a file say of it."""
    for match in _HEAD_KIND.finditer(head):
        if (end := match.end() + match[2][0]) <= len(head):
            yield match[1], head[match.end() : end]


def _head(file: Path) -> bytes:
    with opened(file) as fd:
        try:
            return os.read(fd, _HEAD_BYTES)
        except OSError as cause:
            raise unreadable(file, cause) from cause


def _shard_name(stem: str, number: int, count: int) -> str:
    return f"{stem}-{number:05d}-of-{count:05d}{SUFFIX}"


def _missing(file: Path | str, count: int) -> CheckpointError:
    return CheckpointError(f"{file} is missing; the model has {count} shards, fetch it.")
