"""Tests of `raymq dlq replay`: the calls that the command makes to a fake Admin, and its output."""

from __future__ import annotations

import json
from typing import Any

import pytest

from raymq.client.admin.dead_letters import DeadLetter, Replayed
from raymq.common.message import MessageExt


class Admin:
    """Fake Admin that records its calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.kept: list[DeadLetter] = []
        self.failing: set[str] = set()

    def dead_letters(self, group: str) -> Admin:
        return self

    def letters(self, **how: Any) -> list[DeadLetter]:
        return self.kept

    def replay(self, **how: Any) -> Any:
        self.asked.append(("replay", how))
        for letter in self.kept:
            failed = letter.message.message_id in self.failing
            yield Replayed(letter, "the store is full" if failed else "")
            if failed:
                return


@pytest.fixture
def admin() -> Admin:
    return Admin()


def letter(message_id: str, reason: str = "") -> DeadLetter:
    message = MessageExt(
        topic="%DLQ%billing",
        body=b"{}",
        broker_name="broker-a",
        queue_id=0,
        queue_offset=1,
        physical_offset=100,
        message_id=message_id,
        offset_message_id="0" * 32,
        born_timestamp_ms=0,
        store_timestamp_ms=0,
        born_host=("127.0.0.1", 1),
        store_host=("127.0.0.1", 2),
        reconsume_times=17,
        sys_flag=0,
        tags=None,
        keys=(),
        properties={},
        flag=0,
        system_properties={"RETRY_TOPIC": "orders", "DLQ_ORIGIN_ERROR": reason},
    )
    return DeadLetter(message, "orders", False)


def test_a_listed_letter_shows_the_reason_of_its_last_failure(run: Any, admin: Admin) -> None:
    admin.kept = [letter("A", "ValueError: broken.png is not a picture")]
    [row] = json.loads(run("dlq", "list", "billing", "--json").output)["dead_letters"]
    assert row["reason"] == "ValueError: broken.png is not a picture"


def test_dead_letters_are_replayed_at_a_rate_with_a_line_each(run: Any, admin: Admin) -> None:
    admin.kept = [letter("A"), letter("B")]
    lines = run("dlq", "replay", "billing", "--rate", "50/s").output.splitlines()
    assert admin.asked == [("replay", {"rate": 50.0, "max_messages": None, "letters": None})]
    assert lines == ["replayed  orders  A", "replayed  orders  B", "2 replayed, 0 failed"]


def test_a_letter_that_cannot_be_replayed_ends_it_with_exit_code_1(run: Any, admin: Admin) -> None:
    admin.kept, admin.failing = [letter("A"), letter("B"), letter("C")], {"B"}
    lines = [json.loads(line) for line in run("dlq", "replay", "billing", "--json", code=1).output.splitlines()]
    assert [line.get("state") for line in lines] == ["replayed", "failed", None]
    assert lines[1]["error"] == "the store is full"
    assert lines[2] == {"replayed": 1, "failed": 1}


def test_chosen_letters_are_replayed_by_their_places(run: Any, admin: Admin) -> None:
    run("dlq", "replay", "billing", "--letter", "broker-a:0:17", "--letter", "broker-b:0:3")
    [(_, how)] = admin.asked
    assert how["letters"] == (("broker-a", 0, 17), ("broker-b", 0, 3))
    run("dlq", "replay", "billing", "--letter", "broker-a:17", code=2)


def test_a_bad_rate_is_wrong_usage(run: Any) -> None:
    run("dlq", "replay", "billing", "--rate", "fast", code=2)
