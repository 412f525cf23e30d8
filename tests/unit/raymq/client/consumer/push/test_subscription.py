"""Tests of the handle of a running consumer instance. Its calls find the instance's Pull actor, wherever it runs, and
the end of the instance also ends its Listener."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import RuntimeEnvSetupError

from raymq.client.consumer.push import subscription as module
from raymq.client.consumer.push.hosting import Instance
from raymq.client.consumer.push.subscription import PushSubscription, RunningInstance, RunningSharedInstance
from raymq.common.errors import InvalidArgumentError, ListenerError, RequestTimeoutError, ServiceNotAvailableError
from raymq.remoting import actor_ref


class Cluster:
    """Fake cluster. Its Listener returns the Pull actor that hosts its instance, and its Pull actors answer or
    fail."""

    def __init__(self) -> None:
        self.places = ["pull-1"]
        self.calls: list[tuple] = []
        self.failures: dict[str, Exception] = {}
        self.answers: list[object] = []
        self.killed = 0
        self.instance = RunningInstance(
            Instance("pull-g-0", "key", ("broker-a",)),
            SimpleNamespace(hosted_by=SimpleNamespace(remote=lambda wait_s: self.place())),
        )

    def place(self) -> str:
        self.calls.append(("hosted_by",))
        return self.places.pop(0) if len(self.places) > 1 else self.places[0]

    def ref(self, name: str):
        return SimpleNamespace(name=name, call=lambda method, *args, timeout_s: self.call(name, method, *args))

    def call(self, name: str, method: str, *args):
        self.calls.append((name, method, *args))
        if name in self.failures:
            raise self.failures[name]
        return self.answers.pop(0) if self.answers else True

    def kill(self, listener, *, no_restart: bool) -> None:
        assert no_restart
        self.killed += 1


@pytest.fixture
def cluster(monkeypatch):
    cluster = Cluster()
    monkeypatch.setattr(module, "ActorRef", cluster.ref)
    monkeypatch.setattr(actor_ref, "resolve", lambda answer, what, timeout_s: answer)
    monkeypatch.setattr(module.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(module.ray, "kill", cluster.kill)
    return cluster


def test_the_pull_actor_of_an_instance_is_looked_up_once(cluster):
    cluster.instance.wait_running(60.0)
    cluster.instance.call("suspend")
    cluster.instance.call("resume")
    assert cluster.calls == [("hosted_by",), ("pull-1", "suspend", "pull-g-0"), ("pull-1", "resume", "pull-g-0")]


def test_a_call_finds_the_pull_actor_that_hosts_it_now(cluster):
    cluster.instance.wait_running(60.0)
    cluster.failures["pull-1"] = ServiceNotAvailableError("its node is gone")
    cluster.places = ["", "pull-2"]
    cluster.instance.call("suspend")
    assert cluster.calls[-1] == ("pull-2", "suspend", "pull-g-0")


def test_a_call_that_nobody_takes_fails_in_the_end(cluster):
    cluster.places = [""]
    with pytest.raises(ServiceNotAvailableError, match="no Pull actor hosts instance pull-g-0"):
        cluster.instance.call("suspend", timeout_s=0.05)


def test_an_instance_that_nobody_hosts_in_time_does_not_run(cluster):
    cluster.places = [""]
    with pytest.raises(RequestTimeoutError, match="pull-g-0"):
        cluster.instance.wait_running(0.02)


def test_stop_calls_are_repeated_until_the_instance_has_finished(cluster):
    cluster.instance.wait_running(60.0)
    cluster.answers = [False, False, True]
    assert cluster.instance.stop(60.0) == ""
    assert [call[1] for call in cluster.calls[1:]] == ["stop"] * 3
    assert cluster.killed == 1


def test_an_instance_that_does_not_finish_is_killed_and_reported(cluster):
    cluster.instance.wait_running(60.0)
    cluster.answers = [False]
    assert "did not finish within -1 s" in cluster.instance.stop(-1.0)
    assert cluster.killed == 1


def test_the_end_of_requests_is_asked_for_again_while_ray_restarts_the_listener(cluster):
    answers = [ServiceNotAvailableError("the actor is restarting"), False, True]

    def stop_requests(wait_s: float) -> object:
        cluster.calls.append(("stop_requests",))
        return answers.pop(0)

    def resolve(answer, what, timeout_s):
        if isinstance(answer, Exception):
            raise answer
        return answer

    listener = SimpleNamespace(
        hosted_by=SimpleNamespace(remote=lambda wait_s: cluster.place()),
        begin_requests=SimpleNamespace(remote=lambda wait_s: ""),
        stop_requests=SimpleNamespace(remote=stop_requests),
    )
    instance = RunningInstance(Instance("pull-g-0", "key", ("broker-a",)), listener, answers_requests=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actor_ref, "resolve", resolve)
        instance.wait_running(60.0)
        instance.wait_requests(60.0)
        assert instance.stop(60.0) == ""
    assert [call[0] for call in cluster.calls] == ["hosted_by", *["stop_requests"] * 3, "pull-1"]
    assert cluster.killed == 1


def test_one_that_never_began_is_hosted_by_nobody_for_its_end(cluster):
    assert cluster.instance.stop(60.0) == ""
    assert cluster.calls == []
    assert cluster.killed == 1


def test_a_runtime_env_that_cannot_be_set_up_is_an_error_of_the_listener(monkeypatch):
    report = RuntimeEnvSetupError("pip failed:\nno package named 'nopackage'")

    def get(answer, timeout):
        raise report

    monkeypatch.setattr(ray, "get", get)
    listener = SimpleNamespace(ready=SimpleNamespace(remote=lambda: "reference"))
    subscription = PushSubscription("g", lambda closed: None)
    subscription.instances.append(RunningInstance(Instance("pull-g-0", "key", ("broker-a",)), listener))
    with pytest.raises(ListenerError, match=r"(?s)cannot load listener shop\.count: .*no package named 'nopackage'"):
        subscription.wait_loaded("shop.count", 1.0)


class SharedListener:
    """Fake Listener of an instance in the mode "share"."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.connected = [False, True]
        self.stopped = [False, True]

    def __getattr__(self, method: str):
        return SimpleNamespace(remote=lambda *args: self._answer(method, *args))

    def _answer(self, method: str, *args):
        self.calls.append((method, *args))
        answers = {"begin_shared": self.connected, "stop_shared": self.stopped}.get(method)
        if answers:
            answer = answers.pop(0) if len(answers) > 1 else answers[0]
            if isinstance(answer, Exception):
                raise answer
            return answer
        return {"listener_away": "no NameServer"} if method == "shared_status" else None


