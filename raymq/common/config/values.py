"""Values of settings that every program needs: sizes and names of a store's files, and the type of a setting.

The models of the settings take an eighth of a second of processor time to make. This module needs none of them, so that
clients and commands can import it without the models.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import Final

CONSUME_QUEUE_UNIT_BYTES: Final = 20
"""Size of a consume queue's unit (entry), in bytes: UNIT_DTYPE of raymq.records.format.layout."""
BATCH_UNIT_BYTES: Final = 46
"""Size of a batch consume queue's unit (entry), in bytes: BATCH_UNIT_DTYPE of raymq.records.format.layout."""
MAX_FILTER_MESSAGE_SIZE_BYTES: Final = CONSUME_QUEUE_UNIT_BYTES << 18
"""Default of `max_filter_message_size_bytes`: the size of 262,144 consume-queue units."""
CONSUME_QUEUE_EXT_FILE_BYTES: Final = 48 << 20
COMMIT_LOG_DIR: Final = "commitlog"

SettingValue = str | int | float | bool | None
"""The type of a setting's value, as in YAML and JSON."""


def is_loopback(host: str) -> bool:
    """Return True if only programs on the own machine can connect to the address `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
