"""A real browser without a window, driven over its own debugging pipe; nothing to install but the browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
TIMEOUT = 60.0


def find_browser() -> str | None:
    """The browser of HOLDFAST_BROWSER, or one that the system or playwright has installed."""
    given = os.environ.get("HOLDFAST_BROWSER")
    found = [given] if given else [shutil.which(name) for name in NAMES]
    cached = sorted(Path.home().glob(".cache/ms-playwright/chromium-*/chrome-linux*/chrome"))
    return next(filter(None, [*found, *map(str, cached)]), None)


in_browser = pytest.mark.skipif(
    find_browser() is None, reason="no Chromium here: install one, or name it in HOLDFAST_BROWSER"
)


def data_of(page: str) -> Any:
    """What one of our pages holds."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


class Browser:
    """One page of a headless Chromium. `events` has what it was told since: requests, exceptions, violations."""

    def __init__(self, width: int = 1280, height: int = 900) -> None:
        program = find_browser()
        assert program is not None
        self._folder = tempfile.TemporaryDirectory(prefix="holdfast-browser-", ignore_cleanup_errors=True)
        # The browser reads commands from its descriptor 3, and writes answers to 4.
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        flags = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --remote-debugging-pipe"
        start = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$0" "$@"'
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                start,
                program,
                *flags.split(),
                f"--user-data-dir={self._folder.name}",
                "about:blank",
            ],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._left, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = next(one for one in self.send("Target.getTargets")["targetInfos"] if one["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        found: dict[str, Any] = answer["result"]
        return found

    def _next(self) -> dict[str, Any]:
        ends = time.monotonic() + TIMEOUT
        while b"\0" not in self._left:
            if not wait([self._in], max(ends - time.monotonic(), 0)):
                raise TimeoutError("The browser does not answer.")
            data = os.read(self._in, 1 << 20)
            if not data:
                raise RuntimeError("The browser has ended.")
            self._left += data
        message, _, self._left = self._left.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def open(self, page: Path, scheme: str = "light") -> None:
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", features=media)
        self.send("Page.navigate", url=page.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def show(self, page: str, to: Path, scheme: str = "light") -> None:
        """Open a page of ours, which raises nothing and loads nothing."""
        to.write_text(page)
        self.open(to, scheme)
        assert self.of("Runtime.exceptionThrown") == []
        assert [entry["entry"]["text"] for entry in self.of("Log.entryAdded")] == []
        requests = [one["request"]["url"] for one in self.of("Network.requestWillBeSent")]
        assert requests == [to.as_uri()]

    def evaluate(self, code: str) -> Any:
        found = self.send("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def of(self, method: str) -> list[dict[str, Any]]:
        return [event["params"] for event in self.events if event.get("method") == method]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._out)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait(10)
        os.close(self._in)
        self._folder.cleanup()
