"""Tests of sending log records to topics, in a whole cluster: the examples of docs/logs.md, and a process that ends
without closing its log handler."""

from __future__ import annotations

import raymq
from tests.support.clusters.page_example import assert_prints_what_it_says, run_program
from tests.support.history.waiting import eventually

PROGRAM = """
import logging

import raymq

handler = raymq.RaymqHandler(TOPIC)
logging.getLogger().addHandler(handler)
for number in range(300):
    logging.getLogger("worker").error("%d", number)
print(handler.statistics().dropped)
"""


def test_the_page_is_true(mq: raymq.Client) -> None:
    assert_prints_what_it_says("logs.md")


def test_a_process_sends_its_log_records_before_it_ends(mq: raymq.Client, topic: str) -> None:
    assert run_program(PROGRAM.replace("TOPIC", repr(topic))) == "0\n"

    def found() -> list[raymq.MessageExt]:
        messages = list(mq.admin.browse(topic, limit=1000).messages)
        return messages if len(messages) >= 300 else []

    messages = eventually(found, "all records are in the topic")
    assert sorted(int(message.body) for message in messages) == list(range(300))
    assert {message.tags for message in messages} == {"ERROR"}
