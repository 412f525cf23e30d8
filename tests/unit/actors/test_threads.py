"""Tests of the threads in a server's process."""

from __future__ import annotations

import sys

from actors.threads import SWITCH_INTERVAL_S, take_turns_quickly


def test_threads_take_turns_quickly() -> None:
    before = sys.getswitchinterval()
    try:
        take_turns_quickly()
        assert abs(sys.getswitchinterval() - SWITCH_INTERVAL_S) < 1e-9
    finally:
        sys.setswitchinterval(before)
