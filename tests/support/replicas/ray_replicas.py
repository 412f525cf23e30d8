"""One broker group of several replicas under test. Helpers find and kill its processes, wait for a master, and compare
its logs."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from raymq.common.errors import RaymqError
from raymq.common.names import CONTROLLER, StorageName
from raymq.remoting.actor_ref import ActorRef
from tests.support.history.waiting import eventually

CALL_TIMEOUT_S = 5.0
HEAL_TIMEOUT_S = 90.0


class RayReplicas:
    """A replicated broker group as the Controller reports it. Each method queries the Controller again."""

    def __init__(self, broker_name: str, replicas: int) -> None:
        self._broker_name = broker_name
        self._replicas = replicas

    def expect(self, replicas: int) -> None:
        """Change the number of replicas that must be in sync before the group counts as settled."""
        self._replicas = replicas

    def account(self) -> dict[str, Any]:
        """Return the Controller's status of the group. If the Controller does not answer, the returned status has no
        master, and its `reason` is the text of the error."""
        try:
            report = ActorRef(CONTROLLER).call("status", timeout_s=CALL_TIMEOUT_S)
        except RaymqError as error:
            return {"master": None, "epoch": 0, "in_sync": [], "reason": str(error), "replicas": []}
        [group] = [group for group in report["groups"] if group["broker"] == self._broker_name]
        return dict(group)

    def settled(self) -> dict[str, Any]:
        """Wait until a master leads and every replica is in sync with the master. Returns the Controller's status of
        the group at that time."""
        account: dict[str, Any] = {}

        def whole() -> bool:
            nonlocal account
            account = self.account()
            led = account["master"] is not None and not account["reason"]
            return led and len(account["in_sync"]) == self._replicas

        try:
            eventually(whole, "the group with all replicas in sync", HEAL_TIMEOUT_S)
        except AssertionError as error:
            raise AssertionError(f"{error}: {account}") from None
        return account

    def led(self) -> dict[str, Any]:
        """Wait until a master leads, even if replicas are not in sync. Returns the Controller's status of the group at
        that time."""

        def account() -> dict[str, Any] | None:
            now = self.account()
            return now if now["master"] is not None and not now["reason"] else None

        return eventually(account, "a master", HEAL_TIMEOUT_S) or {}

    def equal_end(self) -> int:
        """Wait until all replicas' logs end at the same offset, and consumers can read all messages before this offset.
        Returns the offset."""

        def end() -> int:
            replicas = self.settled()["replicas"]
            ends = {one.get(key, -1) for one in replicas for key in ("end_offset", "confirm_offset")}
            return ends.pop() if len(ends) == 1 else -1

        return eventually(lambda: max(end(), 0), "one end of all logs", HEAL_TIMEOUT_S)

    def wait_for_no_holes(self) -> None:
        """Wait until the replicas have repaired each other's logs: no log has a damaged range (hole) any more."""
        actors = [ActorRef(str(StorageName(self._broker_name, replica))) for replica in range(self._replicas)]

        found: list[object] = []

        def whole() -> bool:
            nonlocal found
            try:
                found = [hole for actor in actors for hole in actor.call("log_holes", timeout_s=CALL_TIMEOUT_S)]
            except RaymqError as error:
                found = [error]
            return not found

        try:
            eventually(whole, "logs without holes", HEAL_TIMEOUT_S)
        except AssertionError as error:
            raise AssertionError(f"{error}: {found}") from None

    def pid(self, replica: int) -> int:
        """Return the process id of a replica's storage actor. Waits until the actor answers."""
        actor = ActorRef(str(StorageName(self._broker_name, replica)))

        def asked() -> int:
            try:
                return int(actor.call("describe", timeout_s=CALL_TIMEOUT_S).pid)
            except RaymqError:
                return 0

        return eventually(asked, f"a process of replica {replica}")

    def kill(self, replica: int) -> None:
        """SIGKILL a replica's storage process. Ray then starts a new process."""
        os.kill(self.pid(replica), signal.SIGKILL)

    def fail_over(self) -> None:
        """Wait until all replicas are in sync, kill the master, and wait until a master leads in a later epoch."""
        before = self.settled()
        self.kill(before["master"])
        self.led_after(before["epoch"])

    def lead(self, replica: int) -> None:
        """Make a replica the master, and wait until it leads. Sends the request repeatedly, because the Controller
        drops a request after some time."""

        def leads() -> bool:
            account = self.account()
            if account["master"] == replica and not account["reason"]:
                return True
            try:
                ActorRef(CONTROLLER).call("designate", self._broker_name, replica, timeout_s=CALL_TIMEOUT_S)
            except RaymqError:
                pass  # the Controller does not answer at the moment
            return False

        eventually(leads, f"replica {replica} leads", HEAL_TIMEOUT_S)

    def led_after(self, epoch: int) -> None:
        """Wait until a master leads in an epoch after `epoch`."""

        def led_anew() -> bool:
            now = self.account()
            return now["epoch"] > epoch and now["master"] is not None and not now["reason"]

        eventually(led_anew, "a new epoch", HEAL_TIMEOUT_S)


def log_checksum(store: Path, end_offset: int) -> int:
    """Return the CRC-32 of a store's log up to `end_offset`, computed from the log files."""
    crc, left = 0, end_offset
    for path in _log_files(store):
        data = path.read_bytes()[:left]
        crc, left = crc32(data, crc), left - len(data)
    assert left == 0, f"the log in {store} has {left} bytes less than {end_offset}"
    return crc


def _log_files(store: Path) -> Sequence[Path]:
    return sorted((store / "commitlog").iterdir())
