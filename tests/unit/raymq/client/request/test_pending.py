"""Tests of requests that wait for a reply: each request completes once, and is forgotten afterwards."""

from __future__ import annotations

from concurrent.futures import Future
from threading import Thread

import pytest

from raymq.client.request.pending import PendingRequests
from raymq.common.errors import ClientStateError, NoPermissionError, RequestTimeoutError, SystemBusyError
from raymq.common.message import Message, MessageExt, MessageQueue, SendResult
from raymq.common.protocol.request_reply import RequestStatistics
from tests.support.clients.fakes import WAIT_S

ASKED = Message("orders", b"?")


def replying(correlation_id: str) -> MessageExt:
    """Return a reply message with the correlation id `correlation_id`."""
    values = ("t", b"!", None, (), {}, 0, "a", 0, 0, 0, 0, 0, "", "", "", "", 0, 0)
    return MessageExt(*values, {"CORRELATION_ID": correlation_id})


@pytest.fixture
def pending():
    made = PendingRequests(most=2)
    yield made
    made.close()


def test_a_reply_ends_its_request_and_a_second_one_is_late(pending: PendingRequests):
    first, second = (pending.add(name, WAIT_S, lambda: ASKED) for name in ("1", "2"))
    with pytest.raises(SystemBusyError, match="2 requests"):
        pending.add("3", WAIT_S, lambda: ASKED)
    pending.complete(replying("2"))
    assert second.result().body == b"!"
    assert not first.future.done()
    pending.complete(replying("2"))
    assert pending.statistics() == RequestStatistics(waiting=1, answered=1, timed_out=0, failed=0, late=1)


def test_golden_164_no_reply_in_time_is_an_error_and_the_id_is_unknown_then(pending: PendingRequests):
    request = pending.add("1", 0.01, lambda: ASKED)
    with pytest.raises(RequestTimeoutError, match="request 1 to topic 'orders'") as caught:
        request.result()
    assert caught.value.code == 10006
    assert pending.take("1") is None
    pending.complete(replying("1"))
    assert pending.statistics() == RequestStatistics(waiting=0, answered=0, timed_out=1, failed=0, late=1)


def test_a_callback_that_raises_ends_neither_the_thread_of_deadlines_nor_that_of_replies(pending: PendingRequests):
    def leave(future: Future[MessageExt]) -> None:
        raise SystemExit(3)

    first = pending.add("1", 0.01, lambda: ASKED)
    first.future.add_done_callback(leave)
    with pytest.raises(RequestTimeoutError):
        first.future.result(WAIT_S)
    with pytest.raises(RequestTimeoutError):
        pending.add("2", 0.01, lambda: ASKED).future.result(WAIT_S)
    replied = pending.add("3", WAIT_S, lambda: ASKED)
    replied.future.add_done_callback(leave)
    replies = Thread(target=lambda: [pending.complete(replying("3")), pending.complete(replying("3"))])
    replies.start()
    replies.join(WAIT_S)
    assert replied.result().body == b"!"
    assert pending.statistics().late == 1


def test_requests_end_in_the_order_of_their_deadlines(pending: PendingRequests):
    late, soon = pending.add("late", WAIT_S, lambda: ASKED), pending.add("soon", 0.01, lambda: ASKED)
    with pytest.raises(RequestTimeoutError):
        soon.future.result(WAIT_S)
    assert not late.future.done()


def test_a_send_that_fails_ends_the_request_with_its_error(pending: PendingRequests):
    failed, sent = pending.add("1", WAIT_S, lambda: ASKED), pending.add("2", WAIT_S, lambda: ASKED)
    sending: Future[SendResult] = Future()
    sending.add_done_callback(failed.sent)
    sending.set_exception(NoPermissionError("no"))
    with pytest.raises(NoPermissionError):
        failed.result()
    well: Future[SendResult] = Future()
    well.add_done_callback(sent.sent)
    well.set_result(SendResult(None, "", "", MessageQueue("orders", "a", 0), 0))
    assert not sent.future.done()
    sent.abandon()
    assert pending.statistics() == RequestStatistics(waiting=0, answered=0, timed_out=0, failed=2, late=0)


def test_close_ends_waiting_requests(pending: PendingRequests):
    request = pending.add("1", WAIT_S, lambda: ASKED)
    pending.close()
    with pytest.raises(ClientStateError, match="closed before"):
        request.result()
    with pytest.raises(ClientStateError):
        pending.add("2", WAIT_S, lambda: ASKED)


def test_a_request_cannot_be_cancelled(pending: PendingRequests):
    assert not pending.add("1", WAIT_S, lambda: ASKED).future.cancel()
