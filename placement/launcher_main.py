"""The program that starts, stops and inspects the servers for `raymq.cluster.launcher`; the protocol is described
there.

`raymq.cluster.server_path` runs it, with `-P` and from the root directory, so that its job's import path, which the
servers inherit, holds nothing but what is installed.
"""

from __future__ import annotations

import base64
import json
import logging
import pickle
import signal
import sys
from typing import Any, NoReturn

import ray

from placement import launch, operations
from placement.inventory import inventory, running
from placement.plan import make_plan
from placement.status import cluster_status
from raymq.config.cluster import ClusterSettings
from raymq.errors import RaymqError, ServiceNotAvailableError
from raymq.names import NAMESPACE


def main() -> None:
    """Read one request, carry it out, answer."""
    signal.signal(signal.SIGTERM, _interrupt)
    # A terminal's ctrl-C goes to the user's program, which then ends this one in its own time.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    request = json.loads(sys.stdin.readline())
    try:
        ray.init(address=request["address"], namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        _write_answer(result=_carry_out(request))
    except RaymqError as error:
        _write_answer(error=base64.b64encode(pickle.dumps(error)).decode())
    except ConnectionError as error:
        unreachable = ServiceNotAvailableError(f"cannot connect to Ray at {request['address']}: {error}")
        _write_answer(error=base64.b64encode(pickle.dumps(unreachable)).decode())
    finally:
        ray.shutdown()


def _carry_out(request: dict[str, Any]) -> Any:
    action = request["action"]
    if action == "start":
        settings = ClusterSettings(**request["settings"])
        known, draining = operations.placed_replicas()
        plan = make_plan(settings, inventory(settings.data_dir, draining), known)
        launch.start(plan, _progress)
        return running()
    if action == "stop":
        return launch.stop(_progress)
    if action == "drain":
        return operations.drain(request["node"], drained=not request["undo"], progress=_progress)
    if action == "balance":
        return operations.balance(_progress)
    return cluster_status()


def _progress(step: str) -> None:
    _write_answer(progress=step)


def _write_answer(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def _interrupt(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt
