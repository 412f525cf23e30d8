"""Verification of the stores: the progress and the result of every replica, and a verification by command.

Each storage actor verifies its own files (storage/scrub). These calls start a verification and read its state, so they
are short, safe to repeat, and survive a restart of a storage actor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from raymq.client.admin.base import ADMIN_TIMEOUT_S, AdminBase, unknown_broker
from raymq.common.errors import RequestTimeoutError, ServiceNotAvailableError
from raymq.common.parallel import map_parallel
from raymq.common.protocol.store import StoreVerification
from raymq.common.retry import persist_until

VERIFY_POLL_S: Final = 0.5
"""Interval in s at which a verification by command reads the progress of the stores."""
REPAIR_WAIT_S: Final = 30.0
"""How long a verification by command waits for other replicas to repair the damage that it found. Replicas look for
damage every 5 s."""
STORES_AT_ONCE: Final = 16

OnProgress = Callable[[int, int], None]
"""Function that is called with the number of checked bytes and the total number of bytes, over all stores."""


class VerifyAdmin(AdminBase):
    """Administration calls that verify stores. Repeating a call is safe."""

    def verification(self, broker_name: str | None = None) -> dict[str, StoreVerification]:
        """Return the progress and the result of the verification of each store, by storage actor: all replicas of all
        broker groups, or of the group `broker_name`.

        A store that does not answer within 20 s has its `error` set. Raises InvalidArgumentError if the broker group is
        unknown.
        """
        return self._of_stores(self._replicas(broker_name), lambda name: self._call_store(name, "verification"))

    def verify_stores(
        self,
        broker_name: str | None = None,
        *,
        timeout_s: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> dict[str, StoreVerification]:
        """Verify all files of each store now, at full speed, and wait for the result. Returns the result of each store,
        by storage actor.

        Waits up to 30 s longer if other replicas may repair the damage that was found. `timeout_s`: maximum time for
        everything; None for no limit. After this time, the verification continues in the stores, and the result has
        `scrub.running`. Raises InvalidArgumentError if the broker group is unknown. A store that does not answer has
        its `error` set, and may still verify its files.
        """
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        groups = self._replicas(broker_name)
        numbers: dict[str, int] = {}
        found: dict[str, StoreVerification] = {}

        def look(name: str) -> StoreVerification:
            known = found.get(name)
            if known is not None and (known.error or known.is_complete(numbers[name])):
                return known
            if name not in numbers:
                numbers[name] = self._call_store(name, "verify")
            now: StoreVerification = self._call_store(name, "verification")
            if not now.scrub.full_speed and not now.is_complete(numbers[name]):
                # The storage actor was restarted, and continues in the background. Begin again at full speed.
                numbers[name] = self._call_store(name, "verify")
            return now

        while True:
            found = self._of_stores(groups, look)
            if on_progress is not None:
                on_progress(*_bytes_of(found))
            waits = any(not one.error and not one.is_complete(numbers[name]) for name, one in found.items())
            if not waits or (until_s is not None and time.monotonic() >= until_s):
                break
            time.sleep(VERIFY_POLL_S)
        return self._after_repairs(groups, found, until_s)

    def _after_repairs(
        self,
        groups: Mapping[str, str],
        found: dict[str, StoreVerification],
        until_s: float | None,
    ) -> dict[str, StoreVerification]:
        """Wait until other replicas have repaired the damaged ranges of the logs, for at most REPAIR_WAIT_S. `groups`:
        the broker group of each storage actor."""
        end_s = time.monotonic() + REPAIR_WAIT_S
        if until_s is not None:
            end_s = min(end_s, until_s)
        while True:
            damaged = {
                name: groups[name]
                for name, one in found.items()
                if one.holes and sum(group == groups[name] for group in groups.values()) > 1
            }
            if not damaged or time.monotonic() >= end_s:
                return found
            time.sleep(VERIFY_POLL_S)
            found |= self._of_stores(damaged, lambda name: self._call_store(name, "verification"))

    def _replicas(self, broker_name: str | None) -> dict[str, str]:
        """Return the storage actors of the broker groups, each with its group, sorted by name."""
        brokers = persist_until(time.monotonic() + ADMIN_TIMEOUT_S, lambda left_s: self._routes.brokers())
        if broker_name is not None and broker_name not in brokers:
            raise unknown_broker(broker_name, brokers)
        return {
            storage: name
            for name, data in sorted(brokers.items())
            if broker_name in (None, name)
            for storage in sorted(data.storages.values())
        }

    def _of_stores(
        self, groups: Mapping[str, str], ask: Callable[[str], StoreVerification]
    ) -> dict[str, StoreVerification]:
        def answer(name: str) -> StoreVerification:
            try:
                return replace(ask(name), broker=groups[name])
            except (ServiceNotAvailableError, RequestTimeoutError) as error:
                return StoreVerification(broker=groups[name], error=str(error))

        found = map_parallel(answer, list(groups), threads_max=STORES_AT_ONCE, name="verify")
        return dict(zip(groups, found, strict=True))

    def _call_store(self, name: str, method: str) -> Any:
        storage = self._storages.get(name)
        return persist_until(
            time.monotonic() + ADMIN_TIMEOUT_S, lambda left_s: storage.control(method, timeout_s=left_s)
        )


def _bytes_of(found: Mapping[str, StoreVerification]) -> tuple[int, int]:
    """Return the number of checked bytes and of all bytes, over the stores that answer."""
    scrubs = [one.scrub for one in found.values() if not one.error]
    return sum(one.checked_bytes for one in scrubs), sum(one.total_bytes for one in scrubs)
