"""Starts and stops servers for programs that must not import them.

Ray gives each actor the import path of the job that created it, and a job's path begins with its program's directory
and its current one. A user's program may have a folder called `storage` there. So servers are started by a program of
their own, `placement.launcher_main`, run from the root directory; this module runs it and relays what it says.

The two speak JSON lines: a request on standard input, then on standard output `{"progress": text}` any number of times
and at the end `{"result": value}` or `{"error": pickled RaymqError}`.
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
from typing import Any, Final

from raymq.common.config.cluster import ClusterSettings
from raymq.common.errors import RaymqError, RequestTimeoutError, ServiceNotAvailableError

LAUNCHER_TIMEOUT_S: Final = 300.0
"""Bounds one run of the launch process; then it is killed."""
LAUNCHER_END_TIMEOUT_S: Final = 60.0
"""Bounds the wait for the launch process to end after its answer."""

ProgressCallback = Callable[[str], None]
"""Called with the name of each step that begins."""


def launch(
    action: str,
    address: str,
    settings: ClusterSettings | None = None,
    progress: ProgressCallback = lambda step: None,
    **arguments: Any,
) -> Any:
    """Have `action` ("start", "stop", "status", "drain", "balance", "close" or "board") done on the Ray cluster at
    `address` (its GCS, host:port). `arguments`: "drain" takes `node` and `undo` (placement.operations), "start" takes
    `board`, True to install Grafana's board at the end unless metrics are off, and returns `actors`, the names of all
    that run, and `notes`, sentences about what was found and changed; "board" takes `output`
    (placement.operations).

    Returns the action's result. Raises the RaymqError of the launch process, RequestTimeoutError after
    LAUNCHER_TIMEOUT_S, ServiceNotAvailableError when the launch process ends without an answer. A start that fails
    leaves nothing running. `progress` is called with each step's name.
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
    # Read standard error beside standard output, so that neither pipe can fill up.
    assert process.stderr is not None
    drain = threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
    drain.start()
    try:
        answer = _converse(process, request, progress)
    except BaseException:
        process.terminate()  # the launch process stops the servers it has started
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
        raise RequestTimeoutError(f"{action} of the servers", LAUNCHER_TIMEOUT_S)
    raise ServiceNotAvailableError(
        f"the launcher ended without an answer (exit code {process.returncode}):\n{''.join(errors[-20:])}"
    )


def _converse(
    process: subprocess.Popen[str], request: dict[str, Any], progress: ProgressCallback
) -> dict[str, Any] | None:
    """Send the request, pass on the progress, and return the answer; None if the process ends without one."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:  # it has ended; its output says why
        process.stdin.write(json.dumps(request) + "\n")
    for line in process.stdout:
        try:
            answer = json.loads(line)
        except ValueError:
            continue  # Ray may print to standard output
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
