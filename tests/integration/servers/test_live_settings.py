"""Tests of live settings in a whole cluster. Commands and actor handles set them, they take effect at once, and they
survive restarts of actors."""

from __future__ import annotations

import json

import pytest
import ray
from click.testing import CliRunner

import raymq
from raymq.common.errors import ConfigError, InvalidArgumentError
from raymq.common.names import NAMESPACE
from raymq.remoting import route_cache
from raymq.tools.cli import cli
from tests.support.clusters.cluster import SERVER_SETTINGS, kill_actors
from tests.support.history.waiting import eventually

SETTINGS = SERVER_SETTINGS


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def effective(mq: raymq.Client, name: str) -> dict[str, object]:
    return {group: config.effective[name] for group, config in mq.admin.config().items()}


def test_a_changed_setting_applies_in_all_servers_and_is_shown(mq: raymq.Client) -> None:
    configs = mq.admin.set_config("fileReservedTime", 50)
    assert {group: (config.changed, config.behind) for group, config in configs.items()} == {
        group: ({"store.file_reserved_time_hours": 50}, ()) for group in ("broker-a", "broker-b")
    }
    shown = json.loads(run("config", "show", "--json"))["settings"]
    assert [(row["broker"], row["setting"], row["value"]) for row in shown] == [
        (group, "store.file_reserved_time_hours", "50") for group in ("broker-a", "broker-b")
    ]
    told = ray.get(ray.get_actor("broker-b", namespace=NAMESPACE).status.remote(), timeout=30)
    assert told["settings"] == {"store.file_reserved_time_hours": 50}
    assert run("config", "get", "store.file_reserved_time_hours") == "broker-a 50\nbroker-b 50\n"


def test_a_change_takes_effect_at_once(mq: raymq.Client) -> None:
    mq.admin.set_config("auto_create_topic_enable", False)
    with mq.producer() as producer, pytest.raises(raymq.RaymqError, match="made-by-no-producer"):
        producer.send(raymq.Message("made-by-no-producer", b"x"))
    run("config", "set", "auto_create_topic_enable", "true")
    with mq.producer() as producer:
        eventually(lambda: _sent(producer, "made-by-a-producer"), "a topic is made")
    assert mq.admin.unset_config("auto_create_topic_enable")["broker-a"].changed.keys() == {
        "store.file_reserved_time_hours"
    }


def _sent(producer: raymq.Producer, topic: str) -> bool:
    try:
        producer.send(raymq.Message(topic, b"x"))
    except raymq.RaymqError:
        return False
    return True


def test_changes_outlive_brokers_and_stores(mq: raymq.Client) -> None:
    mq.admin.set_config("max_msgs_num_batch", 7)
    for actor in ("Storage", "Broker"):
        kill_actors(actor)

    def all_back() -> bool:
        try:
            configs = mq.admin.config()
        except raymq.RaymqError:
            return False
        return len(configs) == 2 and not any(config.behind for config in configs.values())

    eventually(all_back, "brokers and stores are back")
    assert effective(mq, "store.max_msgs_num_batch") == {"broker-a": 7, "broker-b": 7}
    mq.admin.unset_config("max_msgs_num_batch")


def test_a_broker_group_that_is_not_writable_is_read_only(mq: raymq.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route_cache, "POLL_NAME_SERVER_INTERVAL_S", 1.0)
    topic = "of-both"
    mq.admin.create_topic(topic, queues=2)
    run("broker", "writable", "off", "broker-a")
    with mq.producer() as producer:

        def goes_to_b() -> bool:
            return {producer.send(raymq.Message(topic, b"x")).queue.broker_name for _ in range(4)} == {"broker-b"}

        eventually(goes_to_b, "all goes to broker-b")
        with pytest.raises(RuntimeError, match="broker_permission"):
            ray.get(ray.get_actor("broker-a", namespace=NAMESPACE).send.remote(topic, b"x"), timeout=30)
        run("broker", "writable", "on", "broker-a")
        seen: set[str] = set()

        def goes_to_both() -> bool:
            seen.add(producer.send(raymq.Message(topic, b"x")).queue.broker_name)
            return len(seen) == 2

        eventually(goes_to_both, "both take messages again")


def test_every_broker_group_is_checked(mq: raymq.Client) -> None:
    # The first `raymq check send` creates the topic for its messages, and the second finds this topic.
    for _ in range(2):
        checks = json.loads(run("check", "send", "--count", "5", "--json"))["checks"]
        assert [(row["broker"], row["sent"], row["failed"]) for row in checks] == [
            ("broker-a", 5, 0),
            ("broker-b", 5, 0),
        ]
        assert all(row["round_trip_ms"] >= row["send_ms"] > 0 for row in checks)
    result = CliRunner().invoke(cli, ["check", "send", "--topic", "of-both", "--broker", "broker-z"])
    assert isinstance(result.exception, InvalidArgumentError)


def test_an_invalid_setting_is_refused_as_at_a_start(mq: raymq.Client) -> None:
    with pytest.raises(InvalidArgumentError, match="read only when raymq starts"):
        mq.admin.set_config("flush_disk_type", "SYNC_FLUSH")
    result = CliRunner().invoke(cli, ["config", "set", "delete_when", "99"])
    assert isinstance(result.exception, ConfigError)
    assert "store.delete_when: String should match" in str(result.exception)
    shown = json.loads(run("config", "show", "--json"))["settings"]
    assert {row["setting"] for row in shown} == {"store.file_reserved_time_hours"}
