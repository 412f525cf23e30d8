"""Damage of the stores' logs for an operator: what is damaged, what was repaired, what is lost, and the damaged bytes.

The stores repair damage themselves, from other replicas. These calls change nothing, and are safe to repeat.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from raymq.client.admin.base import ADMIN_TIMEOUT_S, AdminBase, unknown_broker
from raymq.common.errors import InvalidArgumentError, RequestTimeoutError, ServiceNotAvailableError
from raymq.common.parallel import map_parallel
from raymq.common.protocol.store import DamagedRange, StoreDamage
from raymq.common.retry import persist_until

DAMAGE_THREADS: Final = 16
EXPORT_PART_BYTES: Final = 4 << 20
"""Number of damaged bytes that one call reads."""
LIST_FILE: Final = "damage.json"
"""Name of the file that lists the exported ranges of a directory."""


class DamageAdmin(AdminBase):
    """Administration calls about damaged logs. Repeating a call is safe."""

    def damage(self, broker_name: str | None = None) -> dict[str, StoreDamage]:
        """Return the damage of each store's log, by storage actor: all replicas of all broker groups, or of the group
        `broker_name`.

        A range that is not `lost` may still be repaired from another replica. A store that does not answer within 20 s
        has its `error` set. Raises InvalidArgumentError if the broker group is unknown.
        """
        brokers = persist_until(time.monotonic() + ADMIN_TIMEOUT_S, lambda left_s: self._routes.brokers())
        if broker_name is not None and broker_name not in brokers:
            raise unknown_broker(broker_name, brokers)
        groups = {
            storage: name
            for name, data in sorted(brokers.items())
            if broker_name in (None, name)
            for _, storage in sorted(data.storages.items())
        }

        def ask(name: str) -> StoreDamage:
            try:
                damage: StoreDamage = self._ask_store(name, "damage")
                return replace(damage, broker=groups[name])
            except (ServiceNotAvailableError, RequestTimeoutError) as error:
                return StoreDamage(broker=groups[name], error=str(error))

        found = map_parallel(ask, list(groups), threads_max=DAMAGE_THREADS, name="damage")
        return dict(zip(groups, found, strict=True))

    def export_damage(self, directory: str, damage: Mapping[str, StoreDamage]) -> list[str]:
        """Write the damaged bytes of each range of `damage` to a file of its own below `directory`, and a list of the
        ranges to `damage.json`. Returns the paths of the ranges' files.

        The directory is created if it is missing. A file is named after its storage actor and physical offset. A range
        that was repaired since `damage` was read is left out. Raises FileExistsError, and writes nothing, if the
        directory has a list already. Raises OSError if a file cannot be written, and RaymqError if a store does not
        answer; files written before stay.
        """
        target = Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        listed: list[dict[str, Any]] = []
        paths = []
        with (target / LIST_FILE).open("x") as file:
            for name, store in damage.items():
                for one in store.ranges:
                    data = self._bytes_of(name, one)
                    if data is None:
                        continue
                    path = target / f"{name}-{one.offset:020}.bytes"
                    path.write_bytes(data)
                    paths.append(str(path))
                    listed.append({"store": name, "file": path.name, **asdict(one)})
            json.dump(listed, file, indent=1)
        return paths

    def _bytes_of(self, name: str, one: DamagedRange) -> bytes | None:
        """Return the bytes of a damaged range; None if a part of it was repaired."""
        data = bytearray()
        while len(data) < one.size:
            part = min(EXPORT_PART_BYTES, one.size - len(data))
            try:
                data += self._ask_store(name, "damaged_bytes", one.offset + len(data), part)
            except InvalidArgumentError:  # another replica's bytes have replaced the damage
                return None
        return bytes(data)

    def _ask_store(self, name: str, method: str, *arguments: Any) -> Any:
        storage = self._storages.get(name)
        return persist_until(
            time.monotonic() + ADMIN_TIMEOUT_S,
            lambda left_s: storage.control(method, *arguments, timeout_s=left_s),
        )
