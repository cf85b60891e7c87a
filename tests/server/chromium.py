"""Chromium without a window, driven by the DevTools protocol over two pipes.

A test dependency on Selenium or Playwright would be larger than what is needed of them.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
BINARY = next(filter(None, map(shutil.which, NAMES)), None)
SECONDS = 60.0

# Chromium reads commands from file 3 and writes answers to file 4.
LAUNCH = """
import os, sys
os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--remote-debugging-pipe",
)  # fmt: skip


class Tab:
    """One tab of a browser.

    requests: Addresses that the tab asked for. said: What scripts wrote to the console, errors of
    scripts and violations of the Content-Security-Policy included.
    """

    def __init__(self, browser: Browser, session: str, context: str):
        self._browser, self._session = browser, session
        self._context = context
        self.requests: list[str] = []
        self.said: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the result of a command."""
        return self._browser.call(method, self._session, **parameters)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Return the value of an expression, or of the promise that it is."""
        done = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in done, (script, done["exceptionDetails"])
        return done["result"].get("value")

    def until(self, script: str, seconds: float = SECONDS) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + seconds
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < until, (script, self.said, self.texts("body"))
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        """Click as a mouse does, at the middle of the last element that a selector finds."""
        script = (
            f"(() => {{ const all = document.querySelectorAll({json.dumps(selector)});"
            "const one = all[all.length - 1]; one.scrollIntoView({block: 'nearest'});"
            "const box = one.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        x, y = self.run(script)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Insert a text where the cursor is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, modifiers: int = 0) -> None:
        """Press a key. modifiers: 1 Alt, 2 Ctrl, 4 Meta, 8 Shift."""
        codes = {"Enter": 13, "Escape": 27, "ArrowUp": 38}
        text = {"text": "\r"} if key == "Enter" else {}
        event = {"key": key, "code": key, "modifiers": modifiers}
        event["windowsVirtualKeyCode"] = codes.get(key, ord(key[0].upper()))
        self.call("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def texts(self, selector: str) -> list[str]:
        """Return the visible texts of all elements that a selector finds."""
        found = f"document.querySelectorAll({json.dumps(selector)})"
        return self.run(f"[...{found}].map((one) => one.innerText)")

    def size(self, width: int, height: int, *, phone: bool = False, scale: int = 1) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=scale, mobile=phone,
        )  # fmt: skip

    def save_to(self, folder: Path) -> None:
        """Write downloads to a folder."""
        self._browser.call(
            "Browser.setDownloadBehavior",
            behavior="allow", downloadPath=str(folder), browserContextId=self._context,
        )  # fmt: skip

    def give(self, selector: str, *files: Path) -> None:
        """Choose files in a field for files."""
        found = self.call("Runtime.evaluate", expression=f"document.querySelector({selector!r})")
        self.call(
            "DOM.setFileInputFiles",
            files=list(map(str, files)),
            objectId=found["result"]["objectId"],
        )

    def prefer(self, scheme: str) -> None:
        """Set ``prefers-color-scheme``."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def picture(self, file: Path) -> None:
        """Write what the tab shows as PNG."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def note(self, method: str, parameters: dict[str, Any]) -> None:
        """Take an event."""
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.consoleAPICalled":
            self.said.append(" ".join(str(one.get("value")) for one in parameters["args"]))
        elif method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.said.append(details.get("exception", details).get("description", str(details)))
        elif method == "Log.entryAdded":
            self.said.append(parameters["entry"]["text"])
        elif method == "Page.javascriptDialogOpening":
            self.said.append(f"dialog: {parameters['message']}")
            # No call(): this is the thread that would read its answer.
            self._browser.send("Page.handleJavaScriptDialog", self._session, accept=True)


class Browser:
    """A running Chromium with a profile of its own."""

    def __init__(self, commands: Any, answers: Any):
        self._commands, self._answers = commands, answers
        self._last = 0
        self._waiting: dict[int, queue.SimpleQueue] = {}
        self._tabs: dict[str, Tab] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, method: str, session: str | None = None, **parameters: Any) -> int:
        """Send a command; return its number."""
        with self._lock:
            self._last += 1
            message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
            if session is not None:
                message["sessionId"] = session
            self._waiting[self._last] = queue.SimpleQueue()
            self._commands.write(json.dumps(message).encode() + b"\0")
            self._commands.flush()
            return self._last

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Return the result of a command."""
        number = self.send(method, session, **parameters)
        answer = self._waiting[number].get(timeout=SECONDS)
        del self._waiting[number]
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def tab(self) -> Tab:
        """Open a tab whose storage is its own."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        session = attached["sessionId"]
        tab = self._tabs[session] = Tab(self, session, context)
        return tab

    def _read(self) -> None:
        held = b""
        while part := os.read(self._answers.fileno(), 1 << 16):
            *messages, held = (held + part).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._waiting[message["id"]].put(message)
                elif tab := self._tabs.get(message.get("sessionId", "")):
                    tab.note(message["method"], message["params"])


def _pipe() -> list[int]:
    """Return a pipe whose ends the launcher's copies to 3 and 4 do not overwrite."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A Chromium that ends with the context."""
    assert BINARY is not None
    (theirs_in, ours_out), (ours_in, theirs_out) = _pipe(), _pipe()
    command = [sys.executable, "-c", LAUNCH, str(theirs_in), str(theirs_out), BINARY, *FLAGS]
    with subprocess.Popen(
        [*command, f"--user-data-dir={profile}"],
        pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        with open(ours_out, "wb") as commands, open(ours_in, "rb", buffering=0) as answers:
            running = Browser(commands, answers)
            try:
                yield running
            finally:
                running.call("Browser.close")
                process.wait(SECONDS)
