"""A machine whose disks and clocks tests break. Its servers' import path begins with tests/support/faulty_machine."""

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
"""The faults of a disk: EIO of fdatasync, of pwrite and of reads, and SIGBUS of a map with EIO of reads."""


@dataclass(frozen=True, slots=True)
class FaultyMachine:
    """A sandbox whose servers have faults. `faults`: the directory of the markers for clock faults."""

    box: Sandbox
    faults: Path

    def marker(self, broker: str, replica: int, fault: str) -> Path:
        """Return the path of the file that breaks a replica's disk while the file exists."""
        return self.box.data / f"{broker}-{replica}" / fault


@contextmanager
def faulty_machine(settings: str, faults: Path) -> Iterator[FaultyMachine]:
    """Yield a new sandbox with these settings, whose servers look for faults in its stores and in the directory
    `faults`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(FAULTY_MACHINE), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("RAYMQ_TEST_FAULTS", str(faults))
        with sandbox(settings) as box:
            patch.setenv("RAYMQ_TEST_STORES", str(box.data))
            yield FaultyMachine(box, faults)


def why_out(broker: str, replica: int, *, patient: bool = False) -> str:
    """Return why a replica does not work, by its own account; empty if it works.

    With `patient`, the result is also empty if the replica does not answer.
    """
    try:
        status = ActorRef(str(StorageName(broker, replica))).call("status")
    except StoreError as error:
        return str(error)
    except RaymqError as error:
        return "" if patient else f"no answer: {error}"
    return str(status["disk_failure"])
