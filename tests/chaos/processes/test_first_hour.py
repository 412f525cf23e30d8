"""A new user's way from an empty directory to a chart that moves, with the time of each step.

The steps are in docs/start.md: a virtual environment, `pip install` of raymq's wheel, `raymq up`, a topic, a
message sent and consumed, and the console's overview. The home directory is empty, too. pip gets the packages from its
cache, or from the index that it uses here. The test asks the console for the same addresses as a browser does.

The aim is five minutes for all steps. pytest prints the times after all tests. The test does not compare them with the
aim, because they depend on the machine. Each step has a time limit, so that a step that hangs fails.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urljoin
from urllib.request import HTTPCookieProcessor, OpenerDirector, Request, build_opener

import psutil
import pytest

from tests.support.cases import SUMMARY
from tests.support.clusters.cluster import Sandbox, assert_gone, sandbox, without_rays_agents
from tests.support.clusters.wheels import build_raymq, pip_cache

INSTALL_S = 600.0
STEP_S = 150.0
"""Time limit in seconds of each other step."""
ANSWER_S = 30.0
AIM_S = 300.0
MESSAGES = 2000
KEPT = ("LANG", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
"""Variables that the new user shares with this process, in addition to pip's variables."""


@dataclass(slots=True)
class FirstHour:
    """A new user, with an empty home directory and an empty current directory. `seconds`: the time of each step."""

    box: Sandbox
    directory: Path
    environ: dict[str, str]
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Measure a step."""
        started_s = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - started_s

    def run(self, *command: str, lines: str = "", timeout_s: float = STEP_S) -> str:
        """Run a command in the user's directory with `lines` as its input. Returns its standard output. Raises
        AssertionError if the command fails."""
        done = subprocess.run(
            command,
            cwd=self.directory,
            env=self.environ,
            input=lines,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def program(self, name: str) -> str:
        """Return the path of a program of the user's virtual environment."""
        return str(self.directory / ".venv" / "bin" / name)

    def raymq(self, *arguments: str, lines: str = "") -> Any:
        """Run a raymq command with --json. Returns its decoded output."""
        return json.loads(self.run(self.program("raymq"), *arguments, "--json", lines=lines))

    def table(self) -> str:
        """Return the times of all steps as text, and their sum beside the aim."""
        rows = [f"  {name:<28}{seconds:7.1f} s" for name, seconds in self.seconds.items()]
        rows.append(f"  {'in all':<28}{sum(self.seconds.values()):7.1f} s   (aim: {AIM_S:.0f} s)")
        return "\n".join(["From an empty directory to a chart that moves:", *rows])


@pytest.fixture
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FirstHour]:
    """Yield a new user. Afterwards stops raymq and checks that no process is left, except Ray's agents. Kills all
    processes that are left, also if a step failed. The sandbox removes all files."""
    tmp_path_factory.getbasetemp()  # Make pytest choose its temporary directory before TMPDIR changes.
    cache = pip_cache()
    with sandbox() as box:
        directory = box.root / "empty"
        directory.mkdir()
        shared = {name: value for name, value in os.environ.items() if name.upper() in KEPT or name.startswith("PIP_")}
        own = {
            "HOME": str(box.home),
            "TMPDIR": str(box.tmp),
            "PATH": os.pathsep.join([str(directory / ".venv" / "bin"), "/usr/local/bin", "/usr/bin", "/bin"]),
            "PIP_CACHE_DIR": cache,
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray listens only on loopback
        }
        made = FirstHour(box, directory, {**shared, **own})
        try:
            yield made
            made.run(made.program("raymq"), "down")
            # Ray's agents end by themselves within a minute. The test does not wait for them.
            assert_gone(without_rays_agents(processes_of(box)))
        finally:
            end_processes(box)


def processes_of(box: Sandbox) -> list[psutil.Process]:
    """Return all processes that have the sandbox's home directory, which are the new user's processes."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("HOME") == str(box.home):
                found.append(process)
        except psutil.Error:
            continue  # the process has ended, or belongs to another user
    return found


def end_processes(box: Sandbox) -> None:
    """Kill the new user's processes until none is left, because a process may start another one."""
    while left := processes_of(box):
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue  # the process has just ended
        psutil.wait_procs(left, timeout=ANSWER_S)


@dataclass(frozen=True, slots=True)
class Browser:
    """What a browser does with the console: it keeps cookies, and names the origin of a form."""

    origin: str
    opener: OpenerDirector

    def get(self, address: str, **form: str) -> str:
        """Get an address of the console, or send a form to the address. Returns the response's text. Raises HTTPError
        if the console refuses the request."""
        headers = {"Origin": self.origin.rstrip("/"), "Sec-Fetch-Site": "same-origin"} if form else {}
        data = urlencode(form).encode() if form else None
        request = Request(urljoin(self.origin, address), data=data, headers=headers)
        with self.opener.open(request, timeout=ANSWER_S) as answer:
            text: str = answer.read().decode()
        return text


def chart_values(browser: Browser, overview: str) -> list[float]:
    """Return the values of the overview's first chart, as its page names the chart's address and its first series."""
    [address, series] = re.findall(r'data-chart="([^"]+)" data-series="(\w+):', overview)[0]
    values: list[float | None] = json.loads(browser.get(address))[series]
    return [value for value in values if value is not None]


@pytest.mark.timeout(INSTALL_S + 8 * STEP_S)
def test_a_new_user_gets_from_an_empty_directory_to_a_chart_that_moves(
    user: FirstHour, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    _, wheel = build_raymq(tmp_path)
    # The console gets a free port, because another console of this machine may have the usual port.
    settings = user.box.root / "console.yaml"
    settings.write_text("console: {port: 0}\n")
    python = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"

    with user.step("virtual environment"):
        user.run(str(python), "-m", "venv", ".venv")
    with user.step("pip install raymq"):
        pip = (user.program("python"), "-m", "pip", "--disable-pip-version-check", "--quiet")
        user.run(*pip, "install", str(wheel), timeout_s=INSTALL_S)
    with user.step("raymq up"):
        assert "broker-a" in user.raymq("up")["actors"]
    with user.step("raymq topic create"):
        user.raymq("topic", "create", "orders", "--queues", "4")
    with user.step("raymq send"):
        [sent] = user.raymq("send", "orders", '{"id": 17}', "--tags", "paid", "--key", "o-17")["sent"]
        assert sent["status"] == "SEND_OK"
    with user.step("raymq consume"):
        message = user.raymq("consume", "billing", "orders", "--from", "first", "--max", "1")
        assert message["body"] == '{"id": 17}'
    with user.step("raymq console, and log in"):
        console = user.raymq("console", "--config", str(settings))
        browser = Browser(console["url"], build_opener(HTTPCookieProcessor()))
        assert 'name="token"' in browser.get("/")
        token = user.run(user.program("ray"), "get-auth-token").strip()
        overview = browser.get("/login", token=token, next="/")
        assert "Overview" in overview
        for script in re.findall(r'<script src="([^"]+)"', overview):
            assert browser.get(script)
    with user.step("a chart that moves"):
        lines = "".join(f'{{"id": {number}}}\n' for number in range(MESSAGES))
        deadline_s, values = time.monotonic() + STEP_S, []
        while len(set(values)) < 2 or max(values) == 0:
            assert time.monotonic() < deadline_s, f"the chart has not moved: {values}"
            user.raymq("send", "orders", lines=lines)
            values = chart_values(browser, overview)

    assert sum(user.seconds.values()) > 0
    record_property(SUMMARY, user.table())
