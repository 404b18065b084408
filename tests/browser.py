"""A headless Chromium for tests of pages, over the DevTools protocol's pipe: no port, no library, no driver."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = "--headless=new --no-sandbox --disable-gpu --no-first-run --disable-extensions --remote-debugging-pipe".split()
PATIENCE = 60
"""The browser counts as dead after this many seconds without an answer."""

# The browser reads commands from descriptor 3 and answers on 4. Both are copied to higher numbers first, so that neither
# overwrites the other.
_LAUNCH = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3])
os.dup2(read, 3), os.dup2(write, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


class BrowserError(AssertionError):
    """The browser is missing, has ended or answered with an error, or the page threw an error."""


class Browser:
    """A browser process with its own profile, which ends with the `with` block."""

    def __enter__(self) -> Browser:
        program = next(filter(None, map(shutil.which, NAMES)), None)
        if program is None:
            raise BrowserError(f"none of {', '.join(NAMES)} is installed; tests with the marker `browser` need one")
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._commands = os.pipe()
        self._answers, theirs_out = os.pipe()
        launch = [sys.executable, "-c", _LAUNCH, str(theirs_in), str(theirs_out)]
        self._process = subprocess.Popen(
            [*launch, program, *OPTIONS, f"--user-data-dir={self._profile.name}", "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._count, self._rest = 0, b""
        self.events: list[dict[str, Any]] = []
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.send("Browser.close")
            self._process.wait(PATIENCE)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._commands)
            os.close(self._answers)
            self._profile.cleanup()

    def open(self, page: Path) -> Tab:
        """Load a file in a new tab, and wait until it is complete."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        tab = Tab(self, self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        for domain in ("Log", "Network", "Page", "Runtime"):
            tab.send(f"{domain}.enable")
        tab.send("Page.navigate", url=page.absolute().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in tab.events):
            self._take()
        return tab

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command of the protocol and return its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._take()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def _take(self) -> dict[str, Any]:
        """The next message; events are stored."""
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], PATIENCE)
            received = os.read(self._answers, 1 << 16) if ready else b""
            if not received:
                raise BrowserError(f"the browser {'has gone' if ready else f'said nothing for {PATIENCE} seconds'}")
            self._rest += received
        message, _, self._rest = self._rest.partition(b"\0")
        answer = json.loads(message)
        if "method" in answer:
            self.events.append(answer)
        return answer


class Tab:
    """A loaded page."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    @property
    def events(self) -> list[dict[str, Any]]:
        """The browser's events about this page."""
        return [event for event in self._browser.events if event.get("sessionId") == self._session]

    @property
    def requests(self) -> list[str]:
        """The addresses of all requests of the page, its own first."""
        asked = [event["params"] for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [event["request"]["url"] for event in asked]

    @property
    def errors(self) -> list[str]:
        """The errors that the page's scripts threw."""
        thrown = [event["params"] for event in self.events if event["method"] == "Runtime.exceptionThrown"]
        return [event["exceptionDetails"].get("exception", {}).get("description", "") for event in thrown]

    @property
    def console(self) -> list[str]:
        """The errors and warnings in the page's console, from the browser and from scripts."""
        calls = [event["params"] for event in self.events if event["method"] == "Runtime.consoleAPICalled"]
        entries = [event["params"]["entry"] for event in self.events if event["method"] == "Log.entryAdded"]
        messages = [str(call["args"]) for call in calls if call["type"] in ("error", "warning", "assert")]
        return messages + [entry["text"] for entry in entries if entry["level"] in ("error", "warning")]

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the protocol to this page."""
        return self._browser.send(method, self._session, **parameters)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression, as plain data."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression}: {answer['result'].get('description')}")
        return answer["result"].get("value")

    def click(self, selector: str, nth: int = 0) -> None:
        """Press and release the mouse in the middle of an element, scrolled into view; an element above it gets the click."""
        x, y = self.value(
            f"(() => {{ const one = document.querySelectorAll({json.dumps(selector)})[{nth}];"
            " one.scrollIntoView({block: 'center', inline: 'center'}); const box = one.getBoundingClientRect();"
            " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, selector: str, text: str) -> None:
        """Click an element and type, key by key."""
        self.click(selector)
        for letter in text:
            self.send("Input.dispatchKeyEvent", type="keyDown", text=letter, key=letter)
            self.send("Input.dispatchKeyEvent", type="keyUp", key=letter)

    def press(self, key: str, code: int) -> None:
        """Press a key without a character, by its name and its code, such as `Tab` and 9."""
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)
