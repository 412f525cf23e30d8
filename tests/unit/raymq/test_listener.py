"""Shipping listeners by value, and running them."""

from __future__ import annotations

import functools
import json
import pickle
import subprocess
import sys
import textwrap
import threading

import cloudpickle
import pytest

from raymq.errors import ListenerError
from raymq.listener import Listener, ship
from raymq.message import ConsumeStatus
from raymq.push_settings import PushSettings
from raymq.record import decode_records
from raymq.subscription import Subscription
from tests.support.stores import make_batch

MODULE = """
    import functools

    FACTOR = 3

    def helper(value):
        return value * FACTOR

    def handle(message):
        return helper(message)

    def handle_with(factor, message):
        return factor * message

    class Handler:
        def __init__(self, factor):
            self.factor = factor

        def __call__(self, message):
            return helper(message) * self.factor

        def method(self, message):
            return helper(message) + self.factor

    def decorated(function):
        @functools.wraps(function)
        def inner(message):
            return function(message) + 1
        return inner

    @decorated
    def wrapped(message):
        return helper(message)
"""

ELSEWHERE = """
import sys, pickle
for line in sys.stdin.buffer.read().split(b"\\n--\\n"):
    print(pickle.loads(line)(2))
print("users_listeners" in sys.modules)
"""


@pytest.fixture
def users(tmp_path, monkeypatch):
    """A module of the user's, importable here and nowhere else."""
    (tmp_path / "users_listeners.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(str(tmp_path))
    import users_listeners

    yield users_listeners
    del sys.modules["users_listeners"]


def run_elsewhere(payloads: list[bytes]) -> list[str]:
    """What the shipped functions give for 2 in a process that cannot import the user's module."""
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE], input=b"\n--\n".join(payloads), capture_output=True, cwd="/", check=False
    )
    return done.stdout.decode().split() or [done.stderr.decode()]


def test_a_users_listener_of_any_kind_goes_by_value(users):
    handlers = [
        users.handle,
        users.Handler(5),
        users.Handler(5).method,
        functools.partial(users.handle_with, 7),
        functools.partial(functools.partial(users.handle_with), 8),
        users.wrapped,
        lambda message: message + 100,
    ]
    payloads = [ship(handler, takes_batch=False).payload for handler in handlers]
    assert run_elsewhere(payloads) == ["6", "30", "11", "14", "16", "7", "102", "False"]


def test_what_is_installed_goes_by_reference(users):
    payload = ship(json.dumps, takes_batch=False).payload
    assert len(payload) < 100
    assert pickle.loads(payload) is json.dumps
    assert pickle.loads(ship(pytest.approx, takes_batch=False).payload) is pytest.approx
    assert pickle.loads(ship(print, takes_batch=False).payload) is print


def test_shipping_leaves_no_trace_in_the_users_process(users):
    ship(users.handle, takes_batch=False)
    assert cloudpickle.list_registry_pickle_by_value() == set()
    cloudpickle.register_pickle_by_value(users)
    try:
        ship(users.handle, takes_batch=False)
        assert cloudpickle.list_registry_pickle_by_value() == {"users_listeners"}
    finally:
        cloudpickle.unregister_pickle_by_value(users)


def test_what_is_not_callable_is_refused():
    for thing in (None, 5, "handle", object()):
        with pytest.raises(ListenerError, match="must be callable"):
            ship(thing, takes_batch=False)


def test_a_listener_that_holds_what_cannot_travel_is_refused_with_advice(users):
    lock = threading.Lock()
    with pytest.raises(ListenerError, match=r"cannot be shipped to its actor: .*lock.* It must not hold locks"):
        ship(lambda message: lock, takes_batch=False)
    users.handle.lock = lock
    with pytest.raises(ListenerError):
        ship(users.handle, takes_batch=False)
    assert cloudpickle.list_registry_pickle_by_value() == set()


def test_the_name_is_the_users(users):
    assert ship(users.Handler(1), takes_batch=False).name == "Handler"
    assert ship(users.handle, takes_batch=True).name == "handle"
    assert ship(users.handle, takes_batch=True).takes_batch


# Running


def listener(handler, *, takes_batch=False, batch_max=1, tags="*") -> Listener:
    settings = PushSettings("billing", (Subscription.parse("orders", tags),), batch_max=batch_max)
    return Listener(ship(handler, takes_batch=takes_batch), settings)


def records(*bodies: bytes, tags: str | None = None) -> bytes:
    return bytes(make_batch(bodies, tags=tags).records)


RECEIVED: list[object] = []


@pytest.fixture(autouse=True)
def received():
    RECEIVED.clear()
    return RECEIVED


def by_reference(handler) -> Listener:
    """A Listener whose handler is this very object, so that a test sees its effects."""
    made = listener(print)
    made._handler = handler
    return made


def test_messages_are_handed_over_one_by_one_in_order(received):
    outcome = by_reference(lambda message: received.append(message.body)).consume(records(b"a", b"b", b"c"), "broker-a")
    assert outcome.status is ConsumeStatus.CONSUME_SUCCESS
    assert received == [b"a", b"b", b"c"]


def test_batches_have_at_most_the_size_asked_for(received):
    made = listener(print, takes_batch=True, batch_max=2)
    made._handler = lambda messages: received.append([message.body for message in messages])
    assert made.consume(records(b"a", b"b", b"c"), "broker-a").status is ConsumeStatus.CONSUME_SUCCESS
    assert received == [[b"a", b"b"], [b"c"]]


def test_what_only_shares_the_tags_code_is_not_handed_over(received):
    made = listener(print, tags="AaAa")
    made._handler = received.append
    assert made.consume(records(b"a", tags="BBBB"), "broker-a").status is ConsumeStatus.CONSUME_SUCCESS
    assert received == []


@pytest.mark.parametrize("answer", [None, ConsumeStatus.CONSUME_SUCCESS, True, "anything"])
def test_any_answer_but_reconsume_later_is_success(answer):
    assert by_reference(lambda message: answer).consume(records(b"a"), "broker-a").error == ""


def test_the_first_message_to_be_consumed_later_ends_the_run(received):
    def handle(message):
        received.append(message.body)
        return ConsumeStatus.RECONSUME_LATER if message.body == b"b" else None

    outcome = by_reference(handle).consume(records(b"a", b"b", b"c"), "broker-a")
    assert outcome.status is ConsumeStatus.RECONSUME_LATER
    assert received == [b"a", b"b"]


def test_an_exception_is_reported_with_the_users_traceback():
    def handle_payment(message):
        raise KeyError("amount")

    outcome = by_reference(handle_payment).consume(records(b"a"), "broker-a")
    assert outcome.status is ConsumeStatus.RECONSUME_LATER
    assert "in handle_payment" in outcome.error
    assert "KeyError: 'amount'" in outcome.error


def test_a_listener_that_cannot_be_loaded_says_why_and_consumes_nothing(users):
    shipped = ship(users.handle, takes_batch=False)
    broken = type(shipped)(pickle.dumps(print)[:-5], False, "handle")
    made = Listener(broken, PushSettings("billing", (Subscription.parse("orders"),)))
    assert "Traceback" in made.ready()
    outcome = made.consume(records(b"a"), "broker-a")
    assert (outcome.status, outcome.error) == (ConsumeStatus.RECONSUME_LATER, made.ready())
    assert listener(print).ready() == ""


def test_the_messages_know_their_broker(received):
    by_reference(received.append).consume(records(b"a"), "broker-b")
    assert received[0].broker_name == "broker-b"
    assert received == decode_records(records(b"a"), broker_name="broker-b")
