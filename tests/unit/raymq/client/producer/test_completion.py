"""Tests that the futures of sends behave as concurrent.futures and asyncio require, and leak no objects."""

from __future__ import annotations

import asyncio
import concurrent.futures as cf
import gc
import pickle
import threading
import weakref

import numpy as np
import pytest

from raymq.client.producer.completion import Completion, SendFuture
from raymq.client.producer.results import Acknowledged, SendResults, offset_message_ids
from raymq.common.errors import SendUnknownError, ServiceNotAvailableError
from raymq.common.message import MessageQueue, SendStatus
from raymq.records.format.message_id import IdRange, offset_message_id
from tests.support.clients.fakes import WAIT_S

QUEUE = MessageQueue("orders", "a", 0)
HOST = ("10.0.0.1", 10911)
STEM = "A" * 28


def acknowledged(count: int, first: int = 0) -> Acknowledged:
    offsets = range(first, first + count)
    return Acknowledged(SendStatus.SEND_OK, QUEUE, IdRange(STEM, first, count), offsets, np.arange(count) * 100, HOST)


def futures_of(completion: Completion, count: int) -> list[SendFuture]:
    return [SendFuture(completion, index) for index in range(count)]


def test_a_future_is_one_and_waits_for_its_batch():
    completion = Completion()
    future = SendFuture(completion, 1)
    assert isinstance(future, cf.Future)
    assert (future.done(), future.running(), future.cancel(), future.cancelled()) == (False, True, False, False)
    with pytest.raises(TimeoutError):
        future.result(0.0)
    with pytest.raises(TimeoutError):
        future.exception(0.0)
    got = []
    thread = threading.Thread(target=lambda: got.append(future.result(WAIT_S)))
    thread.start()
    completion.end(acknowledged(2), 0, 2)
    thread.join(WAIT_S)
    assert got == [future.result()]
    assert (future.done(), future.running(), future.exception()) == (True, False, None)
    assert (got[0].queue_offset, got[0].queue, got[0].message_id) == (1, QUEUE, STEM + "0001")
    assert got[0].offset_message_id == offset_message_id(*HOST, 100)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(future)


def test_wait_and_as_completed_return_the_futures_that_they_were_given():
    slow, quick, failed = Completion(), Completion(), Completion()
    futures = futures_of(slow, 100) + futures_of(quick, 100) + futures_of(failed, 100)
    quick.end(acknowledged(100), 0, 100)
    first = cf.wait(futures, WAIT_S, cf.FIRST_COMPLETED)
    assert first.done == set(futures[100:200])
    timer = threading.Timer(0.01, lambda: (slow.end(acknowledged(100), 0, 100), failed.end(ValueError("no"), 0, 100)))
    timer.start()
    assert sorted(map(id, cf.as_completed(futures, WAIT_S))) == sorted(map(id, futures))
    assert cf.wait(futures, WAIT_S).not_done == set()
    timer.join(WAIT_S)


def test_wait_loses_no_end_that_comes_while_it_is_set_up():
    """`concurrent.futures.wait` first registers the calling thread at each future. The thread is woken by each future
    that completes, even if the future completes before or during this registration."""
    for _ in range(300):
        completions = [Completion() for _ in range(3)]
        futures = [future for completion in completions for future in futures_of(completion, 3)]
        start = threading.Barrier(2)

        def end(completions=completions, start=start) -> None:
            start.wait(WAIT_S)
            for completion in completions:
                completion.end(acknowledged(3), 0, 3)

        thread = threading.Thread(target=end)
        thread.start()
        start.wait(WAIT_S)
        assert not cf.wait(futures, WAIT_S).not_done
        thread.join(WAIT_S)


def test_callbacks_are_called_once_before_or_after_the_end(caplog):
    completion = Completion()
    futures, seen = futures_of(completion, 2), []
    futures[0].add_done_callback(lambda future: 1 / 0)
    futures[1].add_done_callback(seen.append)
    assert seen == []
    completion.end(acknowledged(2), 0, 2)
    futures[0].add_done_callback(seen.append)
    assert [id(future) for future in seen] == [id(futures[1]), id(futures[0])]
    assert "a callback of a send raised an exception" in caplog.text


def test_parts_of_a_batch_have_ends_of_their_own():
    completion = Completion()
    futures, seen = futures_of(completion, 3), []
    for future in futures:
        future.add_done_callback(lambda future: seen.append(futures.index(future)))
    completion.end(acknowledged(1, 9), 2, 3, divided=True)
    assert [future.done() for future in futures] == [False, False, True]
    completion.end(ValueError("no"), 0, 2, divided=True)
    assert futures[2].result().queue_offset == 9
    assert isinstance(futures[0].exception(), ValueError)
    assert seen == [2, 0, 1]


