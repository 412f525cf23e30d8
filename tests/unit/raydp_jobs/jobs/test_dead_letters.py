"""Tests of the job that counts dead letters by reason, topic and time."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from matplotlib.figure import Figure

from raydp_jobs.jobs import dead_letters as job
from raydp_jobs.jobs.dead_letters import CAUSES_MAX, DRAWN_CAUSES, OTHERS, count, draw, reason_of, run, series_of
from raydp_jobs.jobs.pictures import PICTURE_SIZE_PX
from raydp_jobs.jobs.times import Period
from raymq.client.admin.dead_letters import DeadLetter
from raymq.common.errors import GroupNotExistError
from raymq.common.message import MessageExt
from raymq.common.protocol.group import GroupConfig
from raymq.tools.cli.terminal.output import out

HOUR_MS = 3_600_000
START_MS = 1_772_323_200_000


def letter(
    number: int, *, topic: str = "orders", error: str = "", attempts: int = 17, replayed: bool = False
) -> DeadLetter:
    """Return dead letter `number`. It became a dead letter `number` half hours after the start of 2026-03-01."""
    message = MessageExt(
        topic="%DLQ%billing",
        body=b"{}",
        broker_name="broker-a",
        queue_id=0,
        queue_offset=number,
        physical_offset=100,
        message_id=f"{number:032X}",
        offset_message_id="0" * 32,
        born_timestamp_ms=0,
        store_timestamp_ms=START_MS + number * HOUR_MS // 2,
        born_host=("127.0.0.1", 1),
        store_host=("127.0.0.1", 2),
        reconsume_times=attempts,
        sys_flag=0,
        tags=None,
        keys=(),
        properties={"error": error} if error else {},
        flag=0,
        system_properties={"RETRY_TOPIC": topic},
    )
    return DeadLetter(message, topic, replayed)


LETTERS = [
    letter(0, error="no such customer\nTraceback …"),
    letter(1, replayed=True),
    letter(2, error="no such customer"),
    letter(5, topic="bills", attempts=1),
]


@pytest.mark.parametrize(
    ("one", "retries", "reason"),
    [
        (letter(0, error="no such customer\nTraceback …"), 16, "no such customer"),
        (letter(0, error="x" * 200), 16, "x" * 99 + "…"),
        (letter(0), 16, "failed in all its 17 attempts"),
        (letter(0, attempts=1), 16, "given up after 1 attempt"),
        (letter(0, attempts=1), 0, "failed in all its 1 attempt"),
        (letter(0, attempts=3), None, "dead after 3 attempts"),
    ],
)
def test_a_reason_comes_from_the_message_or_from_its_attempts(
    one: DeadLetter, retries: int | None, reason: str
) -> None:
    assert reason_of(one, retries) == reason


def test_letters_are_counted_by_cause_and_by_hour() -> None:
    deaths = count("billing", LETTERS, 16)
    customer, all_failed, given_up = (
        ("orders", "no such customer"),
        ("orders", "failed in all its 17 attempts"),
        ("bills", "given up after 1 attempt"),
    )
    assert (deaths.letters, deaths.waiting) == (4, 3)
    assert deaths.causes == {customer: 2, all_failed: 1, given_up: 1}
    hour = START_MS // 1000
    assert deaths.over_time == {
        hour: {customer: 1, all_failed: 1},
        hour + 3600: {customer: 1},
        hour + 7200: {given_up: 1},
    }
    assert deaths.examples[customer] == f"{2:032X}"
    assert (deaths.first_ms, deaths.last_ms) == (START_MS, START_MS + 5 * HOUR_MS // 2)


def test_the_period_and_the_reason_property_are_applied() -> None:
    deaths = count("billing", LETTERS, 16, "cause", 3600, Period(START_MS + HOUR_MS))
    assert (deaths.letters, sum(deaths.causes.values())) == (2, 2)
    assert ("orders", "failed in all its 17 attempts") in deaths.causes


def test_texts_without_end_are_counted_together() -> None:
    deaths = count("billing", [letter(n, error=f"request {n}") for n in range(CAUSES_MAX + 50)], 16)
    assert len(deaths.causes) == CAUSES_MAX + 1
    assert deaths.causes["orders", OTHERS] == 50


def test_progress_counts_every_dead_letter() -> None:
    told: list[int] = []
    count("billing", [LETTERS[0]] * 2500, 16, on_read=told.append)
    assert told == [1000, 1000, 500]


class Admin:
    """Fake Admin with the dead letters of some groups."""

    letters: dict[str, list[DeadLetter]]

    def __init__(self, **letters: list[DeadLetter]) -> None:
        self.letters = letters

    def list_topics(self, *, internal: bool) -> list[str]:
        return ["orders", "%RETRY%shipping", *(f"%DLQ%{group}" for group in self.letters)] if internal else []

    def group_config(self, group: str) -> GroupConfig:
        if group == "forgotten":
            raise GroupNotExistError(group)
        return GroupConfig(group)

    def dead_letters(self, group: str) -> Any:
        def each(*, replayed: bool) -> Iterator[DeadLetter]:
            assert replayed
            if group == "unknown":
                raise GroupNotExistError(group)
            yield from self.letters.get(group, ())

        return SimpleNamespace(each=each)


def client(**letters: list[DeadLetter]) -> Any:
    return SimpleNamespace(admin=Admin(**letters))


def test_without_a_name_all_groups_that_have_letters_are_read() -> None:
    found = run(client(shipping=[letter(0)], forgotten=[letter(1)]))
    assert [(one.group, one.letters) for one in found] == [("forgotten", 1), ("shipping", 1)]
    assert list(found[0].causes) == [("orders", "dead after 17 attempts")]
    assert run(client()) == []


def test_a_named_group_without_letters_is_counted_as_0_and_an_unknown_group_is_an_error() -> None:
    found = run(client(billing=LETTERS), ["billing", "shipping"])
    assert [(one.group, one.letters) for one in found] == [("billing", len(LETTERS)), ("shipping", 0)]
    with pytest.raises(GroupNotExistError, match="consumer group 'unknown' does not exist"):
        run(client(billing=LETTERS), ["billing", "unknown"])


def test_a_group_that_is_deleted_while_all_groups_are_read_is_left_out() -> None:
    assert [one.group for one in run(client(billing=LETTERS, unknown=[]))] == ["billing"]


def test_the_picture_has_a_panel_for_each_group_and_a_bar_for_each_cause_and_hour() -> None:
    found = run(client(billing=LETTERS, shipping=[letter(0)]))
    figure = Figure()
    draw(figure, found, 3600)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["billing", "shipping"]
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    assert sorted(heights, reverse=True) == [1, 1, 1, 1, 0, 0, 0, 0, 0]
    draw(Figure(), [], 3600)


def test_rare_causes_are_drawn_together() -> None:
    deaths = count("billing", [letter(0, error=f"e{n}") for n in range(DRAWN_CAUSES + 3)], 16)
    series = series_of(deaths)
    assert len(series) == DRAWN_CAUSES + 1
    assert series[OTHERS] == [3.0]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Any:
    @contextmanager
    def connected(address: str | None) -> Iterator[Any]:
        yield client(billing=LETTERS)

    monkeypatch.setattr(job, "client_of", connected)
    return lambda *arguments: CliRunner().invoke(job.command, list(arguments), catch_exceptions=False)


def test_the_command_prints_tables(invoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out, "_width", 200)
    text = invoke("billing").output
    assert "no such customer" in text
    assert "2026-03-01T02:00:00.000+00:00" in text


def test_the_command_prints_json_and_draws(invoke: Any, tmp_path: Path) -> None:
    path = tmp_path / "billing.png"
    value = json.loads(invoke("--json", "--every", "1d", "--picture", str(path)).output)
    [group] = value["groups"]
    assert (group["group"], group["dead_letters"], group["waiting"]) == ("billing", 4, 3)
    assert group["causes"][0] == {
        "topic": "orders",
        "reason": "no such customer",
        "dead_letters": 2,
        "newest": f"{2:032X}",
    }
    assert [one["dead_letters"] for one in group["over_time"]] == [4]
    assert value["picture"] == str(path)
    assert struct.unpack(">II", path.read_bytes()[16:24]) == PICTURE_SIZE_PX
