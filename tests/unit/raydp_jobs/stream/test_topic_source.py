"""Tests of TopicSource, the object that Spark calls to read a topic as a stream. The tests run without Spark, and cover
commits, pauses, fixed end offsets and deleted topics."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from raydp_jobs.stream.planner import BatchLimits
from raydp_jobs.stream.progress import StreamOffsets, WindowClosing
from raydp_jobs.stream.source import IDLE_POLL_INTERVAL_S, TopicSource
from raymq.common.errors import DataLossError, InvalidArgumentError, ServiceNotAvailableError
from raymq.common.message import MessageQueue
from tests.support.spark.fake_topics import FakeTopics

A0, B0, PAID = MessageQueue("orders", "a", 0), MessageQueue("orders", "b", 0), MessageQueue("payments", "a", 0)


class Query:
    """A streaming query as Spark runs it: each batch ends before Spark requests the next batch. `pauses`: durations of
    the source's sleeps, in seconds."""

    def __init__(
        self,
        topics: FakeTopics,
        *,
        query_id: str = "q",
        source: TopicSource | None = None,
        closes: bool = False,
        **limits: Any,
    ) -> None:
        self.now_s, self.pauses = 0.0, [0.0][:0]
        self.source = source or TopicSource(
            topics,
            BatchLimits(**limits),
            max_trigger_delay_s=60.0,
            closes=closes,
            clock=lambda: self.now_s,
            sleep=self._sleep,
        )
        self.id, self.position = query_id, None

    position: str | None

    def _sleep(self, seconds: float) -> None:
        if seconds:
            self.pauses.append(seconds)
            self.now_s += seconds

    def batch(self, *, unlimited: bool = False) -> dict[MessageQueue, range] | None:
        """Run the query's next batch and return its offsets per queue. Returns None if there are no new
        messages."""
        end = self.source.latest_offset(self.id, self.position, unlimited=unlimited)
        if end is None or end == self.position:
            return None
        parts, _, _ = self.source.batch(self.position, end)
        self.position = end
        return {one.queue: range(one.start_offset, one.end_offset) for part, _ in parts for one in part.ranges}


def test_a_batch_is_committed_when_spark_asks_for_the_next_one_and_only_once() -> None:
    topics = FakeTopics({A0: (0, 5)})
    query = Query(topics)
    assert query.batch() == {A0: range(5)}
    assert topics.committed == []
    assert [query.batch() for _ in range(3)] == [None] * 3
    assert topics.committed == [{A0: 5}]


def test_a_commit_that_failed_is_tried_again_and_delays_no_batch() -> None:
    topics = FakeTopics({A0: (0, 5)})
    query = Query(topics)
    query.batch()
    topics.commits_fail = True
    topics.append(A0, 1)
    assert query.batch() == {A0: range(5, 6)}
    topics.commits_fail = False
    assert query.batch() is None
    assert topics.committed == [{A0: 6}]


def test_an_idle_query_pauses_between_its_questions_to_the_cluster() -> None:
    topics = FakeTopics({A0: (0, 5)})
    query = Query(topics)
    for _ in range(4):
        query.batch()
    assert topics.asked == 4
    assert query.pauses == pytest.approx([IDLE_POLL_INTERVAL_S] * 3)


def test_a_batch_waits_for_enough_messages_but_not_for_ever() -> None:
    topics = FakeTopics({A0: (0, 5)})
    query = Query(topics, min_offsets=10)
    assert query.batch() == {A0: range(5)}  # the first batch fixes the query's start offsets
    topics.append(A0, 9)
    assert query.batch() is None
    topics.append(A0, 1)
    assert query.batch() == {A0: range(5, 15)}
    topics.append(A0, 1)
    assert query.batch() is None
    query.now_s += 60.0
    assert query.batch() == {A0: range(15, 16)}


def test_a_trigger_that_wants_everything_gets_it_in_one_batch() -> None:
    query = Query(FakeTopics({A0: (0, 50)}), max_offsets=10)
    assert query.batch(unlimited=True) == {A0: range(50)}


