"""From what the user typed to a directory: a path, or a download from the Hugging Face Hub.

Only what a model is made of is downloaded: weights in safetensors or of one GGUF model, JSON,
tokenizer and chat template. No code, no pickles. Downloads go to the library's cache and resume by
themselves.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

from tqdm import tqdm

from mlx_moeflux.checkpoint.files import (
    format_size,
    nearest_existing,
    read_json_object,
    unreadable,
)
from mlx_moeflux.checkpoint.formats.foreign import refuse_adapter
from mlx_moeflux.checkpoint.formats.gguf_architectures import architecture_of
from mlx_moeflux.checkpoint.formats.gguf_container import MAGIC, read_container
from mlx_moeflux.checkpoint.formats.gguf_files import (
    SUFFIX,
    GgufEntry,
    check_head,
    choose,
    entries_in,
    entries_of,
    find_gguf,
    refuse_other_files,
)
from mlx_moeflux.checkpoint.model_name import parse_model_name
from mlx_moeflux.errors import (
    CheckpointError,
    ConfigError,
    MemoryBudgetError,
    MoefluxError,
    UnsupportedError,
    whole_words,
)

# Matched against names without a folder: what lies in folders is for other programs, but for a head
# of multi-token prediction.
_WANTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
# The same weights once more, in the form that Mistral's own programs read.
_UNWANTED = ("consolidated*.safetensors",)
_WEIGHTS = (".safetensors", ".bin")
# Expert blobs, of this package and of moeflux; no other .bin is one.
_BLOBS = re.compile(
    r"experts/(layer_\d{2,}\.bin|index\.json)"
    r"|packed_experts(_2bit)?/layer_\d{2,}\.bin|model_weights\.bin"
)
_HEAD = re.compile(r"(mtp/|mtp|model-mtp)[^/]*\.safetensors")
# A model's folder in the library's cache is this and the id, with "--" for "/".
_CACHED_MODEL = "models--"
_DOWNLOADS = 8
_MAX_REASON = 200
# Bytes of a GGUF file that are read to see of which architecture it is; writers put that first.
_START_BYTES = 1 << 16
# Bytes of a GGUF file that are read until its header is whole: that of a shard has some kB, that of
# a first one with 200,000 tokens 10 MB.
_HEADER_STEPS = (1 << 20, 1 << 24, 1 << 26, 1 << 28)


class RemoteHeaders(NamedTuple):
    """The headers of a repository that is not on this machine: config.json, and dtype and shape of
    each tensor by name."""

    config: dict[str, Any]
    tensors: dict[str, tuple[str, tuple[int, ...]]]


def resolve(
    path_or_repo_id: str | os.PathLike[str],
    *,
    revision: str | None = None,
    gguf_file: str | None = None,
) -> Path:
    """Return the directory of a checkpoint, or a GGUF file: an existing one, or a download of a hub
    repository, which :func:`~mlx_moeflux.checkpoint.model_name.parse_model_name` finds by its id or
    short name.

    ``gguf_file``, or the text behind a colon as in ``org/name:Q4_K_M``, chooses one of several GGUF
    models, see :func:`~mlx_moeflux.checkpoint.formats.gguf_files.choose`; of a repository only its
    files are downloaded. ``revision``, or the text behind an @ as in ``org/name@v2``, is a branch,
    tag or commit of the repository. Without a connection the copy in the cache is used. A
    repository's folder in the cache, ``models--org--name``, means the snapshot of that revision.

    Raises:
        CheckpointError: There is no such directory or repository, the directory holds no model, or
            the repository is gated.
        ChoiceError: There are several GGUF models, or none that fits ``gguf_file``.
        UnsupportedError: The hub cannot be reached, the repository holds no weights, or the
            beginning of the GGUF file names an architecture that is not read here.
        MemoryBudgetError: The disk is too small.
    """
    found = _found(path_or_repo_id, revision, gguf_file)
    return found if isinstance(found, Path) else _download(found)


@contextmanager
def resolve_headers(
    path_or_repo_id: str | os.PathLike[str],
    *,
    revision: str | None = None,
    gguf_file: str | None = None,
) -> Iterator[Path | RemoteHeaders]:
    """Yield what :func:`resolve` returns if it needs no download, else the headers on the hub, with
    a few ranged reads. Those of a GGUF model are files without tensors, as long as the whole ones,
    which go when the block ends.

    Raises:
        CheckpointError, UnsupportedError: As :func:`resolve`.
    """
    found = _found(path_or_repo_id, revision, gguf_file)
    if isinstance(found, Path):
        yield found
    elif found.gguf is None:
        yield _remote_headers(found)
    else:
        with tempfile.TemporaryDirectory(prefix="mlx_moeflux-") as folder:
            yield _remote_gguf(found, found.gguf, Path(folder))


class _Remote(NamedTuple):
    """A repository on the hub at a commit, of which files are `missing` in the cache.

    sizes: Bytes of each file that a model is made of. revision: As the user gave it. gguf: The
    first file of a GGUF model.
    """

    repo_id: str
    revision: str | None
    commit: str
    sizes: dict[str, int]
    missing: list[str]
    gguf: str | None


def _found(
    name: str | os.PathLike[str], revision: str | None, gguf_file: str | None
) -> Path | _Remote:
    """Return the directory or GGUF file on this machine, or what has to come from the hub."""
    place, revision, chosen = parse_model_name(name, revision=revision, gguf_file=gguf_file)
    expanded = os.path.expanduser(place)
    path = Path(expanded)
    if os.path.isdir(expanded):
        if path.name.startswith(_CACHED_MODEL) and (path / "snapshots").is_dir():
            path = _cached_folder(path, revision)
        try:
            names = os.listdir(path)
        except OSError as cause:
            raise unreadable(path, cause) from cause
        gguf = find_gguf(path, chosen)
        if gguf is None:
            _refuse_what_is_no_model(path, names, entries_in(path))
        return gguf or path
    if os.path.isfile(expanded) and (gguf := find_gguf(path, chosen)):
        return gguf
    if os.path.exists(expanded):
        raise CheckpointError(f"{place} is a file; pass the directory that holds the checkpoint.")
    return _ask(place, revision, chosen)


def _refuse_what_is_no_model(
    place: Path | str, names: Collection[str], ggufs: Sequence[GgufEntry]
) -> None:
    """Look at the files of a directory or a repository, in which there is no GGUF model.

    Raises:
        CheckpointError: There are none, or they are no model's: an adapter, the projector of one.
    """
    if not names:
        raise CheckpointError(f"{place} is empty; pass the directory that holds the checkpoint.")
    if "config.json" in names:
        return
    refuse_other_files(place, ggufs)
    refuse_adapter(place, names)
    raise CheckpointError(
        f"{place} has no config.json and no .gguf file; pass a model's directory or hub id."
    )


def _cached_folder(folder: Path, revision: str | None) -> Path:
    """Return the snapshot in a repository's folder of a cache."""
    repo_id = folder.name.removeprefix(_CACHED_MODEL).replace("--", "/")
    found = _snapshot(repo_id, revision, cache=folder.parent)
    if found is None:
        known = sorted(path.name for path in (folder / "snapshots").iterdir())
        has = f"it has {', '.join(known)}" if known else "it has none"
        raise CheckpointError(
            f"{folder} is a folder of the Hugging Face cache without a snapshot of revision"
            f" {revision or 'main'!r}; {has}: pass one of them, or download the model again."
        )
    return found