def test_results_are_a_sequence_equal_to_their_list():
    results, listed = SendResults(acknowledged(3)), acknowledged(3).results()
    assert results == listed
    assert results == SendResults(acknowledged(3))
    assert results != listed[:2]
    assert (len(results), results[-1], results[:2], list(reversed(results))) == (3, listed[2], listed[:2], listed[::-1])
    assert (results + listed, listed + results) == (listed * 2, listed * 2)
    assert pickle.loads(pickle.dumps(results)) == listed
    assert repr(results) == repr(listed)
    with pytest.raises(IndexError):
        results[3]


def test_a_loop_is_woken_once_for_all_messages_of_a_batch():
    completion = Completion()

    async def run() -> tuple[list, int]:
        loop = asyncio.get_running_loop()
        wakes, wake = [], loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *arguments: (wakes.append(arguments), wake(*arguments))
        sends = [asyncio.ensure_future(_awaited(future)) for future in futures_of(completion, 50)]
        await asyncio.sleep(0)
        threading.Thread(target=completion.end, args=(acknowledged(50), 0, 50)).start()
        results = await asyncio.wait_for(asyncio.gather(*sends), WAIT_S)
        count = len(wakes)
        assert await SendFuture(completion, 3) == results[3]
        assert await asyncio.wrap_future(SendFuture(completion, 4)) == results[4]
        return results, count

    results, wakes = asyncio.run(run())
    assert [result.queue_offset for result in results] == list(range(50))
    assert wakes == 1


async def _awaited(future: SendFuture):
    return await future


def test_an_awaited_send_that_is_cancelled_or_fails_disturbs_no_other():
    completion, failing = Completion(), Completion()

    async def run() -> None:
        places = (completion, 0), (completion, 1), (failing, 0)
        kept, lost, failed = [asyncio.ensure_future(_awaited(SendFuture(*place))) for place in places]
        wrapped = asyncio.wrap_future(SendFuture(completion, 1))
        await asyncio.sleep(0)
        lost.cancel()
        completion.end(acknowledged(2), 0, 2)
        failing.end(ServiceNotAvailableError("gone"), 0, 1)
        assert (await kept).queue_offset == 0
        assert (await wrapped).queue_offset == 1
        with pytest.raises(asyncio.CancelledError):
            await lost
        with pytest.raises(ServiceNotAvailableError):
            await failed

    asyncio.run(run())


def test_a_closed_event_loop_is_skipped():
    completion = Completion()

    async def start() -> None:
        waiting = asyncio.get_running_loop().create_future()
        completion.add_loop_waiter(0, asyncio.get_running_loop(), waiting)

    asyncio.run(start())
    completion.end(acknowledged(1), 0, 1)
    assert SendFuture(completion, 0).done()


def test_each_raise_is_of_a_copy_of_the_error_with_its_fields():
    completion = Completion()
    error = SendUnknownError("orders@a:0", 3, 1.5, "gone")
    error.add_note("a note")
    completion.end(error, 0, 1)
    for _ in range(2):
        with pytest.raises(SendUnknownError) as raised:
            SendFuture(completion, 0).result()
        assert raised.value is not error
        assert (str(raised.value), raised.value.count, raised.value.__notes__) == (str(error), 3, ["a note"])
    assert error.__traceback__ is None
    other = SendFuture(completion, 0).exception()
    assert (type(other), other.args) == (SendUnknownError, error.args)


def test_a_future_that_failed_leaves_nothing_that_the_garbage_collector_cannot_see():
    """A failed future leaves no reference cycle. The garbage collector does not track a SendFuture or its Completion,
    so it would never free such a cycle."""

    class MarkError(Exception):
        pass

    def send_and_fail() -> weakref.ref:
        completion, mark = Completion(), MarkError()
        future = SendFuture(completion, 0)
        future.add_done_callback(lambda done: mark if done is future else None)
        completion.end(ServiceNotAvailableError("gone"), 0, 1)
        alive = weakref.ref(mark)
        try:
            future.result()
        except ServiceNotAvailableError as error:
            # keep the error, as users' programs may do: its traceback refers to the stack frame that holds the future
            kept = error
            assert kept.__traceback__ is not None
        try:
            raise future.exception()
        except ServiceNotAvailableError as error:
            again = error
            assert again.__traceback__ is not None
        return alive

    marks = [send_and_fail() for _ in range(10)]
    gc.collect()
    assert not [mark for mark in marks if mark() is not None]


@pytest.mark.parametrize("host", [HOST, ("::1", 1)])
@pytest.mark.parametrize("count", [1, 2, 700])
def test_ids_of_a_batch_equal_single_ids(host, count):
    offsets = [number * 1_000_003 for number in range(count)]
    assert offset_message_ids(host, offsets) == [offset_message_id(*host, offset) for offset in offsets]
    ids = IdRange(STEM, 65_000, count)
    results = Acknowledged(SendStatus.SEND_OK, QUEUE, ids, range(count), offsets, host).results()
    assert [result.message_id for result in results] == list(ids)
    assert [result.offset_message_id for result in results] == offset_message_ids(host, offsets)