def test_a_fixed_end_holds_for_its_own_query_and_needs_every_broker_group() -> None:
    topics = FakeTopics({A0: (0, 5), B0: (0, 5)})
    query = Query(topics)
    other = Query(topics, query_id="other", source=query.source)
    query.source.prepare_available_now("q")
    topics.append(A0, 5)
    assert query.batch() == {A0: range(5), B0: range(5)}
    assert query.batch() is None
    assert other.batch() == {A0: range(10), B0: range(5)}
    topics.silent = {"b"}
    with pytest.raises(ServiceNotAvailableError):
        query.source.prepare_available_now("q")


def test_a_new_query_needs_every_broker_group_to_know_where_it_begins() -> None:
    topics = FakeTopics({A0: (0, 5), B0: (0, 5)})
    topics.silent = {"b"}
    query = Query(topics)
    with pytest.raises(ServiceNotAvailableError):
        query.batch()
    topics.silent.clear()
    assert query.batch() == {A0: range(5), B0: range(5)}


def test_a_topic_that_is_deleted_is_an_error_or_is_left_out() -> None:
    topics = FakeTopics({A0: (0, 5), PAID: (0, 5)})
    query, strict = Query(topics, fail_on_data_loss=False), Query(topics)
    query.batch(), strict.batch()
    del topics.held[PAID]
    topics.append(A0, 1)
    # topic `paid` is missing, but the cluster has not reported yet that it is deleted
    assert query.batch() == {A0: range(5, 6)}
    topics.gone = {PAID}
    topics.append(A0, 1)
    assert query.batch() == {A0: range(6, 7)}
    assert StreamOffsets.from_json(query.position or "").offsets == {A0: 7}
    with pytest.raises(DataLossError, match="topic payments was deleted"):
        strict.batch()


def made_anew(topics: FakeTopics, count: int) -> None:
    """Delete the topic `orders` in broker group a, then create the topic again with `count` messages."""
    topics.held[A0] = (0, count)
    topics.ids = {"orders": {"a": f"{topics.ids['orders']['a']}+", "b": "1"}}


@pytest.mark.parametrize("count", [3, 5, 206])
def test_a_recreated_topic_is_an_error_or_is_read_from_its_beginning(count: int) -> None:
    topics = FakeTopics({A0: (0, 5), B0: (0, 5)})
    topics.ids = {"orders": {"a": "1", "b": "1"}}
    query, strict = Query(topics, fail_on_data_loss=False), Query(topics)
    for one in (query, strict):
        assert one.batch() == {A0: range(5), B0: range(5)}
    made_anew(topics, count)
    topics.append(B0, 1)
    with pytest.raises(DataLossError, match="the topic was deleted and created again"):
        strict.batch()
    assert query.batch() == {A0: range(count), B0: range(5, 6)}
    assert query.batch() is None
    assert StreamOffsets.from_json(query.position or "").creations == {"orders": {"a": "1+", "b": "1"}}
    topics.append(A0, 1)
    assert query.batch() == {A0: range(count, count + 1)}


def test_a_planned_batch_is_not_read_from_a_recreated_topic() -> None:
    topics = FakeTopics({A0: (0, 5), B0: (0, 5)})
    topics.ids = {"orders": {"a": "1", "b": "1"}}
    query, strict = Query(topics, fail_on_data_loss=False), Query(topics)
    end = query.source.latest_offset("q", None, unlimited=False) or ""
    made_anew(topics, 206)
    with pytest.raises(DataLossError, match="topic orders was deleted and created again after this batch was planned"):
        strict.source.batch(None, end)
    parts, _, _ = query.source.batch(None, end)
    assert [one.queue for part, _ in parts for one in part.ranges] == [B0]
    query.position = end
    assert query.batch() == {A0: range(206)}


OF_AN_OLDER_VERSION = (
    '{"offsets":{"orders":{"a":{"0":5}}},"partitions":1,"starts":{"orders":{"a":{"0":0}}},"tags":"*","version":1}'
)


def test_a_checkpoint_of_an_older_version_continues_and_records_the_topic_id() -> None:
    assert StreamOffsets.from_json(OF_AN_OLDER_VERSION).to_json() == OF_AN_OLDER_VERSION
    topics = FakeTopics({A0: (0, 7)})
    topics.ids = {"orders": {"a": "1"}}
    query = Query(topics)
    query.position = OF_AN_OLDER_VERSION
    assert query.batch() == {A0: range(5, 7)}
    made_anew(topics, 206)
    with pytest.raises(DataLossError, match="created again"):
        query.batch()