@pytest.fixture
def shared(cluster) -> tuple[SharedListener, RunningSharedInstance]:
    listener = SharedListener()
    return listener, RunningSharedInstance(Instance("pull-g-0", "key", ("broker-a",)), listener)


def test_a_shared_instance_is_served_by_its_listener_alone(cluster, shared):
    listener, instance = shared
    instance.wait_running(60.0)
    assert instance.call("instance_status") == {"listener_away": "no NameServer"}
    instance.call("suspend")
    instance.call("resume")
    assert instance.stop(60.0) == ""
    methods = [call[0] for call in listener.calls]
    assert methods[:3] == ["begin_shared", "begin_shared", "shared_status"]
    assert listener.calls[3:5] == [("suspend_shared", True), ("suspend_shared", False)]
    assert methods[5:] == ["stop_shared", "stop_shared"]
    assert (cluster.calls, cluster.killed) == ([], 1)


def test_the_end_of_a_shared_instance_is_asked_for_again_while_ray_restarts_the_listener(cluster, shared):
    listener, instance = shared
    instance.wait_running(60.0)
    listener.stopped = [ServiceNotAvailableError("the actor is restarting"), False, True]
    assert instance.stop(60.0) == ""
    assert [call[0] for call in listener.calls].count("stop_shared") == 3
    assert cluster.killed == 1


def test_a_shared_instance_that_does_not_connect_says_why(shared):
    listener, instance = shared
    listener.connected = [False]
    with pytest.raises(RequestTimeoutError, match="no NameServer"):
        instance.wait_running(0.0)


def test_a_shared_instance_that_does_not_finish_is_killed_all_the_same(cluster, shared):
    listener, instance = shared
    instance.wait_running(60.0)
    listener.stopped = [False]
    assert instance.stop(0.0) == "instance pull-g-0 did not finish within 0 s"
    assert cluster.killed == 1


def test_a_shared_instance_has_no_queues_to_pause(shared):
    with pytest.raises(InvalidArgumentError, match="has no queues of its own to pause or resume"):
        shared[1].call("pause_queues", [])
