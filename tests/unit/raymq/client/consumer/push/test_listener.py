"""Tests of listeners: a listener is pickled by value for another process, and runs there."""

from __future__ import annotations

import functools
import json
import pickle
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace

import cloudpickle
import pytest

from raymq.client.consumer.push import listener as listener_module
from raymq.client.consumer.push.hosting import Instance
from raymq.client.consumer.push.listener import Listener, ship, ship_hook
from raymq.client.consumer.push.settings import PushSettings
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import ListenerError
from raymq.common.protocol.consume_result import TaskBatch
from tests.support.clients.fakes import WAIT_S
from tests.support.clients.tasks import task_of
from tests.support.history.waiting import eventually

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
    """Write a user's module that only this process can import."""
    (tmp_path / "users_listeners.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(str(tmp_path))
    import users_listeners

    yield users_listeners
    del sys.modules["users_listeners"]


def run_elsewhere(payloads: list[bytes]) -> list[str]:
    """Call each pickled function with argument 2 in a process that cannot import the user's module. Returns the
    results."""
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


def test_installed_functions_are_pickled_by_reference(users):
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


def test_a_listener_that_is_not_callable_is_refused():
    for thing in (None, 5, "handle", object()):
        with pytest.raises(ListenerError, match="must be callable"):
            ship(thing, takes_batch=False)


def test_a_listener_that_cannot_be_pickled_is_refused_with_advice(users):
    lock = threading.Lock()
    with pytest.raises(ListenerError, match=r"cannot be pickled for its actor: .*lock.* Do not store locks"):
        ship(lambda message: lock, takes_batch=False)
    users.handle.lock = lock
    with pytest.raises(ListenerError):
        ship(users.handle, takes_batch=False)
    assert cloudpickle.list_registry_pickle_by_value() == set()


def test_the_name_is_the_users(users):
    assert ship(users.Handler(1), takes_batch=False).name == "Handler"
    assert ship(users.handle, takes_batch=True).name == "handle"
    assert ship(users.handle, takes_batch=True).takes_batch


# Tests of running listeners


def listener(handler, hooks=()) -> Listener:
    settings = PushSettings("billing", (Subscription.parse("orders"),))
    return Listener(ship(handler, takes_batch=False), settings, hooks)


def test_a_listener_that_cannot_be_loaded_reports_the_traceback(users):
    broken = replace(ship(users.handle, takes_batch=False), payload=pickle.dumps(print)[:-5])
    made = Listener(broken, PushSettings("billing", (Subscription.parse("orders"),)))
    assert "Traceback" in made.ready()
    assert listener(print).ready() == ""


class SharedFake:
    """Fake instance in the mode "share"."""

    def __init__(self, handler, settings, name, **how):
        self.made, self.calls = (handler, settings.consume_mode, name, how["takes_batch"]), []

    def begin(self, wait_s):
        self.calls.append(("begin", wait_s))
        return True

    def suspend(self, *, suspended):
        self.calls.append(("suspend", suspended))

    def status(self):
        return {"instance": self.made[2]}

    def stop(self, wait_s):
        self.calls.append(("stop", wait_s))
        return True


def shared_listener(shipped, *, make_shared) -> Listener:
    settings = PushSettings("billing", (Subscription.parse("orders"),), consume_mode="share")
    return Listener(shipped, settings, instance=Instance("pull-billing-0", "key", ()), make_shared=make_shared)


@pytest.mark.parametrize("restarted", [False, True])
def test_in_the_mode_share_the_process_serves_itself(monkeypatch, restarted):
    made: list[SharedFake] = []

    def make_shared(*args, **how):
        made.append(SharedFake(*args, **how))
        return made[-1]

    monkeypatch.setattr(listener_module, "was_restarted", lambda: restarted)
    actor = shared_listener(ship(print, takes_batch=False), make_shared=make_shared)
    [instance] = made
    assert instance.made == (print, "share", "pull-billing-0", False)
    assert instance.calls == ([("begin", 0.0)] if restarted else [])
    instance.calls.clear()
    assert actor.begin_shared(2.0)
    actor.suspend_shared(True)
    assert actor.shared_status() == {"instance": "pull-billing-0"}
    assert actor.stop_shared(2.0)
    assert instance.calls == [("begin", 2.0), ("suspend", True), ("stop", 2.0)]


def test_in_the_mode_share_a_listener_that_cannot_be_loaded_says_so_and_stops(monkeypatch):
    monkeypatch.setattr(listener_module, "was_restarted", lambda: True)
    broken = replace(ship(print, takes_batch=False), payload=pickle.dumps(print)[:-5])
    actor = shared_listener(broken, make_shared=SharedFake)
    assert "Traceback" in actor.ready()
    with pytest.raises(ListenerError, match="could not be loaded"):
        actor.begin_shared(2.0)
    assert actor.stop_shared(2.0)


def test_state_of_the_pull_actor_is_kept():
    made = listener(print)
    assert made.kept() is None
    made.keep((True, frozenset()))
    assert made.kept() == (True, frozenset())


class StampingHook:
    def before(self, context):
        context.properties["begun"] = True

    def after(self, context):
        assert context.properties["begun"]
        print("after", context.group, context.success)


def test_hooks_are_shipped_with_the_listener_and_invalid_hooks_are_refused(capsys):
    made = listener(print, (ship_hook(StampingHook()),))
    assert made.ready() == ""
    made._tasks.begin(TaskBatch(1, 1, (task_of(b"a"),)))
    out = ""

    def has_come() -> bool:
        nonlocal out
        out += capsys.readouterr().out
        return "after billing True" in out

    eventually(has_come, "the hook's call", WAIT_S)
    for thing in (print, None, object()):
        with pytest.raises(ListenerError, match="must have the methods before"):
            ship_hook(thing)