def test_a_new_topic_id_means_a_recreated_topic_but_an_unknown_id_does_not() -> None:
    topics = FakeTopics({A0: (0, 5)})
    topics.ids = {"orders": {"a": ""}}
    query = Query(topics)
    query.batch()
    for ids in ({}, {"orders": {}}, {"orders": {"a": ""}}):
        topics.ids = ids
        topics.append(A0, 1)
        assert query.batch() is not None
        assert StreamOffsets.from_json(query.position or "").creations == {"orders": {"a": ""}}
    topics.ids = {"orders": {"a": "2"}}
    topics.append(A0, 1)
    with pytest.raises(DataLossError, match="created again"):
        query.batch()


def test_the_cluster_is_closed_with_the_last_query() -> None:
    topics = FakeTopics({A0: (0, 5)})
    query = Query(topics)
    other = Query(topics, query_id="other", source=query.source)
    query.batch(), other.batch()
    query.source.stop("q")
    assert topics.closed == 0
    # A call of `metrics` for a stopped query does not add the query to the source's running queries again.
    assert query.source.metrics("q", None)["offsetsBehindLatest"] == "0"
    query.source.stop("other")
    assert topics.closed == 1


def test_progress_has_the_offsets_that_the_query_has_read() -> None:
    topics = FakeTopics({A0: (0, 5), B0: (2, 4)})
    query = Query(topics, max_offsets=3)
    query.batch()
    assert StreamOffsets.from_json(query.source.report_latest_offset("q")).offsets == {A0: 5, B0: 4}
    assert query.source.metrics("q", query.position) == {
        "offsetsBehindLatest": "4",
        "minOffsetsBehindLatest": "1",
        "maxOffsetsBehindLatest": "3",
        "avgOffsetsBehindLatest": "2.0",
    }
    assert query.source.metrics("another", None)["offsetsBehindLatest"] == "0"


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "12", '{"version": 1}', '{"orders": {"0": 12}}', '{"version":1,"offsets":{"a":3},"starts":{}}'],
)
def test_offsets_of_another_source_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="separate checkpoint location"):
        StreamOffsets.from_json(text)


def test_offsets_of_a_later_version_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="version 3"):
        StreamOffsets.from_json('{"version": 3}')


@pytest.mark.parametrize("closing", [WindowClosing.ROW, WindowClosing.LAST])
def test_offsets_that_close_windows_are_refused_by_an_older_raymq(closing: WindowClosing) -> None:
    """An older raymq refuses each version but 1, and knows no `closing`."""
    before = StreamOffsets({A0: 7}, {A0: 0}, 2, "paid")
    offsets = replace(before, closing=closing)
    assert StreamOffsets.from_json(offsets.to_json()) == offsets
    assert (json.loads(before.to_json())["version"], "closing" in before.to_json()) == (1, False)
    assert json.loads(offsets.to_json())["version"] == 2
    with pytest.raises(InvalidArgumentError, match="separate checkpoint location"):
        StreamOffsets.from_json(offsets.to_json().replace(f'"closing":{closing:d}', '"closing":9'))


def closing_of(query: Query) -> WindowClosing:
    return StreamOffsets.from_json(query.position or "").closing


def test_a_query_that_closes_its_windows_does_so_in_two_batches_after_its_last_message() -> None:
    topics = FakeTopics({A0: (0, 5), B0: (2, 4)})
    query = Query(topics, closes=True, max_offsets=4)
    query.source.prepare_available_now("q")
    topics.append(A0, 9)
    read = Counter[MessageQueue]()
    while closing_of(query) is WindowClosing.NO if query.position else True:
        read.update({queue: len(offsets) for queue, offsets in (query.batch() or {}).items()})
    assert read == {A0: 5, B0: 2}
    assert (closing_of(query), query.source.is_closing_row(query.position or "")) == (WindowClosing.ROW, True)
    asked = topics.asked
    assert query.batch() == {}
    assert (closing_of(query), query.source.is_closing_row(query.position or "")) == (WindowClosing.LAST, False)
    assert [query.batch() for _ in range(3)] == [None] * 3
    assert topics.asked == asked
    assert StreamOffsets.from_json(query.position or "").offsets == {A0: 5, B0: 4}


