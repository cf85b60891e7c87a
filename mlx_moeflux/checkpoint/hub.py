"""From what the user typed to a directory: a path, or a download from the Hugging Face Hub.

Only what a model is made of is downloaded: weights in safetensors, JSON, tokenizer and chat
template. No code, no pickles. Downloads go to the library's cache and resume by themselves.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import sys
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_moeflux.checkpoint.files import read_json_object
from mlx_moeflux.errors import (
    CheckpointError,
    ConfigError,
    MemoryBudgetError,
    MoefluxError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

# Matched against names without a folder: what lies in folders is for other programs.
_WANTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
# The same weights once more, in the form that Mistral's own programs read.
_UNWANTED = ("consolidated*.safetensors",)
# Expert blobs, of this package and of moeflux; no other .bin is one.
_BLOBS = re.compile(
    r"experts/(layer_\d{2,}\.bin|index\.json)"
    r"|packed_experts(_2bit)?/layer_\d{2,}\.bin|model_weights\.bin"
)
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_MAX_REASON = 200


def resolve(path_or_repo_id: str | os.PathLike[str], *, revision: str | None = None) -> Path:
    """Return the directory of a checkpoint, or a GGUF file: an existing one, or a download of a hub
    repository.

    ``revision`` is a branch, tag or commit of the repository. Without a connection the copy in
    the cache is used.

    Raises:
        CheckpointError: There is no such directory or repository, or the repository is gated.
        UnsupportedError: The hub cannot be reached, or the repository holds no safetensors.
        MemoryBudgetError: The disk is too small.
    """
    name = os.fspath(path_or_repo_id)
    path = os.path.expanduser(name)
    if os.path.isdir(path) or (os.path.isfile(path) and path.endswith(".gguf")):
        return Path(path)
    if os.path.exists(path):
        raise CheckpointError(f"{name} is a file; pass the directory that holds the checkpoint.")
    return _download(name, revision)


def remote_headers(
    repo_id: str, *, revision: str | None = None
) -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...]]]]:
    """config.json and, by name, dtype and shape of every tensor of a repository on the hub, with a
    few ranged reads: no weight is downloaded.

    Raises:
        CheckpointError, UnsupportedError: As :func:`resolve`; the second also without safetensors.
    """
    import huggingface_hub
    from huggingface_hub import errors

    _check_id(repo_id)
    try:
        file = huggingface_hub.hf_hub_download(repo_id, "config.json", revision=revision)
        found = huggingface_hub.HfApi().get_safetensors_metadata(repo_id, revision=revision)
    except errors.NotASafetensorsRepoError as cause:
        raise _no_weights(repo_id) from cause
    except _failures() as cause:
        raise _translated(cause, repo_id, revision) from cause
    tensors = {
        name: (info.dtype, tuple(info.shape))
        for part in found.files_metadata.values()
        for name, info in part.tensors.items()
    }
    return read_json_object(Path(file), error=ConfigError), tensors


def needed_files(names: Iterable[str]) -> list[str]:
    """Which files of a repository a model is made of, in the order given."""
    return [
        name
        for name in names
        if _BLOBS.fullmatch(name)
        or (
            "/" not in name
            and not name.startswith(".")
            and any(fnmatchcase(name, pattern) for pattern in _WANTED)
            and not any(fnmatchcase(name, pattern) for pattern in _UNWANTED)
        )
    ]


def _download(repo_id: str, revision: str | None) -> Path:
    import huggingface_hub

    _check_id(repo_id)
    try:
        info = huggingface_hub.HfApi().model_info(repo_id, revision=revision, files_metadata=True)
    except _failures() as cause:
        if not _is_offline(cause):
            raise _translated(cause, repo_id, revision) from cause
        return _cached(repo_id, revision, cause)
    files = _plan(repo_id, info)
    patterns = [glob.escape(name) for name in files]
    try:
        return Path(
            huggingface_hub.snapshot_download(repo_id, revision=info.sha, allow_patterns=patterns)
        )
    except _failures() as cause:
        raise _translated(cause, repo_id, revision) from cause


def _check_id(name: str) -> None:
    if not _REPO_ID.fullmatch(name):
        raise CheckpointError(
            f"{name!r} is neither a directory nor a hub id of the form org/name; check the path."
        )


def _no_weights(repo_id: str) -> UnsupportedError:
    return UnsupportedError(
        f"{repo_id} holds no .safetensors weights; choose a repository that does."
    )


def _failures() -> tuple[type[Exception], ...]:
    """The library's network errors are OSErrors or, by version, those of its HTTP client."""
    from huggingface_hub import errors

    client: type[Exception] = errors.HTTPError  # pyright: ignore[reportPrivateImportUsage]
    return OSError, client, errors.HFValidationError


def _plan(repo_id: str, info: ModelInfo) -> list[str]:
    """The files to have; says on stderr what has to come, and checks that the disk holds it."""
    from huggingface_hub import constants, try_to_load_from_cache

    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    files = needed_files(sizes)
    if not any(name.endswith((".safetensors", ".bin")) for name in files):
        raise _no_weights(repo_id)
    missing = [
        name
        for name in files
        if not isinstance(try_to_load_from_cache(repo_id, name, revision=info.sha), str)
    ]
    if not missing:
        return files
    needed = sum(sizes[name] for name in missing)
    cache = Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(_existing(cache)).free
    sys.stderr.write(
        f"{repo_id}: {len(missing)} of {len(files)} files to download, {_gb(needed)}, to {cache}"
        f" ({_gb(free)} free)\n"
    )
    if needed > free:
        raise MemoryBudgetError(
            f"Downloading {repo_id} needs {_gb(needed)}, but {cache} has {_gb(free)} free; make"
            " room or set HF_HUB_CACHE to another disk."
        )
    return files


def _cached(repo_id: str, revision: str | None, offline: Exception) -> Path:
    """The copy in the cache; opening it says if files are missing from it."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        # No pattern: the library would miss the files that were left out on purpose.
        return Path(
            huggingface_hub.snapshot_download(
                repo_id, revision=revision, local_files_only=True, allow_patterns=[]
            )
        )
    except (OSError, errors.HFValidationError):
        raise UnsupportedError(
            f"{repo_id} is not in the cache and the Hugging Face Hub cannot be reached"
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
    return text.rstrip(".") if len(text) <= _MAX_REASON else text[:_MAX_REASON] + "..."


def _existing(path: Path) -> Path:
    path = path.absolute()
    return next(p for p in (path, *path.parents) if p.exists())


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
