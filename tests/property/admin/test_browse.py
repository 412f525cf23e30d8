"""Tests of reading a topic page by page: for any page limits, the pages together contain each message of the topic
exactly once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from raymq.client.admin.browse import Span, read_cursor, read_page, write_cursor
from raymq.client.consumer.pull_once import CheckedFetch
from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MessageQueue, PullStatus
from raymq.common.protocol.store import FetchResult

QUEUES = [MessageQueue("orders", name, id_) for name, id_ in (("a", 0), ("a", 1), ("b", 0))]


class Topic:
    """A fake topic that has the store times of the messages in each queue. A queue has a first offset, and some offsets
    have no message."""

    def __init__(self, times: list[list[int]], firsts: list[int], gaps: set[int], per_fetch: int) -> None:
        self.firsts = dict(zip(QUEUES, firsts, strict=True))
        self.times = dict(zip(QUEUES, (sorted(one) for one in times), strict=True))
        self.gaps, self.per_fetch = gaps, per_fetch

    def end(self, queue: MessageQueue) -> int:
        return self.firsts[queue] + len(self.times[queue])

    def spans(self) -> list[Span]:
        return [Span(queue, self.firsts[queue], self.end(queue)) for queue in QUEUES]

    def messages(self, queue: MessageQueue, begin: int, end: int) -> list[Any]:
        first = self.firsts[queue]
        return [
            SimpleNamespace(
                queue=queue,
                queue_offset=at,
                store_timestamp_ms=self.times[queue][at - first],
                record_damaged=False,
                sys_flag=0,
            )
            for at in range(begin, end)
            if at not in self.gaps
        ]

    def fetch(self, wanted: Any) -> list[CheckedFetch]:
        results = []
        for queue, offset, count in wanted:
            first, end = self.firsts[queue], self.end(queue)
            if not first <= offset <= end:
                illegal = FetchResult(PullStatus.OFFSET_ILLEGAL, min(max(offset, first), end), first, end, b"", 0)
                results.append(CheckedFetch(illegal, [], []))
                continue
            until = min(offset + min(count, self.per_fetch), end)
            messages = self.messages(queue, offset, until)
            found = [SimpleNamespace(message=one, record=b"", alone=lambda one=one: one) for one in messages]
            status = PullStatus.FOUND if found else PullStatus.NO_MATCHED_MESSAGE
            result = FetchResult(status, until, first, end, b"", len(found))
            results.append(CheckedFetch(result, found, []))  # type: ignore[arg-type]  # stand-ins
        return results


topics = st.builds(
    Topic,
    st.tuples(*[st.lists(st.integers(0, 30), max_size=40)] * 3),
    st.tuples(*[st.integers(0, 3)] * 3),
    st.sets(st.integers(0, 45), max_size=20),
    st.integers(1, 40),
)


@given(
    topic=topics, newest_first=st.booleans(), limit=st.integers(1, 50), most=st.integers(1, 60), every=st.integers(1, 4)
)
def test_pages_have_the_whole_topic_in_order_and_each_message_once(
    topic: Topic, newest_first: bool, limit: int, most: int, every: int
) -> None:
    seen: list[Any] = []
    scanned = 0
    spans = topic.spans()
    pages = 0
    while True:
        page = read_page(
            spans,
            topic.fetch,
            lambda message: message.queue_offset % every == 0,
            newest_first=newest_first,
            limit=limit,
            max_scanned=most,
            in_time=lambda: True,
        )
        pages += 1
        assert len(page.messages) <= limit
        assert page.scanned <= most
        assert page.truncated <= (page.scanned >= most)
        seen += page.messages
        scanned += page.scanned
        if page.cursor is None:
            break
        spans, same_way = read_cursor("orders", page.cursor)
        assert same_way is newest_first
        assert pages < 400
    everything = [one for span in topic.spans() for one in topic.messages(span.queue, span.begin, span.end)]
    assert scanned == len(everything)
    wanted = [one for one in everything if one.queue_offset % every == 0]
    assert sorted((str(one.queue), one.queue_offset) for one in seen) == sorted(
        (str(one.queue), one.queue_offset) for one in wanted
    )
    times = [one.store_timestamp_ms for one in seen]
    assert times == sorted(times, reverse=newest_first)


@given(topic=topics, newest_first=st.booleans(), steps=st.integers(0, 5))
def test_a_page_cut_off_by_its_deadline_is_marked_and_its_cursor_continues(
    topic: Topic, newest_first: bool, steps: int
) -> None:
    left = iter([True] * steps)
    common: dict[str, Any] = {"newest_first": newest_first, "limit": 1000, "max_scanned": 1000}
    page = read_page(topic.spans(), topic.fetch, lambda message: True, in_time=lambda: next(left, False), **common)
    rest = read_page(
        read_cursor("orders", page.cursor)[0] if page.cursor else [],
        topic.fetch,
        lambda message: True,
        in_time=lambda: True,
        **common,
    )
    everything = [one for span in topic.spans() for one in topic.messages(span.queue, span.begin, span.end)]
    assert page.truncated is (page.cursor is not None) or not rest.messages
    assert len(page.messages) + len(rest.messages) == len(everything)


@given(st.lists(st.builds(Span, st.sampled_from(QUEUES), st.integers(0, 2**62), st.integers(0, 2**62))), st.booleans())
def test_a_decoded_cursor_equals_the_encoded_one(spans: list[Span], newest_first: bool) -> None:
    assert read_cursor("orders", write_cursor(spans, newest_first=newest_first)) == (spans, newest_first)


@pytest.mark.parametrize("text", ["", "%", "AAAA", "W10", "WzEsW1sxXV1d", "\u00e4"])
def test_a_text_that_is_no_cursor_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="the cursor does not name a page"):
        read_cursor("orders", text)
