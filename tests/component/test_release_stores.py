"""Tests that this raymq opens the store of each release, and reads every kind of record in it.

The stores are in `tests/fixtures/raymq-VERSION/store`. `tests.fixtures.release_store` writes such a store. The
tests also read a store that this version writes, so the next release can keep it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actors.core.broker.state import BrokerState, replay
from raymq.client.transactions.checks import checked_message
from raymq.common.message import Message, MessageExt
from raymq.common.names import HALF_TOPIC, OP_HALF_TOPIC, SCHEDULE_TOPIC, STATE_TOPIC
from raymq.common.protocol.store import QueryResult
from raymq.common.protocol.transactions import EndTransactionRequest, LocalTransactionState
from raymq.records.format.decode import decode_records
from storage.message_store import MessageStore
from tests.fixtures.release_store import (
    DELIVERED_MS,
    HOUR_MS,
    WRITTEN_MS,
    batch_of,
    repeated_batch,
    write_release_store,
)
from tests.support.history.waiting import eventually
from tests.support.stores.clocks import Clock
from tests.support.stores.stores import bodies_of, open_store, read_queue
from tests.support.stores.transactions import GROUP

pytestmark = pytest.mark.usefixtures("no_flushes")

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
THIS_VERSION = "this version"
RELEASES = sorted(path.name for path in FIXTURES.iterdir() if re.fullmatch(r"raymq-\d+\.\d+\.\d+", path.name))

Open = Callable[[], MessageStore]


@pytest.fixture
def clock() -> Clock:
    clock = Clock()
    clock.now_ms = DELIVERED_MS
    return clock


@pytest.fixture(params=["raymq-0.2.0", THIS_VERSION])
def opened(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Open]:
    """Yield a function that opens a copy of a release's store. All stores are closed after the test."""
    root, stores = tmp_path / "store", []
    if request.param == THIS_VERSION:
        write_release_store(root)
    else:
        shutil.copytree(FIXTURES / request.param / "store", root)

    def open_one() -> MessageStore:
        stores.append(open_store(root, clock_ms=clock))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


def found(result: QueryResult) -> list[MessageExt]:
    assert (result.complete, result.damaged) == (True, ())
    return decode_records(result.records, broker_name="broker-a")


def test_every_release_with_a_store_is_read_here() -> None:
    assert RELEASES == ["raymq-0.2.0"]


def test_the_store_is_whole_and_opens_again_after_the_close(opened: Open) -> None:
    for _ in range(2):
        store = opened()
        assert store.mender.holes == ()
        assert len(bodies_of(store)) == 40
        store.close()


def test_messages_have_their_bodies_tags_keys_and_properties(opened: Open) -> None:
    messages = read_queue(opened())
    assert [message.body for message in messages] == [b"message %d" % number for number in range(40)]
    assert [message.keys for message in messages] == [(f"k{number}",) for number in range(40)]
    assert [message.message_id for message in messages] == [f"orders-0-{number}" for number in range(40)]
    assert {(message.tags, message.properties["colour"], message.store_timestamp_ms) for message in messages} == {
        ("paid", "red", WRITTEN_MS)
    }


def test_a_compressed_body_is_decompressed(opened: Open) -> None:
    assert bodies_of(opened(), "bills") == [b"x" * 3000]


def test_a_repeat_of_a_producer_is_recognised_and_a_new_message_is_stored(opened: Open) -> None:
    store = opened()
    bodies = [b"again %d" % number for number in range(10)]
    assert bodies_of(store, queue_id=1) == bodies
    store.append([repeated_batch()])
    assert bodies_of(store, queue_id=1) == bodies
    store.append([batch_of([Message("orders", b"new")], 1)])
    assert bodies_of(store, queue_id=1) == [*bodies, b"new"]


def test_the_index_finds_messages_by_key_and_by_id(opened: Open) -> None:
    store = opened()
    assert [message.body for message in found(store.queries.by_key("orders", "k17"))] == [b"message 17"]
    [message] = found(store.queries.by_unique_id("bills", "bills-0-0"))
    assert message.body == b"x" * 3000


def test_delayed_messages_are_delivered_once_at_their_times(opened: Open, clock: Clock) -> None:
    store = opened()
    assert [message.body for message in read_queue(store, SCHEDULE_TOPIC, 17)] == [b"after 2 h"]
    store.schedule.start_delivery()
    expected = [b"after 10 s"]
    assert bodies_of(store, queue_id=2) == expected
    for hours, body in ((2, b"after 2 h"), (72, b"after 72 h")):
        clock.now_ms = WRITTEN_MS + hours * HOUR_MS
        expected.append(body)
        eventually(lambda: store.queues.bounds("orders", 2).max_offset >= len(expected), f"the delivery {body!r}")
        assert bodies_of(store, queue_id=2) == expected


def test_transactions_have_their_outcomes_and_an_open_one_is_asked_about_and_ends(opened: Open, clock: Clock) -> None:
    store = opened()
    assert bodies_of(store, queue_id=3) == [b"committed"]
    assert bodies_of(store, HALF_TOPIC) == [b"committed", b"rolled back", b"open"]
    assert len(read_queue(store, OP_HALF_TOPIC)) >= 1
    clock.now_ms = WRITTEN_MS + HOUR_MS
    [check] = store.transactions.check([GROUP]).checks
    half = checked_message(check, "broker-a")
    assert half.body == b"open"
    store.transactions.end(
        EndTransactionRequest(
            producer_group=GROUP,
            queue_offset=check.queue_offset,
            physical_offset=check.physical_offset,
            commit_or_rollback=int(LocalTransactionState.COMMIT_MESSAGE),
            transaction_id=half.message_id,
        )
    )
    assert bodies_of(store, queue_id=3) == [b"committed", b"open"]


def test_the_records_of_a_brokers_state_give_its_topics_groups_offsets_and_settings(opened: Open) -> None:
    state = BrokerState()
    replay(state, ((record.body, record.store_timestamp_ms) for record in read_queue(opened(), STATE_TOPIC)))
    assert {name: config.read_queue_nums for name, config in state.topics.items() if not name.startswith("%")} == {
        "orders": 4,
        "bills": 4,
    }
    assert {name: config.retry_max_times for name, config in state.groups.items()} == {"billing": 5}
    assert [state.committed("billing", "orders", queue_id) for queue_id in (0, 1)] == [17, 4]
    assert state.offsets.version("billing", "orders", 1) == 1
    assert state.offsets.get("billing", "bills", 0) is None
    assert not state.may_read("billing", "bills")
    assert state.settings == {"store.delete_when": "05"}
