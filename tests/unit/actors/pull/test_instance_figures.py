"""Tests of the metrics of a push-consumer instance: received messages, messages in memory, and queues with messages
that are not fetched yet."""

from __future__ import annotations

import pytest

from actors.pull import running
from actors.pull.instance_state import InstanceState
from actors.pull.running import count_delivered, queue_states
from raymq.client.consumer.push.settings import PushSettings
from raymq.client.consumer.subscription import Subscription
from raymq.common.message import ConsumeFromWhere, MessageQueue
from raymq.common.protocol.group import QueueOffset, StartOffsetQuery
from raymq.telemetry.metrics.client_figures import DELIVERY_LATENCY
from tests.support.clients.records import RECORD_BYTES, records_of
from tests.support.metrics.counted import Counted

Q = MessageQueue("orders", "broker-a", 0)
FIRST = StartOffsetQuery(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)


@pytest.fixture
def state() -> InstanceState:
    settings = PushSettings("g", (Subscription.parse("orders"),), FIRST, pull_threshold_for_queue=3)
    state = InstanceState("pull-g-0", settings)
    state.core.hold([Q], 0.0)
    state.core.started(state.core.process_queues()[0], QueueOffset(10))
    return state


def test_a_queue_at_its_end_has_nothing_to_be_asked_about(state):
    state.core.saw_end(Q, 10)
    [found] = queue_states(state)
    assert (found.figures.inflight, found.figures.cached, found.ask) == (0, 0, False)


def test_pulled_messages_are_in_flight_until_they_are_committed(state):
    state.core.saw_end(Q, 12)
    state.core.fetched(Q, 10, records_of([10, 11]), 12, 1.0)
    [found] = queue_states(state)
    assert found.figures == ("orders", "g", 2, 0, 0, 2, 2 * RECORD_BYTES)
    assert not found.ask


def test_a_queue_that_is_held_back_may_have_more(state):
    state.core.saw_end(Q, 14)
    state.core.fetched(Q, 10, records_of([10, 11, 12, 13]), 14, 1.0)
    [found] = queue_states(state)
    assert found.ask
    assert (found.fetch_offset, found.visible_end) == (14, 14)


def test_records_are_counted_with_their_bytes(state, monkeypatch):
    counted = Counted()
    monkeypatch.setattr(running, "CLIENT_FIGURES", counted)
    count_delivered(state, Q, records_of([10, 11]))
    assert counted.values(DELIVERY_LATENCY) == {("orders", "g"): 2}
    assert counted.out_bytes() == {("orders", "g"): 2 * RECORD_BYTES}
