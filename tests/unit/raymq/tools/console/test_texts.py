"""Tests of formatting numbers, sizes and times for the console's pages."""

from __future__ import annotations

import pytest

from raymq.tools.console.web import texts

THIN = "\u202f"


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (texts.number(None), "–"),
        (texts.number(0), "0"),
        (texts.number(1_234_567), f"1{THIN}234{THIN}567"),
        (texts.number(2**63 - 1), f"9{THIN}223{THIN}372{THIN}036{THIN}854{THIN}775{THIN}807"),
        (texts.rate(0.0), "0"),
        (texts.rate(0.25), "0.2"),
        (texts.rate(812.4), "812"),
        (texts.last_line(""), ""),
        (texts.last_line("Traceback:\n  File 1\nValueError: out of stock\n\n"), "ValueError: out of stock"),
        (texts.size(0), "0 B"),
        (texts.size(1023), "1023 B"),
        (texts.size(1536), "1.5 KiB"),
        (texts.size(5 << 60), "5120.0 PiB"),
        (texts.duration(0), "0 s"),
        (texts.duration(-1), "0 s"),
        (texts.duration(0.25), "250 ms"),
        (texts.duration(59), "59 s"),
        (texts.duration(60), "1 min"),
        (texts.duration(3_600 * 3 + 125), "3 h 2 min"),
        (texts.duration(86_400 * 2 + 3_600), "2 d 1 h"),
        (texts.duration_ms(95_000), "1 min 35 s"),
        (texts.duration_ms(None), "–"),
        (texts.time_of(1_795_400_000_000), "2026-11-23 02:13:20"),
        (texts.time_of(None), "–"),
        (texts.time_of(2**63 - 1), "9223372036854775807 ms"),
        (texts.iso_time(1_795_400_000_123), "2026-11-23T02:13:20.123Z"),
        (texts.iso_time(2**63 - 1), ""),
        (texts.percent(0.414), "41 %"),
        (texts.segment("a%b|c/d?e"), "a%25b%7Cc%2Fd%3Fe"),
        (texts.plural(1, "queue"), "1 queue"),
        (texts.plural(2, "queue"), "2 queues"),
        (texts.sentence("no broker is registered"), "No broker is registered."),
        (texts.sentence(""), ""),
    ],
)
def test_a_value_is_shown(shown: str, wanted: str):
    assert shown == wanted
