"""Files of prompt cache nodes: ``<directory>/<model identity>/<node key>.safetensors``.

A key hashes the model and all tokens up to the node's end. A file is therefore never rewritten,
processes can share a directory, and models do not find each other's files. A background thread
writes a file under a temporary name and renames it. The least recently used files are removed at
the limit.
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

from mlx_moeflux.backend import is_lost
from mlx_moeflux.cache.prompt.tree import KEY_BYTES, Node, child_key
from mlx_moeflux.cache.state.files import Format, StateFile, open_file, to_host, write_file
from mlx_moeflux.cache.state.spec import StateSpec, check_arrays
from mlx_moeflux.checkpoint.files import TEMPORARY_SUFFIX
from mlx_moeflux.errors import CacheError
from mlx_moeflux.state_arrays import ArraySpec

PROMPT_FORMAT = Format("mlx_moeflux.prompt", 1)
SUFFIX = ".safetensors"
_NAME = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}{re.escape(SUFFIX)}")

# The writer of a temporary file of this age has died.
STALE_SECONDS = 3600
# The directory is looked through after this part of its limit was written, not after every file.
PART = 64


class PromptDirectory:
    """A directory of nodes and the thread that writes them; limit: bytes of all models' files.

    The prompt cache calls it under its lock; the writer thread changes ``disk`` of nodes.

    Raises:
        CacheError: The directory cannot be made.
    """

    def __init__(self, directory: str | os.PathLike[str], limit: int):
        self.directory, self.limit = Path(directory), limit
        self.written = 0
        # Bytes of all files when they were last looked through, with those written since.
        self._seen, self._since = limit, 0
        self._writer = ThreadPoolExecutor(1, "prompt-cache")
        self._pending: set[Future] = set()
        self._known: dict[str, set[str]] = {}
        self._nodes: dict[str, dict[str, Node]] = {}
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
        """Add the nodes to the tree that other processes stored and drop those they removed.

        Warn once of each damaged file.
        """
        self._complain()
        folder = self.directory / root.key
        try:
            names = {entry.name for entry in os.scandir(folder) if _NAME.fullmatch(entry.name)}
        except OSError:
            names = set()
        known = self._known.setdefault(root.key, set())
        nodes = self._nodes.setdefault(root.key, {})
        for name in nodes.keys() - names:
            node = nodes[name]
            if node.disk == "stored":
                node.disk = ""
                if node.arrays is None:
                    node.remove()
            if not node.rooted:
                del nodes[name]
        fresh = [f for name in sorted(names - known) if (f := self._open(folder / name, root.key))]
        known &= names
        known |= names
        self._link(root, fresh)

    def read(self, node: Node, root: Node, spec: StateSpec) -> dict[str, mx.array]:
        """Read the arrays of a stored node.

        Raises:
            CacheError: The file is gone or damaged. A damaged one causes a warning and is not
                opened again.
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
            # Descendants can be linked again once this node is rewritten.
            known -= {below.key + SUFFIX for below in node.family()}
            if path.exists():
                self._mark_bad(path, error)
            raise
        del arrays["tokens"]
        return arrays

    def write_later(self, node: Node, root: Node) -> None:
        """Store a node that has arrays, in the background.

        The next :meth:`update` warns of a failure. Evaluates: the arrays.
        """
        assert node.arrays is not None
        assert node.parent is not None
        path, line = self._path(root, node), node.path()
        self._bad.discard(path)
        self._known.setdefault(root.key, set()).add(path.name)
        self._nodes.setdefault(root.key, {})[path.name] = node
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
                size = write_file(path, PROMPT_FORMAT, facts=facts, arrays=host)
                self.written += size
                node.disk = "stored"
                self.touch(line, root)
                self._prune(size)
            except (CacheError, OSError) as error:
                if node.disk == "pending":
                    node.disk = ""
                with self._lock:
                    self._complaints.append(str(error))

        future = self._writer.submit(work)
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)

    def touch(self, path: Sequence[Node], root: Node) -> None:
        """Set the times of use of a path, root first; a parent's is later than its children's."""
        with self._lock:  # the later of two threads sets the later times
            now = time.time_ns()
            for depth, node in enumerate(path):
                with contextlib.suppress(OSError):
                    at = now + len(path) - depth
                    os.utime(self._path(root, node), ns=(at, at))

    def flush(self) -> None:
        """Wait for all writes and warn of those that failed. In a forked process the parent
        writes."""
        if is_lost():
            return
        for future in list(self._pending):
            future.result()
        self._complain()

    def close(self) -> None:
        """Wait for all writes and stop the writer thread; nothing in a forked process."""
        if is_lost():
            return
        self._writer.shutdown(wait=True)
        self._complain()

    def _path(self, root: Node, node: Node) -> Path:
        return self.directory / root.key / (node.key + SUFFIX)

    def _complain(self) -> None:
        with self._lock:
            complaints, self._complaints = self._complaints, []
        if complaints:
            warnings.warn(f"A prompt was not stored: {complaints[0]}", stacklevel=4)

    def _mark_bad(self, path: Path, error: CacheError) -> None:
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
                self._mark_bad(path, error)
            return None
        return file

    def _link(self, root: Node, fresh: list[StateFile]) -> None:
        """Add files whose parents are in the tree; other parents were removed or are damaged."""
        nodes = self._nodes[root.key]
        waiting = sorted(fresh, key=lambda file: file.number("end"))
        for file in waiting:
            named = file.facts["parent"]
            parent = root if named == root.key else nodes.get(named + SUFFIX)
            if parent is None or not parent.rooted:
                self._known[root.key].discard(file.path.name)
                continue
            tokens = np.array(file.array("tokens"))
            node = parent.add(tokens)
            nodes[file.path.name] = node
            node.disk = node.disk or "stored"
            node.has_logits |= "logits" in file.specs
            with contextlib.suppress(CacheError, ValueError, AttributeError, TypeError):
                found = file.json("experts").items()
                node.experts = {int(layer): [int(i) for i in ids] for layer, ids in found}

    def _prune(self, written: int) -> None:
        """Remove stale temporary files, and the least recently used files above the limit; what
        other processes write counts at the next look. written: Bytes since the last call."""
        self._since += written
        if self._seen + self._since <= self.limit and self._since < self.limit // PART:
            return
        files, total, now = [], 0, time.time()
        for entry in self.directory.glob("*/*"):
            with contextlib.suppress(OSError):
                stat = entry.stat()
                if entry.name.endswith(TEMPORARY_SUFFIX) and now - stat.st_mtime > STALE_SECONDS:
                    entry.unlink()
                elif _NAME.fullmatch(entry.name):
                    files.append((stat.st_mtime_ns, stat.st_size, entry))
                    total += stat.st_size
        least = self.limit if total <= self.limit else self.limit - self.limit // PART
        for _, size, path in sorted(files):
            if total <= least:
                break
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size
        self._seen, self._since = total, 0
