"""Starts and stops servers for programs that must not import the servers' code.

Ray gives each actor the import path of the job that created it. A job's import path begins with the directory of its
program and the current directory. A user's program may have a folder called `storage` in these directories. So a
separate program starts the servers: `placement.launcher_main`, run from the root directory. This module runs the
separate program and relays its messages.

The two processes exchange JSON lines. This module writes a request to the program's standard input. The program writes
`{"progress": text}` to standard output any number of times, and at the end `{"result": value}` or `{"error": pickled
RaymqError}`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from raymq.common.errors import RaymqError, RequestTimeoutError, ServiceNotAvailableError

if TYPE_CHECKING:
    from raymq.common.config.cluster import ClusterSettings

LAUNCHER_TIMEOUT_S: Final = 300.0
"""Timeout in seconds of one run of the launch process; after that time the process is killed."""
LAUNCHER_END_TIMEOUT_S: Final = 60.0
"""Timeout in seconds for the launch process to exit after it has answered."""

ProgressCallback = Callable[[str], None]
"""Function that is called with the name of each step of an action on the servers (such as a start), when the step
begins."""


def launch(
    action: str,
    address: str,
    settings: ClusterSettings | None = None,
    progress: ProgressCallback = lambda step: None,
    **arguments: Any,
) -> Any:
    """Run `action` on the Ray cluster at `address` (host:port of its GCS), in a launch process. Returns the action's
    result.

    `action`: "start", "stop", "status", "drain", "balance", "close", "board", "console", "stop_console", "gateways" or
    "stop_gateways". "drain" takes the arguments `node` and
    `undo` (placement.operations). "start" takes `board`: True installs Grafana's board at the end, unless metrics are
    off. "start" returns `actors`, the names of all running actors; `notes`, sentences about what was found and
    changed; and `data_dir`, the directory of the stores, or None if raymq ran before. "board" takes `output`
    (placement.operations).

    Raises the RaymqError of the launch process, RequestTimeoutError after LAUNCHER_TIMEOUT_S, and
    ServiceNotAvailableError if the launch process ends without an answer. A start that fails leaves nothing running.
    `progress` is called with each step's name.
    """
    request = {
        "action": action,
        "address": address,
        "settings": None if settings is None else settings.model_dump(mode="json"),
        "given": [] if settings is None else sorted(settings.model_fields_set),
        **arguments,
    }
    command = [sys.executable, "-P", "-m", "raymq.client.cluster.server_path", "placement.launcher_main"]
    environment = {**os.environ, "RAY_DISABLE_IMPORT_WARNING": "1"}
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
        env=environment,
        text=True,
    )
    watchdog = threading.Timer(LAUNCHER_TIMEOUT_S, process.kill)
    watchdog.start()
    errors: list[str] = []
    # Read standard error at the same time as standard output, so that neither pipe can fill up and block the process.
    assert process.stderr is not None
    drain = threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
    drain.start()
    try:
        answer = _converse(process, request, progress)
    except BaseException:
        process.terminate()  # on SIGTERM the launch process stops the servers that it has started
        raise
    finally:
        late = watchdog.finished.is_set()
        watchdog.cancel()
        try:
            process.wait(LAUNCHER_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        drain.join(5)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    if answer is not None:
        return answer["result"]
    if late:
        raise RequestTimeoutError(f"the {action} of raymq's servers", LAUNCHER_TIMEOUT_S)
    raise ServiceNotAvailableError(
        f"the program that starts raymq's servers ended without an answer (exit code {process.returncode}). "
        f"Its last output:\n{''.join(errors[-20:])}"
    )


def _converse(
    process: subprocess.Popen[str], request: dict[str, Any], progress: ProgressCallback
) -> dict[str, Any] | None:
    """Send the request to the launch process, report its progress, and return its answer; None if the process ends
    without an answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    # If the launch process has ended, ignore the broken pipe: the process's output contains the reason.
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(json.dumps(request) + "\n")
    for line in process.stdout:
        try:
            answer = json.loads(line)
        except ValueError:
            continue  # skip a line that is not an answer: Ray may print to standard output
        if not isinstance(answer, dict):
            continue
        if "progress" in answer:
            progress(answer["progress"])
        elif "error" in answer:
            error = pickle.loads(base64.b64decode(answer["error"]))
            assert isinstance(error, RaymqError)
            raise error
        elif "result" in answer:
            return answer
    return None
