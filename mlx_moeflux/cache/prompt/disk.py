"""The nodes of a prompt cache as files: ``<directory>/<model identity>/<node key>.safetensors``.

A name is a hash of the model and of all tokens up to the node's end, so what is there need never
be written again, several processes may share a directory, and no model finds another's. A file
is written under another name and renamed, in a thread of its own; the least recently used go when
there is no room.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_moeflux.cache.prompt.tree import KEY_BYTES, Node, child_key
from mlx_moeflux.cache.state.files import Format, StateFile, open_file, to_host, write_file
from mlx_moeflux.cache.state.spec import ArraySpec, StateSpec, check_arrays
from mlx_moeflux.checkpoint.files import TEMPORARY_SUFFIX
from mlx_moeflux.errors import CacheError

PROMPT_FORMAT = Format("mlx_moeflux.prompt", 1)
SUFFIX = ".safetensors"
_NAME = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}{re.escape(SUFFIX)}")

# A temporary file of this age belongs to nobody who is still writing.
STALE_SECONDS = 3600


class PromptDirectory:
    """One directory of nodes; limit: Bytes of all files, over all models.

    Raises:
        CacheError: The directory cannot be made.
    """

    def __init__(self, directory: str | os.PathLike[str], limit: int):
        self.directory, self.limit = Path(directory), limit
        self.written = 0
        self._writer = ThreadPoolExecutor(1, "prompt-cache")
        self._pending: set[Future] = set()
        self._known: dict[str, set[str]] = {}
        self._bad: set[Path] = set()
        self._complaints: list[str] = []
        self._lock = threading.Lock()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CacheError(
                f"The prompt cache {self.directory} cannot be made: {error.strerror or error}."
            ) from error

    def update(self, root: Node) -> None:
        """Give the tree what other processes added since, and take what they removed.

        Warns once of each file that cannot be believed.
        """
        self._complain()
        folder = self.directory / root.key
        try:
            names = {entry.name for entry in os.scandir(folder) if _NAME.fullmatch(entry.name)}
        except OSError:
            names = set()
        known = self._known.setdefault(root.key, set())
        for node in list(root.family()):
            if node.disk == "stored" and node.key + SUFFIX not in names:
                node.disk = ""
                if node.arrays is None:
                    node.remove()
        fresh = [f for name in sorted(names - known) if (f := self._open(folder / name, root.key))]
        known &= names
        known |= names
        self._link(root, fresh)

    def read(self, node: Node, root: Node, spec: StateSpec) -> dict[str, mx.array]:
        """The arrays of a stored node.

        Raises:
            CacheError: The file is gone, or damaged, of which this warns; it is not opened again.
        """
        path, known = self._path(root, node), self._known[root.key]
        try:
            file = open_file(path, PROMPT_FORMAT)
            expected = spec.expected(len(node.tokens))
            expected["tokens"] = ArraySpec("I32", (len(node.tokens),))
            if "logits" in file.specs:
                expected["logits"] = ArraySpec(file.specs["logits"].dtype, (spec.vocabulary,))
            check_arrays(path, file.specs, expected)
            arrays = file.read()
        except CacheError as error:
            # What stands on this node may find its place again when the node is written anew.
            known -= {below.key + SUFFIX for below in node.family()}
            if path.exists():
                self._distrust(path, error)
            raise
        del arrays["tokens"]
        return arrays

    def write_later(self, node: Node, root: Node) -> None:
        """Store a node that has arrays, in the background. A failure is warned of at the next
        :meth:`update`. Evaluates: the arrays."""
        path, line = self._path(root, node), node.path()
        self._bad.discard(path)
        self._known.setdefault(root.key, set()).add(path.name)
        tokens = mx.array(node.tokens)
        host = to_host({**node.arrays, "tokens": tokens})
        facts = {
            "identity": root.key,
            "parent": node.parent.key,
            "end": str(node.end),
            "experts": json.dumps({str(layer): ids for layer, ids in node.experts.items()}),
        }
        node.disk = "pending"

        def work() -> None:
            try:
                path.parent.mkdir(exist_ok=True)
                self.written += write_file(path, PROMPT_FORMAT, facts=facts, arrays=host)
                node.disk = "stored"
                self.touch(line, root)
                self._prune()
            except (CacheError, OSError) as error:
                if node.disk == "pending":
                    node.disk = ""
                with self._lock:
                    self._complaints.append(str(error))

        future = self._writer.submit(work)
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)

    def touch(self, path: Sequence[Node], root: Node) -> None:
        """These nodes, root first, were used now; a parent counts as used after its children."""
        now = time.time_ns()
        for depth, node in enumerate(path):
            with contextlib.suppress(OSError):
                at = now + len(path) - depth
                os.utime(self._path(root, node), ns=(at, at))

    def flush(self) -> None:
        """Wait until everything is written; warns of what could not be."""
        for future in list(self._pending):
            future.result()
        self._complain()

    def close(self) -> None:
        """:meth:`flush`, and no more after that."""
        self._writer.shutdown(wait=True)
        self._complain()

    def _path(self, root: Node, node: Node) -> Path:
        return self.directory / root.key / (node.key + SUFFIX)

    def _complain(self) -> None:
        with self._lock:
            complaints, self._complaints = self._complaints, []
        if complaints:
            warnings.warn(f"A prompt was not stored: {complaints[0]}", stacklevel=4)

    def _distrust(self, path: Path, error: CacheError) -> None:
        self._bad.add(path)
        warnings.warn(f"A stored prompt is ignored: {error}", stacklevel=5)

    def _open(self, path: Path, identity: str) -> StateFile | None:
        if path in self._bad:
            return None
        try:
            file = open_file(path, PROMPT_FORMAT)
            tokens = np.asarray(file.array("tokens"))
            right = (
                file.facts.get("identity") == identity
                and tokens.dtype == np.int32
                and tokens.ndim == 1
                and 0 < len(tokens) <= file.number("end")
                and child_key(file.facts.get("parent", ""), tokens) + SUFFIX == path.name
            )
            if not right:
                raise CacheError(f"{path} is not what its name says; remove it.")
        except CacheError as error:
            if path.exists():
                self._distrust(path, error)
            return None
        return file

    def _link(self, root: Node, fresh: list[StateFile]) -> None:
        """Enter files whose parents are in the tree; the others' were removed or are bad."""
        nodes = {node.key: node for node in root.family()}
        waiting = sorted(fresh, key=lambda file: file.number("end"))
        for file in waiting:
            parent = nodes.get(file.facts["parent"])
            if parent is None:
                self._known[root.key].discard(file.path.name)
                continue
            tokens = np.array(file.array("tokens"))
            node = parent.add(tokens)
            nodes[node.key] = node
            node.disk = node.disk or "stored"
            node.has_logits |= "logits" in file.specs
            with contextlib.suppress(CacheError, ValueError, AttributeError, TypeError):
                found = file.json("experts").items()
                node.experts = {int(layer): [int(i) for i in ids] for layer, ids in found}

    def _prune(self) -> None:
        """Remove the least recently used files above the limit, and what a killed process left."""
        files, total, now = [], 0, time.time()
        for entry in self.directory.glob("*/*"):
            with contextlib.suppress(OSError):
                stat = entry.stat()
                if entry.name.endswith(TEMPORARY_SUFFIX) and now - stat.st_mtime > STALE_SECONDS:
                    entry.unlink()
                elif _NAME.fullmatch(entry.name):
                    files.append((stat.st_mtime_ns, stat.st_size, entry))
                    total += stat.st_size
        for _, size, path in sorted(files):
            if total <= self.limit:
                break
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size
