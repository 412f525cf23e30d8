"""Tests of the thread pool that runs an actor's requests: limits on the number of requests and on their waiting time,
metrics, and refusals on time in a real event loop."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, strategies as st

from actors.request_pool import SLOT_S, RequestKind, RequestPool, WaterMarks
from raymq.common.errors import SystemBusyError
from raymq.remoting.lane.loop import Loop
from tests.support.history.waiting import eventually

WAIT_S = 60.0
PULL = RequestKind("pull", 3, 5.0, "pull_queue_capacity", "wait_time_in_pull_queue_ms")
ADMIN = RequestKind("admin", 100, 1.0, "admin_broker_queue_capacity", "wait_time_in_admin_broker_queue_ms")


class Now:
    """Fake clock that tests set, with timers that tests fire."""

    def __init__(self):
        self.now_s = 1000.0
        self.timers = []
        self.is_own_thread = True

    def __call__(self):
        return self.now_s

    def call_at(self, when_s, callback):
        self.timers.append((when_s, callback))

    def call_soon(self, callback):
        callback()

    def pass_to(self, now_s):
        """Advance the clock to `now_s`, and fire the timers that are due."""
        self.now_s = now_s
        while due := [timer for timer in self.timers if timer[0] <= now_s]:
            for timer in due:
                self.timers.remove(timer)
                timer[1]()


@pytest.fixture
def now():
    return Now()


@pytest.fixture
def held(now):
    """Yield a request pool with a single thread, and an event. A request of kind "other" occupies the thread until the
    event is set."""
    goes_on, began = threading.Event(), threading.Event()
    pool = RequestPool("held", 1, [PULL, ADMIN, RequestKind("other", 10)], now)
    pool.refuse_by(now)

    def hold():
        began.set()
        goes_on.wait(WAIT_S)

    pool.queues["other"].submit(hold, lambda error: None)
    assert began.wait(WAIT_S)
    yield pool, goes_on
    goes_on.set()
    pool.close()


def test_calls_are_made_in_their_order_by_the_threads(now):
    pool = RequestPool("ordered", 1, [PULL, ADMIN], now)
    made, all_made = [], threading.Event()
    for number in range(20):
        kind = pool.queues["admin"]
        kind.submit(lambda number=number: made.append((number, threading.current_thread().name)), pytest.fail)
    pool.queues["pull"].submit(all_made.set, pytest.fail)
    assert all_made.wait(WAIT_S)
    assert made == [(number, "ordered-0") for number in range(20)]
    pool.close()


def test_one_more_than_a_queue_takes_is_refused_at_once(held):
    pool, goes_on = held
    done = []
    for number in range(3):
        pool.queues["pull"].submit(lambda number=number: done.append(number), pytest.fail)
    with pytest.raises(SystemBusyError, match="pull_queue_capacity") as caught:
        pool.queues["pull"].submit(lambda: done.append("refused"), pytest.fail)
    assert caught.value.retry_after_s is not None
    pool.queues["admin"].submit(lambda: done.append("another kind"), pytest.fail)
    [pull, admin, _] = pool.figures()
    assert (pull.kind, pull.waiting, pull.most, pull.refused_full, admin.waiting) == ("pull", 3, 3, 1, 1)
    goes_on.set()
    eventually(lambda: done == [0, 1, 2, "another kind"], "all others are carried out")


def test_limits_may_change_while_requests_wait(held, now):
    pool, _ = held
    refused = []
    pull = pool.queues["pull"]
    pull.submit(lambda: None, refused.append)
    pool.limit([PULL._replace(capacity=1, wait_s=9.0)])
    with pytest.raises(SystemBusyError, match="1 requests"):
        pull.submit(lambda: None, pytest.fail)
    now.pass_to(1005.1)
    assert refused == []
    now.pass_to(1009.1)
    assert len(refused) == 1


def test_a_request_that_waits_too_long_is_refused_even_without_a_free_thread(held, now):
    pool, goes_on = held
    refused, done = [], []
    pull, admin = pool.queues["pull"], pool.queues["admin"]
    pull.submit(lambda: done.append("pull"), lambda error: refused.append(("pull", error)))
    now.pass_to(1002.0)
    pull.submit(lambda: done.append("young"), lambda error: refused.append(("young", error)))
    admin.submit(lambda: done.append("admin"), lambda error: refused.append(("admin", error)))
    now.pass_to(1002.5)
    assert refused == []
    now.pass_to(1003.1)
    assert [name for name, _ in refused] == ["admin"]
    assert "wait_time_in_admin_broker_queue_ms is 1000" in str(refused[0][1])
    assert "waited for 1.1 s" in str(refused[0][1])
    now.pass_to(1005.1)
    assert [name for name, _ in refused] == ["admin", "pull"]
    figures = pool.figures()[0]
    assert (figures.refused_late, figures.waiting, figures.longest_ms) == (1, 1, 5100.0)
    assert figures.head_wait_ms == 3100.0
    goes_on.set()
    eventually(lambda: done == ["young"], "the young one is carried out")
    now.pass_to(1100.0)
    assert len(refused) == 2


def test_a_request_that_a_thread_takes_too_late_is_refused(held, now):
    pool, goes_on = held
    refused = []
    pool.refuse_by(None)
    pool.queues["admin"].submit(lambda: pytest.fail("it was carried out"), refused.append)
    now.now_s += 1.5
    goes_on.set()
    eventually(lambda: refused, "it is refused")
    assert isinstance(refused[0], SystemBusyError)
    assert pool.queues["admin"].figures().refused_late == 1


def test_nothing_is_timed_while_nothing_waits(now):
    pool = RequestPool("quiet", 1, [PULL], now)
    pool.refuse_by(now)
    done = threading.Event()
    pool.queues["pull"].submit(done.set, pytest.fail)
    assert done.wait(WAIT_S)
    assert len(now.timers) == 1
    now.pass_to(1010.0)
    assert now.timers == []
    pool.close()


def test_a_call_that_raises_does_not_end_its_thread(now, caplog):
    pool = RequestPool("robust", 1, [ADMIN], now)
    done = threading.Event()
    pool.queues["admin"].submit(lambda: 1 // 0, pytest.fail)
    pool.queues["admin"].submit(done.set, pytest.fail)
    assert done.wait(WAIT_S)
    assert "kind 'admin' failed" in caplog.text
    pool.close()


def test_close_drops_waiting_requests_and_ends_the_threads(held):
    pool, goes_on = held
    pool.queues["pull"].submit(lambda: pytest.fail("it was carried out"), pytest.fail)
    pool.close()
    pool.close()
    goes_on.set()
    eventually(lambda: not [one for one in threading.enumerate() if one.name == "held-0"], "the thread ends")


def test_a_real_loop_refuses_while_every_thread_is_held():
    loop = Loop("request-pool-test")
    loop.start()
    goes_on, refused = threading.Event(), threading.Event()
    pool = RequestPool("real", 1, [RequestKind("admin", 10, 0.05, "a", "b"), RequestKind("other", 10)])
    pool.refuse_by(loop)
    try:
        pool.queues["other"].submit(lambda: goes_on.wait(WAIT_S), lambda error: None)
        pool.queues["admin"].submit(lambda: None, lambda error: refused.set())
        assert refused.wait(WAIT_S)
    finally:
        goes_on.set()
        pool.close()
        loop.stop(lambda: None)


@given(
    st.lists(
        st.tuples(st.floats(0, 200), st.integers(0, 1000), st.floats(0, 100)),
        max_size=60,
    )
)
def test_water_marks_are_the_highs_since_the_start_and_of_about_a_minute(notes):
    notes = sorted(notes)
    marks = WaterMarks(0.0)
    for now_s, length, wait_s in notes:
        marks.note(length, wait_s, now_s)
    assert marks.since_start() == (
        max([length for _, length, _ in notes], default=0),
        max([wait_s for *_, wait_s in notes], default=0),
    )
    now_s = notes[-1][0] if notes else 0.0
    length, wait_s = marks.last_minute(now_s)
    surely = [note for note in notes if note[0] >= now_s - 60]
    at_most = [note for note in notes if note[0] >= now_s - 60 - 2 * SLOT_S]
    for found, column in ((length, 1), (wait_s, 2)):
        assert max([note[column] for note in surely], default=0) <= found
        assert found <= max([note[column] for note in at_most], default=0)
