"""A simulated machine with disks and clocks that tests can break. The import path of its servers begins with
tests/support/faulty_machine, whose sitecustomize injects the faults."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from raymq.common.errors import RaymqError, StoreError
from raymq.common.names import StorageName
from raymq.remoting.actor_ref import ActorRef
from tests.support.clusters.cluster import Sandbox, sandbox

FAULTY_MACHINE = Path(__file__).parents[1] / "faulty_machine"
DISK_FAULTS = ("flush", "write", "read", "bus")
"""Names of the disk faults. "flush" makes fdatasync fail with EIO, "write" makes pwrite fail, and "read" makes reads
fail. "bus" makes reads fail, and ends the process by SIGBUS if it uses a memory map."""


@dataclass(frozen=True, slots=True)
class FaultyMachine:
    """A sandbox with servers into which tests can inject faults. `faults`: the directory of the marker files for clock
    faults."""

    box: Sandbox
    faults: Path

    def marker(self, broker: str, replica: int, fault: str) -> Path:
        """Return the path of a marker file. While this file exists, the replica's disk has the fault `fault`."""
        return self.box.data / f"{broker}-{replica}" / fault


@contextmanager
def faulty_machine(settings: str, faults: Path) -> Iterator[FaultyMachine]:
    """Yield a new sandbox with these settings. The sandbox's servers look for marker files of faults in their stores
    and in the directory `faults`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(FAULTY_MACHINE), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("RAYMQ_TEST_FAULTS", str(faults))
        with sandbox(settings) as box:
            patch.setenv("RAYMQ_TEST_STORES", str(box.data))
            yield FaultyMachine(box, faults)


def why_out(broker: str, replica: int, *, patient: bool = False) -> str:
    """Return the reason why a replica does not work, as the replica reports it; empty if the replica works.

    With `patient`, the result is also empty if the replica does not answer.
    """
    try:
        status = ActorRef(str(StorageName(broker, replica))).call("status")
    except StoreError as error:
        return str(error)
    except RaymqError as error:
        return "" if patient else f"no answer: {error}"
    return str(status["disk_failure"])
