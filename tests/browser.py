"""A headless Chromium for the page's tests, driven over its DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import ClientConnection, connect

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--remote-debugging-port=0",
)


class Tab:
    """One page of the browser. `errors` collects what the page's console complained of."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.errors: list[str] = []
        self.requested: list[str] = []  # URLs
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def open(self, url: str) -> None:
        """Load a page."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, condition: str, timeout_s: float = 30.0) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + timeout_s
        while not self.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"never true: {condition}; the page shows: " + self.text("body")
            time.sleep(0.03)

    def text(self, selector: str) -> str:
        """What an element shows."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        """Click an element's middle, as a user would; it must be visible there."""
        x, y = self.evaluate(
            f"""(() => {{
                const element = document.querySelector({json.dumps(selector)});
                element.scrollIntoView({{ block: "nearest" }});
                const box = element.getBoundingClientRect();
                const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
                const hit = document.elementFromPoint(x, y);
                if (!element.contains(hit)) throw new Error("covered by " + hit?.outerHTML);
                return [x, y];
            }})()"""
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, modifiers: int = 0) -> None:
        """Press a key: "Enter", "Escape", "Tab"…; modifiers 1 Alt, 2 Ctrl, 8 Shift."""
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowRight": 39, "ArrowLeft": 37}
        code = codes.get(key, ord(key.upper()[0]))
        extra = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, modifiers=modifiers, **extra
            )
            extra = {}

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        """Set the window's size in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def screenshot(self, path: Path) -> None:
        """Write a PNG of what the window shows."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif message.get("method") == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])


def chromium() -> str:
    """The browser's path; without one the test is skipped, in CI it fails."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        if os.environ.get("CI"):
            pytest.fail("no chromium here: .ci/run installs it")
        pytest.skip("no chromium here (on Debian: apt install chromium)")
    return path


@contextlib.contextmanager
def browsing(folder: Path) -> Iterator[Tab]:
    """A tab of a fresh browser; `folder` takes its profile."""
    profile = folder / "profile"
    browser = subprocess.Popen(
        [chromium(), *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        port = _debugging_port(profile / "DevToolsActivePort", browser)
        (page,) = [t for t in httpx.get(f"http://127.0.0.1:{port}/json", timeout=60).json() if t["type"] == "page"]
        with connect(page["webSocketDebuggerUrl"], max_size=None, compression=None) as socket:
            yield Tab(socket)
    finally:
        browser.terminate()
        try:
            browser.wait(5)
        except subprocess.TimeoutExpired:
            browser.kill()
            browser.wait()


def _debugging_port(file: Path, browser: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and browser.poll() is None:
        if file.exists() and (lines := file.read_text().splitlines()):
            return int(lines[0])
        time.sleep(0.05)
    pytest.fail("chromium does not start")
