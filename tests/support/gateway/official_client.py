"""Runs a program with one of RocketMQ's official clients, and carries out requests in it.

The programs are clients/driver.py and clients/driver.cjs. Both understand the same requests. A program ends when its
stdin ends, so it does not outlive the tests.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.clusters.cluster import user_environment
from tests.support.gateway.official import CLIENTS, official_node, official_python

REQUEST_S = 120.0
END_S = 10.0
LOG_CHARS = 4000


class OfficialError(Exception):
    """A call of an official client failed. `code`: the code of the gateway's answer; None for another error. `kind`:
    the class of the client's error."""

    def __init__(self, kind: str, code: int | None, text: str) -> None:
        super().__init__(f"{kind} {code}: {text}")
        self.kind, self.code = kind, code


class OfficialClient:
    """A running program with an official client. `language`: `python` or `node`. `pid`: its process. `log`: the file
    with its stderr."""

    def __init__(self, language: str, process: subprocess.Popen[str], log: Path) -> None:
        self.language, self.pid, self._process, self._log = language, process.pid, process, log
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._requests = 0
        self._is_running = True
        threading.Thread(target=self._read, daemon=True).start()

    def call(self, request: str, **arguments: Any) -> Any:
        """Carry out a request, and return its result. Arguments that are None are left out. Raises OfficialError if the
        client fails, and AssertionError if the program ends or does not answer within REQUEST_S."""
        try:
            return self.begin(request, **arguments).result(REQUEST_S)
        except TimeoutError:
            raise AssertionError(f"{self.language} did not answer {request} in {REQUEST_S:g} s\n{self.log()}") from None

    def begin(self, request: str, **arguments: Any) -> Future[Any]:
        """Begin a request, and return the future of its result. The future raises the errors of `call`."""
        fields = {name: value for name, value in arguments.items() if value is not None}
        answer: Future[Any] = Future()
        with self._lock:
            assert self._is_running, f"the {self.language} program has ended\n{self.log()}"
            number, self._requests = self._requests, self._requests + 1
            self._waiting[number] = answer
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps([number, request, fields]) + "\n")
            self._process.stdin.flush()
        return answer

    def log(self) -> str:
        """Return the end of the program's stderr."""
        return self._log.read_text(errors="replace")[-LOG_CHARS:]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            fields = json.loads(line)
            with self._lock:
                future = self._waiting.pop(fields["id"])
            if "error" in fields:
                future.set_exception(OfficialError(fields["error"], fields["code"], fields["text"]))
            else:
                future.set_result(fields["result"])
        with self._lock:
            self._is_running, left = False, list(self._waiting.values())
        for future in left:
            future.set_exception(AssertionError(f"the {self.language} program has ended\n{self.log()}"))


@contextmanager
def official_client(
    language: str, folder: Path, variables: Mapping[str, str] | None = None
) -> Iterator[OfficialClient]:
    """Start a program with an official client, and yield it. At the end, the program is killed: the shutdown of a Node
    client takes up to 21 s.

    `folder`: the program's home directory, in which the Python client writes its log. `variables`: further environment
    variables. Raises InstallError if the client cannot be installed.
    """
    if language == "python":
        # -P: the program's folder is no folder of modules
        command = [str(official_python()), "-P", str(CLIENTS / "driver.py")]
    else:
        node, modules = official_node()
        command = [str(node), str(CLIENTS / "driver.cjs"), str(modules)]
    folder.mkdir(parents=True, exist_ok=True)
    environ = {**user_environment(), "HOME": str(folder), **(variables or {})}
    log = folder / f"{language}.err"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, cwd=folder, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            yield OfficialClient(language, process, log)
        finally:
            process.kill()
            process.wait(END_S)