def test_a_batch_that_closes_windows_reads_no_message_again() -> None:
    """The last batch with messages has start offsets. The two batches that close the query have none."""
    query = Query(FakeTopics({A0: (3, 8)}), closes=True)
    query.source.prepare_available_now("q")
    assert query.batch() == {A0: range(3, 8)}
    assert StreamOffsets.from_json(query.position or "").starts == {A0: 3}
    assert [query.batch() for _ in range(3)] == [{}, {}, None]


def test_a_query_without_an_end_closes_no_windows() -> None:
    query = Query(FakeTopics({A0: (0, 5)}), closes=True)
    assert [query.batch() for _ in range(3)] == [{A0: range(5)}, None, None]


def test_windows_are_not_closed_while_a_broker_group_does_not_answer() -> None:
    topics = FakeTopics({A0: (0, 5), B0: (0, 5)})
    query = Query(topics, closes=True, max_offsets=6)
    query.source.prepare_available_now("q")
    query.batch()
    topics.silent = {"b"}
    with pytest.raises(ServiceNotAvailableError):
        query.batch()
    assert closing_of(query) is WindowClosing.NO
    topics.silent.clear()
    assert sum(map(len, (query.batch() or {}).values())) == 4
    assert (query.batch(), closing_of(query)) == ({}, WindowClosing.ROW)


def test_windows_are_not_closed_while_a_broker_group_is_not_in_the_route() -> None:
    """An expired broker group is neither among the queues nor silent. A checkpoint that has read from the group knows
    its queues; a new checkpoint knows only the topic's layout."""
    topics = FakeTopics({A0: (0, 5), B0: (0, 5)})
    before = Query(topics)
    before.batch()
    topics.append(B0, 1)
    away = topics.held.pop(B0)
    for position, absent in ((before.position, set()), (None, {"b"})):
        query, topics.absent = Query(topics, closes=True), absent
        query.position = position
        query.source.prepare_available_now("q")
        if position is None:
            query.batch()
        with pytest.raises(ServiceNotAvailableError, match="broker group b may have messages"):
            query.batch()
        # The group returns. This query fixed its end without the group, and still does not close its windows.
        topics.held[B0], topics.absent = away, set()
        with pytest.raises(ServiceNotAvailableError, match="broker group b may have messages"):
            query.batch()
        del topics.held[B0]
    topics.held[B0] = away
    again = Query(topics, closes=True)
    again.position = before.position
    again.source.prepare_available_now("q")
    assert again.batch() == {B0: range(5, 6)}
    assert (again.batch(), closing_of(again)) == ({}, WindowClosing.ROW)


def test_windows_are_not_closed_while_a_new_master_shows_fewer_messages() -> None:
    topics = FakeTopics({A0: (0, 9)})
    query = Query(topics, closes=True, max_offsets=5)
    query.source.prepare_available_now("q")
    assert query.batch() == {A0: range(5)}
    topics.held[A0] = (0, 5)
    with pytest.raises(ServiceNotAvailableError, match="broker group a may have messages"):
        query.batch()
    topics.held[A0] = (0, 9)
    assert query.batch() == {A0: range(5, 9)}
    assert (query.batch(), closing_of(query)) == ({}, WindowClosing.ROW)


def test_a_restarted_query_finishes_closing_and_reads_nothing() -> None:
    topics = FakeTopics({A0: (0, 5)})
    topics.ids = {"orders": {"a": "1"}}
    first = Query(topics, closes=True)
    first.source.prepare_available_now("q")
    first.batch(), first.batch()
    assert closing_of(first) is WindowClosing.ROW
    again, plain = Query(topics, closes=True), Query(topics)
    again.position = plain.position = first.position
    made_anew(topics, 206)
    again.source.prepare_available_now("q")
    assert [again.batch() for _ in range(2)] == [{}, None]
    assert closing_of(again) is WindowClosing.LAST
    with pytest.raises(InvalidArgumentError, match="the checkpoint is closed"):
        plain.batch()


def test_a_batchs_filter_expression_is_kept_with_its_offsets() -> None:
    offsets = StreamOffsets({A0: 7}, {}, 2, "paid", "price > 5")
    assert StreamOffsets.from_json(offsets.to_json()) == offsets
    without = StreamOffsets({A0: 7}, {}, 2, "paid")
    assert "sql" not in without.to_json()
    assert StreamOffsets.from_json(without.to_json()) == without