def _snapshot(repo_id: str, revision: str | None, *, cache: Path) -> Path | None:
    """Return the folder of a revision in a cache, or None. One snapshot alone needs no revision."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        # No pattern: the library would miss the files that were left out on purpose.
        return Path(
            huggingface_hub.snapshot_download(
                repo_id,
                revision=revision,
                cache_dir=cache,
                local_files_only=True,
                allow_patterns=[],
            )
        )
    except (OSError, errors.HFValidationError):
        folder = cache / (_CACHED_MODEL + repo_id.replace("/", "--")) / "snapshots"
        found = list(folder.glob("*")) if revision is None else []
        return found[0] if len(found) == 1 else None


def needed_files(names: Iterable[str]) -> list[str]:
    """Which files of a repository a model is made of, in the order given."""
    return [
        name
        for name in names
        if _BLOBS.fullmatch(name)
        or _HEAD.fullmatch(name)
        or (
            "/" not in name
            and not name.startswith(".")
            and any(fnmatchcase(name, pattern) for pattern in _WANTED)
            and not any(fnmatchcase(name, pattern) for pattern in _UNWANTED)
        )
    ]


def _ask(repo_id: str, revision: str | None, chosen: str | None) -> Path | _Remote:
    """Return a repository's complete copy in the cache, or what has to come from the hub."""
    import huggingface_hub
    from huggingface_hub import constants

    try:
        info = huggingface_hub.HfApi().model_info(
            repo_id,
            revision=revision,
            files_metadata=True,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
    except _failures() as cause:
        if not _is_offline(cause):
            raise _translated(cause, repo_id, revision) from cause
        return _cached(repo_id, revision, chosen, cause)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    files, ggufs, gguf = needed_files(sizes), entries_of(sizes), None
    others = [name for name in files if not name.endswith((*_WEIGHTS, ".index.json"))]
    has_weights = any(name.endswith(_WEIGHTS) and not _HEAD.fullmatch(name) for name in files)
    if chosen is not None or not has_weights:
        gguf = choose(repo_id, ggufs, chosen)
    if gguf is not None:
        files = [*others, *gguf.files]
    else:
        _refuse_what_is_no_model(repo_id, sizes, ggufs)
        if not has_weights:
            raise _no_weights(repo_id)
    assert info.sha is not None, "the hub names the commit"
    cached = {name: _in_cache(repo_id, name, info.sha) for name in files}
    missing = [name for name, path in cached.items() if path is None]
    first = None if gguf is None else gguf.files[0]
    found = _Remote(repo_id, revision, info.sha, {n: sizes[n] for n in files}, missing, first)
    if not missing:
        return _complete(found)
    if first is not None:
        _check_start(found, first)
    return found


def _check_start(remote: _Remote, name: str) -> None:
    """Look at the beginning of a GGUF model on the hub. If that does not come or does not say what
    the file is, opening the file will.

    Raises:
        UnsupportedError: It is no model, or of an architecture that is not read here.
    """
    try:
        start = _read_part(remote, name, 0, _START_BYTES)
    except _failures():
        return
    place = f"{remote.repo_id}/{name}"
    if start.startswith(MAGIC) and (found := check_head(place, start)) is not None:
        architecture_of(place, found)


def _in_cache(repo_id: str, name: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(repo_id, name, revision=revision)
    return Path(path) if isinstance(path, str) else None


def _download(remote: _Remote) -> Path:
    """Download what is missing.

    File by file: of a whole snapshot the library remembers the list of the repository's files, and
    finds it incomplete without a connection because of those that were left out on purpose.
    """
    import huggingface_hub
    from huggingface_hub.utils import are_progress_bars_disabled

    _check_disk(remote)
    bar = tqdm(
        total=sum(remote.sizes[name] for name in remote.missing),
        desc="download",
        unit="B",
        unit_scale=True,
        leave=False,
        file=sys.stderr,
        disable=are_progress_bars_disabled() or not sys.stderr.isatty(),
    )
    fetch = partial(
        huggingface_hub.hf_hub_download,
        remote.repo_id,
        revision=remote.commit,
        tqdm_class=_share_of(bar, stopped := Event()),
    )
    with bar, ThreadPoolExecutor(_DOWNLOADS) as threads:
        jobs = [threads.submit(fetch, name) for name in remote.missing]
        try:
            for job in as_completed(jobs):
                job.result()
        except _failures() as cause:
            raise _translated(cause, remote.repo_id, remote.revision) from cause
        except BaseException:
            # Ctrl-C does not wait for files of gigabytes; after a file that fails the others end.
            stopped.set()
            raise
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
    return _complete(remote)


def _share_of(bar: tqdm, stopped: Event) -> type[tqdm]:
    """Return a class of bars, as the library makes one for each file, that move `bar` instead.

    The library calls them after each part of a file, in the thread that reads it. Once `stopped` is
    set they end that thread; a later download keeps whole files and begins this one again.
    """

    class Share(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(*args, **{**options, "disable": True})
            bar.update(self.n)

        def update(self, n: float | None = 1) -> None:
            bar.update(n)
            if stopped.is_set():
                raise OSError("the download was stopped")

        # Bytes that a compressed transfer took, for a second bar.
        def update_transfer(self, n: float | None = 1) -> None: ...
        def set_transfer_postfix_str(self, *_: Any, **__: Any) -> None: ...

    return Share


def _complete(remote: _Remote) -> Path:
    """Return the folder or the GGUF file of a copy that is complete, which the cache then knows by
    its revision: so every program finds it without a connection."""
    import huggingface_hub

    name = min(remote.sizes, key=lambda name: remote.sizes[name])
    path = _in_cache(remote.repo_id, name, remote.commit)
    assert path is not None, "all files are there"
    if _in_cache(remote.repo_id, name, remote.revision) != path:
        with suppress(*_failures()):
            huggingface_hub.hf_hub_download(remote.repo_id, name, revision=remote.revision)
    folder = path.parents[name.count("/")]
    return folder if remote.gguf is None else folder / remote.gguf


def _remote_headers(remote: _Remote) -> RemoteHeaders:
    import huggingface_hub
    from huggingface_hub import errors

    repo_id, commit = remote.repo_id, remote.commit
    try:
        # By its commit: a branch would point to a copy without weights afterwards.
        silent = _share_of(tqdm(disable=True), Event())
        file = huggingface_hub.hf_hub_download(
            repo_id, "config.json", revision=commit, tqdm_class=silent
        )
        found = huggingface_hub.HfApi().get_safetensors_metadata(repo_id, revision=commit)
    except errors.NotASafetensorsRepoError as cause:
        raise _no_weights(repo_id) from cause
    except _failures() as cause:
        raise _translated(cause, repo_id, remote.revision) from cause
    tensors = {
        name: (info.dtype, tuple(info.shape))
        for part in found.files_metadata.values()
        for name, info in part.tensors.items()
    }
    return RemoteHeaders(read_json_object(Path(file), error=ConfigError), tensors)


def _remote_gguf(remote: _Remote, first: str, folder: Path) -> Path:
    """Write the headers of a GGUF model into `folder`; return the first file."""
    names = [name for name in remote.sizes if name.endswith(SUFFIX)]
    try:
        for name in names:
            # A name of the hub may have ".." in it; shards lie in one folder.
            size, start, path = remote.sizes[name], b"", folder / Path(name).name
            for stop in (min(size, most) for most in _HEADER_STEPS):
                start += _read_part(remote, name, len(start), stop)
                path.write_bytes(start)
                if stop == size or _has_header(path):
                    break
            os.truncate(path, size)  # the rest takes no disk
    except _failures() as cause:
        raise _translated(cause, remote.repo_id, remote.revision) from cause
    return folder / Path(first).name


def _has_header(path: Path) -> bool:
    try:
        read_container(path)
    except CheckpointError:
        return False
    return True


def _read_part(remote: _Remote, name: str, start: int, stop: int) -> bytes:
    """Read the bytes from `start` to `stop` of a file on the hub; raises OSError or the library's
    errors."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    url = hf_hub_url(remote.repo_id, name, revision=remote.commit)
    headers = build_hf_headers() | {"Range": f"bytes={start}-{stop - 1}"}
    headers["Accept-Encoding"] = "identity"
    wait = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", url, headers=headers, timeout=wait) as response:
        if response.is_error:
            response.read()
        hf_raise_for_status(response)
        if response.status_code != 206 and (start, stop) != (0, remote.sizes[name]):
            raise OSError(f"the hub sent the whole of {name} instead of a part")
        return response.read()


def _no_weights(repo_id: str) -> UnsupportedError:
    return UnsupportedError(
        f"{repo_id} holds no weights in safetensors or GGUF; choose a repository that does."
    )


def _failures() -> tuple[type[Exception], ...]:
    """The library's network errors are OSErrors or, by version, those of its HTTP client."""
    from huggingface_hub import errors

    client: type[Exception] = errors.HTTPError  # pyright: ignore[reportPrivateImportUsage]
    return OSError, client, errors.HFValidationError


def _check_disk(remote: _Remote) -> None:
    """Say on stderr what has to come, and check that the disk holds it."""
    needed = sum(remote.sizes[name] for name in remote.missing)
    cache = download_folder()
    free = shutil.disk_usage(nearest_existing(cache)).free
    sys.stderr.write(
        f"{remote.repo_id}: {len(remote.missing)} of {len(remote.sizes)} files to download,"
        f" {format_size(needed)}, to {cache} ({format_size(free)} free)\n"
    )
    if needed > free:
        raise MemoryBudgetError(
            f"Downloading {remote.repo_id} needs {format_size(needed)}, but {cache} has"
            f" {format_size(free)} free; 'hf cache ls' lists models, 'hf cache rm model/ORG/NAME'"
            " removes one, and HF_HUB_CACHE may be on another disk."
        )


def _cached(repo_id: str, revision: str | None, chosen: str | None, offline: Exception) -> Path:
    """Return the copy in the cache, or its GGUF file; opening it says if files are missing."""
    found = _snapshot(repo_id, revision, cache=download_folder())
    if found is not None:
        place = f"{repo_id} in the cache (the hub cannot be reached)"
        gguf = find_gguf(found, chosen, place=place)
        if gguf is not None:
            return gguf
        if any(next(found.glob(pattern), None) for pattern in ("*.safetensors", "*.bin")):
            return found
    state = "is not" if found is None else "has no weights"
    raise UnsupportedError(
        f"{repo_id} {state} in the cache and the Hugging Face Hub cannot be reached"
        f" ({_reason(offline)}); connect, unset HF_HUB_OFFLINE, or pass a local directory."
    ) from offline


def _is_offline(cause: Exception) -> bool:
    """Return True if no answer came, as opposed to a refusal."""
    from huggingface_hub import errors

    refused = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError)
    if isinstance(cause, (*refused, errors.HFValidationError)):
        return False
    response = getattr(cause, "response", None)
    return response is None or response.status_code >= 500


def _translated(cause: Exception, repo_id: str, revision: str | None) -> MoefluxError:
    """One sentence for what the hub answered; the order matters, gated is a kind of not found."""
    from huggingface_hub import errors

    if isinstance(cause, errors.GatedRepoError):
        return CheckpointError(
            f"{repo_id} is gated; accept its terms at https://huggingface.co/{repo_id} and log in"
            " with `hf auth login`."
        )
    if isinstance(cause, errors.RepositoryNotFoundError):
        return CheckpointError(
            f"{repo_id} is neither a local directory nor a repository on the Hugging Face Hub that"
            " you may read; check the name, or log in with `hf auth login` if it is private."
        )
    if isinstance(cause, errors.RevisionNotFoundError):
        return CheckpointError(
            f"{repo_id} has no revision {revision!r}; pass one of its branches, tags or commits."
        )
    if isinstance(cause, errors.HFValidationError):
        return CheckpointError(f"{repo_id!r} is not a hub id ({_reason(cause)}); check the name.")
    return UnsupportedError(
        f"Downloading {repo_id} failed ({_reason(cause)}); run the same command again, which goes"
        " on where it stopped."
    )


def _reason(cause: Exception) -> str:
    """The library's message in one line of bounded length, without its closing stop."""
    text = " ".join(str(cause).split()) or type(cause).__name__
    if len(text) <= _MAX_REASON:
        return text.rstrip(".")
    return f"{whole_words(text[:_MAX_REASON])}..."


def download_folder() -> Path:
    """Return the folder that downloads go to; it may not exist."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)
