"""Tests that unreadable messages are counted, and logged at a limited rate."""

from __future__ import annotations

import pytest

from raymq.client.consumer.unreadable import LOG_PAUSE_S, UnreadableLog
from raymq.common.errors import BodyUnreadableError
from raymq.telemetry.metrics.client_figures import CLIENT_FIGURES


def test_each_message_is_counted_and_one_in_a_while_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    totals: dict[tuple[str, str], int] = {}
    monkeypatch.setattr(CLIENT_FIGURES, "_unreadable", totals)
    now_s = 100.0
    log = UnreadableLog("billing", clock=lambda: now_s)
    for offset in range(5):
        log.note(BodyUnreadableError("orders@a:0", offset, -1, "its body's CRC is wrong"))
    now_s += LOG_PAUSE_S
    log.note(BodyUnreadableError("orders@a:0", 9, -1, "its body's CRC is wrong"))
    assert log.count == 6
    assert totals == {("orders", "billing"): 6}
    first, second = caplog.messages
    assert "group billing" in first
    assert "offset 0 of queue orders@a:0" in first
    assert "and skipped 4 before it" in second
    assert "offset 9 of queue orders@a:0" in second
