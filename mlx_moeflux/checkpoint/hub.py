"""From what a user names to a local directory: a path, or a hub id through huggingface_hub."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from mlx_moeflux.errors import CheckpointError, MemoryBudgetError, UnsupportedError

# What a checkpoint needs: weights, JSON, tokenizer and template. No code, no other formats.
NEEDED = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "merges.txt")
# Above this the free disk is checked first.
LARGE_BYTES = 10_000_000_000
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def needed_files(names: Iterable[str]) -> list[str]:
    """The files of a repository that a model needs; nothing in hidden or other folders."""
    return [
        name
        for name in names
        if "/" not in name and any(fnmatch.fnmatchcase(name, pattern) for pattern in NEEDED)
    ]


def resolve(path_or_repo_id: str | os.PathLike[str], *, revision: str | None = None) -> Path:
    """A local directory: the given one, or the downloaded snapshot of ``org/name``.

    A download resumes where it stopped. Prints what will be fetched, one line on stderr.

    Raises:
        CheckpointError: There is neither such a directory nor such a repository.
        MemoryBudgetError: The disk has no room for it.
        UnsupportedError: The hub cannot be reached.
    """
    path = Path(path_or_repo_id).expanduser()
    if path.is_dir():
        return path
    name = str(path_or_repo_id)
    if not _REPO_ID.fullmatch(name):
        raise CheckpointError(
            f"{name} is neither a directory nor a Hugging Face id of the form org/name."
        )
    return _download(name, revision)


def _download(repo_id: str, revision: str | None) -> Path:
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        if constants.HF_HUB_OFFLINE:
            return _cached(huggingface_hub, repo_id, revision)
        info = huggingface_hub.HfApi().model_info(repo_id, revision=revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings}
        wanted = needed_files(sizes)
        total = sum(sizes[name] for name in wanted)
        print(  # noqa: T201
            f"fetching {repo_id}: {len(wanted)} files, {total / 1e9:.2f} GB in all "
            "(what is there already is kept)",
            file=sys.stderr,
        )
        _check_disk(repo_id, total, Path(constants.HF_HUB_CACHE))
        return Path(
            huggingface_hub.snapshot_download(
                repo_id, revision=info.sha or revision, allow_patterns=wanted
            )
        )
    except GatedRepoError:
        raise CheckpointError(
            f"{repo_id} is gated: accept its terms on the hub and log in with 'hf auth login'."
        ) from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"the hub has no model {repo_id} that this account may see; check the name."
        ) from None
    except RevisionNotFoundError:
        raise CheckpointError(f"{repo_id} has no revision '{revision}'.") from None
    except LocalEntryNotFoundError:
        raise UnsupportedError(
            f"{repo_id} is not complete in the local cache and the hub cannot be reached; go "
            "online once or pass a directory."
        ) from None
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnsupportedError(
            f"{repo_id} cannot be fetched ({first}); go online or pass a directory."
        ) from error


def _cached(huggingface_hub, repo_id: str, revision: str | None) -> Path:
    return Path(
        huggingface_hub.snapshot_download(repo_id, revision=revision, local_files_only=True)
    )


def _check_disk(repo_id: str, total: int, cache: Path) -> None:
    if total <= LARGE_BYTES:
        return
    existing = next(p for p in (cache, *cache.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if total > free:
        raise MemoryBudgetError(
            f"{repo_id} needs {total / 1e9:.1f} GB and {existing} has {free / 1e9:.1f} GB free; "
            "make room or set HF_HOME to a larger disk."
        )
