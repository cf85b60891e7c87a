"""Parses the name of a model: a path, a hub id or a short name, a revision, a GGUF model."""

from __future__ import annotations

import difflib
import os
import re
from typing import NamedTuple

from mlx_moeflux.checkpoint.catalogue import catalogue
from mlx_moeflux.errors import CheckpointError, InputError

_ADDRESS = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<id>[\w.-]+/[\w.-]+(?::[\w.-]+)?)/?",
    re.ASCII,
)
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


class ModelName(NamedTuple):
    """A model as it was named. ``str()`` gives a text that :func:`parse_model_name` reads.

    place: An existing path, or a hub id. revision: A branch, tag or commit. chosen: One of several
    GGUF models. None: not given.
    """

    place: str
    revision: str | None
    chosen: str | None

    def __str__(self) -> str:
        revision = "" if self.revision is None or self.is_path else f"@{self.revision}"
        return f"{self.place}{revision}{'' if self.chosen is None else f':{self.chosen}'}"

    @property
    def is_path(self) -> bool:
        """True if the model is on this machine, outside the hub's ids."""
        return _exists(self.place)


def parse_model_name(
    name: str | os.PathLike[str], *, revision: str | None = None, gguf_file: str | None = None
) -> ModelName:
    """Parse ``path``, ``org/name``, ``short-name``, each with ``:quantisation`` behind it, the last
    two with ``@revision`` before that.

    An existing path wins over a hub id. A short name stands for its repository in the catalogue;
    with a quantisation, for its GGUF repository.

    Args:
        revision: What `name` may say behind ``@``.
        gguf_file: What `name` may say behind a colon.

    Raises:
        CheckpointError: There is no such path, and it is neither an id nor a short name.
        InputError: A revision or quantisation is given twice, or the model has no known GGUF
            repository.
    """
    text = os.fspath(name)
    if _exists(text):
        return ModelName(text, revision, gguf_file)
    place, _, chosen = text.rpartition(":")
    if place and chosen:
        gguf_file = _once(text, "gguf_file", chosen, gguf_file)
        if _exists(place):
            return ModelName(place, revision, gguf_file)
    else:
        place = text
    place, at, behind = place.partition("@")
    known = catalogue().get(place.lower())
    if known is None and not _REPO_ID.fullmatch(place):
        raise _unknown(text, place)
    if at:
        revision = _once(text, "revision", behind, revision)
        if not revision:
            raise InputError(f"{text!r} has no revision behind @; give a branch, tag or commit.")
    if known is None:
        return ModelName(place, revision, gguf_file)
    if gguf_file is None:
        return ModelName(known.repository, revision, None)
    if known.gguf is None:
        raise InputError(
            f"no GGUF repository of {known.title} is known; give one, such as org/name:{gguf_file}."
        )
    return ModelName(known.gguf, revision, gguf_file)


def _exists(place: str) -> bool:
    return os.path.exists(os.path.expanduser(place))


def _once(name: str, option: str, behind: str, given: str | None) -> str:
    """Return what a name says behind a mark, which the `option` may not say too."""
    if given is not None:
        raise InputError(f"{name} chooses {behind!r} already; leave out {option}.")
    return behind


def _unknown(name: str, place: str) -> CheckpointError:
    if match := _ADDRESS.fullmatch(name):
        mend = f"did you mean {match['id']!r}?"
    elif near := difflib.get_close_matches(place.lower()[:80], names := _written(), n=1):
        mend = f"did you mean {names[near[0]]!r}?"
    else:
        mend = "check the path, or see 'mlx_moeflux models'."
    return CheckpointError(
        f"{name!r} is neither a directory nor a hub id of the form org/name, nor a short name; "
        f"{mend}"
    )


def _written() -> dict[str, str]:
    """Return a map from repositories and short names, in lower case, to short names."""
    names: dict[str, str] = {}
    for known in catalogue().values():
        for repository in filter(None, (known.original, known.mlx, known.gguf)):
            names.setdefault(repository.rpartition("/")[2].lower(), known.name)
    return names | {name: name for name in catalogue()}
