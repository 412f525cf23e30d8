"""Sets the switch interval of Python's threads, once for each server process."""

from __future__ import annotations

import sys
from typing import Final

SWITCH_INTERVAL_S: Final = 1e-4


def take_turns_quickly() -> None:
    """Set the thread switch interval to 0.1 ms: a waiting thread runs after this time even if another thread computes.

    With Python's default of 5 ms, each message would be delayed by 5 ms while the index or a recovery runs. Only for
    server processes: raymq must not change this setting in a user's process. The throughput does not decrease.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
