"""A hub on 127.0.0.1: the requests of huggingface_hub for one model, answered from a directory."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef" * 2 + "01234567"


class LocalHub(ThreadingHTTPServer):
    """Serves `files` as the repository org/tiny, whose branch main is at `commit`.

    requests: Method and path of each request, in order. pause: Seconds before each megabyte but the
    first of a file. ranges: Whether it sends parts of files.
    """

    daemon_threads = True

    def __init__(self, files: dict[str, bytes], commit: str = COMMIT):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.commit = files, commit
        self.requests: list[tuple[str, str]] = []
        self.pause, self.ranges = 0.0, True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """The environment of a process that asks this hub and keeps its cache in `home`."""
        given = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        own = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
        return given | own | more


class _Handler(BaseHTTPRequestHandler):
    server: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append((self.command, path))
        if match := re.fullmatch(r"/api/models/org/tiny(?:/revision/(.+))?", path):
            self._json(self._info() if self._known(match[1] or "main") else None)
        elif match := re.fullmatch(r"/api/models/org/tiny/tree/([^/]+)/?", path):
            self._json([{"type": "file", "path": n, **self._facts(n)} for n in self.server.files])
        elif (match := re.fullmatch(r"/org/tiny/resolve/([^/]+)/(.+)", path)) and (
            self._known(match[1]) and match[2] in self.server.files
        ):
            self._file(match[2])
        else:
            self._json(None)

    def _known(self, revision: str) -> bool:
        return revision in ("main", self.server.commit)

    def _facts(self, name: str) -> dict[str, object]:
        data = self.server.files[name]
        return {"size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def _info(self) -> dict[str, object]:
        siblings = [{"rfilename": n, "size": len(d)} for n, d in self.server.files.items()]
        return {"id": "org/tiny", "sha": self.server.commit, "siblings": siblings}

    def _json(self, content: object) -> None:
        data = json.dumps(content if content is not None else {"error": "not found"}).encode()
        self.send_response(404 if content is None else 200)
        if content is None:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Type", "application/json")
        self._send(data)

    def _file(self, name: str) -> None:
        data = self.server.files[name]
        wanted = self.headers.get("Range", "") if self.server.ranges else ""
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted)
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{self._facts(name)["oid"]}"')
        self.send_header("X-Repo-Commit", self.server.commit)
        if asked:
            first, last = int(asked[1]), min(int(asked[2] or len(data) - 1), len(data) - 1)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
            data = data[first : last + 1]
        self._send(data)

    def _send(self, data: bytes) -> None:
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        for start in range(0, len(data), 1 << 20):
            if start:
                time.sleep(self.server.pause)
            try:
                self.wfile.write(data[start : start + (1 << 20)])
            except OSError:  # the client left
                self.close_connection = True
                return


@contextmanager
def local_hub(directory: Path, extra: dict[str, bytes] | None = None) -> Iterator[LocalHub]:
    """A running hub whose repository has the files of `directory` and `extra`."""
    files = {p.name: p.read_bytes() for p in sorted(directory.iterdir()) if p.is_file()}
    hub = LocalHub(files | (extra or {}))
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
