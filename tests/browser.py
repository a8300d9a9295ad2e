"""Headless Chromium, spoken to in W3C WebDriver by urllib: keys, scripts, screenshots, what the console said."""

import base64
import json
import re
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = ("chromium", "chromedriver")
INSTALL = "apt-get install -y --no-install-recommends chromium chromium-driver"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
KEYS = {"Shift": "\ue008", "Control": "\ue009", "Enter": "\ue007", "Escape": "\ue00c", "Right": "\ue014"}
START_S = 60
ANSWER_S = 120
WAIT_S = 20
STARTED = re.compile(r"started successfully on port (\d+)")

needs_browser = pytest.mark.skipif(not all(map(shutil.which, PROGRAMS)), reason=f"needs Chromium: {INSTALL}")


class Browser:
    """One window."""

    def __init__(self, driver: str) -> None:
        with tempfile.TemporaryDirectory(prefix="chromium-") as self._folder:
            options = {"args": [*FLAGS, f"--user-data-dir={self._folder}"]}
        capabilities = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._session = driver + "/session"
        self._session += "/" + self._post("", {"capabilities": {"alwaysMatch": capabilities}})["sessionId"]

    def open(self, url: str) -> None:
        self._post("/url", {"url": url})

    def ask(self, expression: str) -> Any:
        """What an expression of JavaScript is."""
        return self._post("/execute/sync", {"script": f"return {expression}", "args": []})

    def wait(self, expression: str) -> None:
        """Until it is true. AssertionError after WAIT_S."""
        end = time.monotonic() + WAIT_S
        while not self.ask(expression):
            assert time.monotonic() < end, f"{expression} is not true: {self.ask('document.body.innerText')}"
            time.sleep(0.02)

    def press(self, *keys: str) -> None:
        """Each a text that is typed, or a chord: Control+Shift+Right."""
        for key in keys:
            names = key.split("+")
            is_chord = names[0] in KEYS
            codes = [KEYS.get(name, name) for name in names] if is_chord else [*key]
            down = [{"type": "keyDown", "value": code} for code in codes]
            up = [{"type": "keyUp", "value": code} for code in codes]
            both = [*down, *reversed(up)]
            if not is_chord:
                both = [*chain.from_iterable(zip(down, up, strict=True))]
            self._post("/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": both}]})

    def look(self, *, dark: bool = False, width: int = 1200, height: int = 900) -> None:
        """How wide the window is, and whether the person likes it dark."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._command("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._command("Emulation.setDeviceMetricsOverride", **size)

    def picture(self, path: Path) -> None:
        """The whole page as PNG."""
        data = self._command("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def complaints(self) -> list[str]:
        """What the console has said since the last call: errors of scripts, what a policy refused."""
        return [line["message"] for line in self._post("/se/log", {"type": "browser"})]

    def close(self) -> None:
        self._request("", None, "DELETE")
        shutil.rmtree(self._folder, ignore_errors=True)

    def _command(self, name: str, **parameters: Any) -> Any:
        return self._post("/goog/cdp/execute", {"cmd": name, "params": parameters})

    def _post(self, path: str, body: Any) -> Any:
        return self._request(path, json.dumps(body).encode(), "POST")

    def _request(self, path: str, body: bytes | None, method: str) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._session + path, body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {json.load(error)['value']['message']}") from error


@contextmanager
def browsing() -> Iterator[Browser]:
    """A browser that ends with the block, and its driver."""
    driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None
        port = next(match[1] for line in driver.stdout if (match := STARTED.search(line)))
        browser = Browser(f"http://127.0.0.1:{port}")
        try:
            yield browser
        finally:
            browser.close()
    finally:
        driver.terminate()
        driver.wait(timeout=START_S)
        driver.stdout.close()
