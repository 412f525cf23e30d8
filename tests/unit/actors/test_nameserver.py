"""Tests of the answers of a restarted NameServer before every broker has had time to register again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from actors import nameserver as module
from actors.nameserver import WARM_UP_S, NameServer
from raymq.common.errors import InvalidArgumentError, ServiceNotAvailableError, TopicNotExistError
from raymq.common.protocol.route import ORDER_TOPIC_CONFIG, BrokerRegistration, DataVersion, TopicChanges, TopicConfig


class Scene:
    """A NameServer at which one broker has registered, with a clock that the test sets."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, path: Path, *, restarted: bool, brokers: tuple[str, ...] = ()
    ) -> None:
        self.now_s = 1000.0
        context = SimpleNamespace(was_current_actor_reconstructed=restarted)
        monkeypatch.setattr(module.ray, "get_runtime_context", lambda: context)
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now_s)
        self.server = NameServer(str(path / "kv"), brokers)
        topics, version = (TopicConfig("orders", 1, 1),), DataVersion(0, 1, 1)
        self.server.register_broker(BrokerRegistration("raymq", "broker-a", {0: "storage-broker-a-0"}, topics, version))


def test_the_kv_configuration_is_in_its_file_and_order_topics_are_not(monkeypatch, tmp_path):
    server = Scene(monkeypatch, tmp_path, restarted=False).server
    server.put_kv("mine", "k", "v")
    config = TopicConfig("orders", 1, 1, order=True, order_config="broker-a:1")
    server.register_broker(
        BrokerRegistration("raymq", "broker-a", {0: "storage-broker-a-0"}, (config,), DataVersion(0, 2, 2))
    )
    with pytest.raises(InvalidArgumentError):
        server.put_kv(ORDER_TOPIC_CONFIG, "orders", "broker-a:1")
    again = Scene(monkeypatch, tmp_path, restarted=True).server
    for one, orders in ((server, "broker-a:1"), (again, None)):
        assert (one.get_kv("mine", "k"), one.list_kv("mine")) == ("v", {"k": "v"})
        assert one.get_kv(ORDER_TOPIC_CONFIG, "orders") == orders
    assert server.topic_route("orders").order_config == "broker-a:1"


@pytest.mark.parametrize("damage", ["{", "", None])
@pytest.mark.parametrize("name", ["kv", "kv.bak"])
def test_damage_to_one_copy_of_the_kv_configuration_loses_no_value(monkeypatch, tmp_path, name, damage):
    Scene(monkeypatch, tmp_path, restarted=False).server.put_kv("mine", "k", "v")
    if damage is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(damage)
    assert Scene(monkeypatch, tmp_path, restarted=True).server.get_kv("mine", "k") == "v"


def test_damage_to_both_copies_of_the_kv_configuration_is_kept_and_routes_are_served(monkeypatch, tmp_path):
    Scene(monkeypatch, tmp_path, restarted=False).server.put_kv("mine", "k", "v")
    for name in ("kv", "kv.bak"):
        (tmp_path / name).write_text("{")
    server = Scene(monkeypatch, tmp_path, restarted=True).server
    assert server.get_kv("mine", "k") is None
    assert server.topic_route("orders").topic == "orders"
    assert {path.name for path in tmp_path.iterdir()} == {"kv.damaged-1", "kv.bak.damaged-1"}


def test_a_first_nameserver_is_waited_for_by_who_starts_the_brokers(monkeypatch, tmp_path):
    server = Scene(monkeypatch, tmp_path, restarted=False).server
    assert list(server.all_brokers()) == ["broker-a"]
    with pytest.raises(TopicNotExistError):
        server.topic_route("nothing")


def test_a_restarted_nameserver_is_complete_only_after_the_warm_up(monkeypatch, tmp_path):
    scene = Scene(monkeypatch, tmp_path, restarted=True)
    for question in (scene.server.all_brokers, lambda: scene.server.topic_route("nothing")):
        with pytest.raises(ServiceNotAvailableError, match="was restarted and cannot yet"):
            question()
    assert list(scene.server.brokers()) == ["broker-a"]
    assert not scene.server.topic_route("orders").complete
    scene.now_s += WARM_UP_S
    assert list(scene.server.all_brokers()) == ["broker-a"]
    assert scene.server.topic_route("orders").complete
    with pytest.raises(TopicNotExistError):
        scene.server.topic_route("nothing")


def test_a_restarted_nameserver_does_not_answer_before_every_broker_registered(monkeypatch, tmp_path):
    """A restarted NameServer lacks the data of brokers that have not registered again. It raises an error for a request
    to whose answer such data may belong. It waits for these brokers without a time limit, because a broker may wait for
    its store for any time before it registers."""
    scene = Scene(monkeypatch, tmp_path, restarted=True, brokers=("broker-a", "broker-b"))
    scene.now_s += 10 * WARM_UP_S
    for question in (scene.server.all_brokers, lambda: scene.server.topic_route("other")):
        with pytest.raises(ServiceNotAvailableError, match="broker-b has not registered again"):
            question()
    topics = (TopicConfig("other", 1, 1),)
    scene.server.register_broker(
        BrokerRegistration("raymq", "broker-b", {0: "storage-broker-b-0"}, topics, DataVersion(0, 1, 1))
    )
    assert scene.server.topic_route("other").complete
    assert list(scene.server.all_brokers()) == ["broker-a", "broker-b"]
    with pytest.raises(TopicNotExistError):
        scene.server.topic_route("nothing")


def test_topic_routes_returns_only_known_routes(monkeypatch, tmp_path):
    scene = Scene(monkeypatch, tmp_path, restarted=True)
    routes = scene.server.topic_routes(["orders", "nothing"])
    assert list(routes) == ["orders"]
    assert not routes["orders"].complete
    scene.now_s += WARM_UP_S
    assert scene.server.topic_routes(["orders"])["orders"].complete


def test_changed_topics_are_known_at_once(monkeypatch, tmp_path):
    server = Scene(monkeypatch, tmp_path, restarted=False).server
    since, version = DataVersion(0, 1, 1), DataVersion(0, 2, 2)
    change = TopicChanges("broker-a", 0, since, version, (TopicConfig("new", 1, 1),))
    assert server.change_topics(change)
    assert server.broker_heartbeat("broker-a", version)
    assert server.topics() == ["new", "orders"]
