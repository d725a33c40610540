"""A real browser for tests: Debian's chromium, without a window, spoken to over its DevTools pipe."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.integration.namespaces import run

PACKAGES = ("chromium", "fonts-dejavu-core")  # Debian's chromium draws no letter without some font
SECONDS = 120  # that an answer may take, on a busy machine
FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>/usr/share/fonts</dir><dir>{root}/usr/share/fonts</dir><cachedir>{root}/fonts-cache</cachedir></fontconfig>
"""


def fetch(folder: Path, *options: str) -> tuple[Path, dict[str, str]]:
    """Debian's chromium with what it needs and this machine lacks, unpacked below ``folder`` and not installed.

    Returns:
        the program, and the environment variables with which it finds its libraries and a font.
    """
    root, archives = folder / "debian", folder / "archives"
    for made in (root, archives / "partial"):
        made.mkdir(parents=True)
    where = [f"Dir::Cache::archives={archives}", "Debug::NoLocking=1", "APT::Sandbox::User=root", *options]
    command = ["apt-get", "install", "-qy", "--download-only", "--no-install-recommends", *PACKAGES]
    got = subprocess.run(
        command + [part for option in where for part in ("-o", option)], capture_output=True, text=True
    )
    if got.returncode:
        pytest.fail(
            f"this test needs Debian's chromium, and apt-get could not download it: {got.stderr.strip()[-500:]}"
        )
    for package in archives.glob("*.deb"):
        run("dpkg-deb", "-x", str(package), str(root))
        package.unlink()
    libraries = {path.parent for path in root.rglob("lib*.so*")}
    (root / "fonts.conf").write_text(FONTS.format(root=root))
    found = {"LD_LIBRARY_PATH": ":".join(map(str, sorted(libraries))), "FONTCONFIG_FILE": str(root / "fonts.conf")}
    return root / "usr/lib/chromium/chromium", found


@dataclass
class Page:
    """One tab. ``requests`` are addresses that it asked for; ``messages`` what its console and its errors said."""

    browser: Browser
    session: str
    requests: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    loaded: int = 0

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to a DevTools command about this tab."""
        return self.browser.call(method, self.session, **parameters)

    def open(self, file: Path, width: int, height: int = 900, scheme: str = "light") -> None:
        """Open a file in a window of ``width`` x ``height`` CSS pixels and wait until all of it is there."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **screen)
        self.call("Emulation.setScrollbarsHidden", hidden=True)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        before = self.loaded
        assert "errorText" not in self.call("Page.navigate", url=file.as_uri())
        while self.loaded == before:
            self.browser.receive()
        self.evaluate("document.fonts.ready.then(() => 0)")

    def evaluate(self, script: str) -> Any:
        """What a JavaScript expression (or its promise) gives, as JSON."""
        told = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def screenshot(self, file: Path) -> None:
        """The whole page, not only what the window shows, as PNG."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(data))

    def note(self, method: str, facts: dict[str, Any]) -> None:
        """Keep what an event says."""
        if method == "Page.loadEventFired":
            self.loaded += 1
        elif method == "Network.requestWillBeSent":
            self.requests.append(facts["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.messages.append(facts["exceptionDetails"]["text"])
        elif method == "Log.entryAdded":
            self.messages.append(facts["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.messages.append(f"console.{facts['type']}: {facts['args']}")


class Browser:
    """Chromium: this machine's own, or else fetched below ``folder``."""

    def __init__(self, folder: Path):
        found = shutil.which("chromium")
        program, environment = (Path(found), {}) if found else fetch(folder)
        self.pages: dict[str, Page] = {}
        self.sent, self.buffer = 0, b""
        pipes = [*os.pipe(), *os.pipe()]
        # The browser reads file 3 and writes file 4: numbers above both, so that neither overwrites the other.
        read, self.output, self.input, write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in pipes)
        for end in pipes:
            os.close(end)
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}"]
        shell = ["bash", "-c", f'exec "$@" 3<&{read} 4>&{write}', "bash", str(program), *flags]
        self.log = folder / "chromium.log"
        with self.log.open("w") as log:
            kept = {"env": {**os.environ, **environment}, "pass_fds": (read, write), "start_new_session": True}
            self.process = subprocess.Popen(shell, stdout=log, stderr=log, **kept)
        os.close(read)
        os.close(write)

    def page(self) -> Page:
        """A new tab."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self.pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        return page

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """The answer to a DevTools command."""
        self.sent += 1
        message = {"id": self.sent, "method": method, "params": parameters} | (
            {"sessionId": session} if session else {}
        )
        os.write(self.output, json.dumps(message).encode() + b"\0")
        while (answer := self.receive()).get("id") != self.sent:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def receive(self) -> dict[str, Any]:
        """The next message; events are given to their pages, too."""
        deadline = time.time() + SECONDS
        while b"\0" not in self.buffer:
            ready = select.select([self.input], [], [], max(0, deadline - time.time()))[0]
            got = os.read(self.input, 1 << 20) if ready else b""
            assert got, f"the browser {'is gone' if ready else 'does not answer'}: {self.log.read_text()[-2000:]}"
            self.buffer += got
        line, self.buffer = self.buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        page = self.pages.get(message.get("sessionId", ""))
        if page and "method" in message:
            page.note(message["method"], message["params"])
        return message

    def close(self) -> None:
        """End the browser."""
        os.close(self.output)  # it ends with its pipe
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, 9)
            self.process.wait()
        os.close(self.input)
