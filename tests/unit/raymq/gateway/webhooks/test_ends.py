"""Tests of the registration of result topics with web hooks, over brokers in memory."""

from __future__ import annotations

from typing import Any

import pytest

from raymq.common.errors import GroupNotExistError, RequestTimeoutError, SystemBusyError
from raymq.common.message import ConsumeFromWhere
from raymq.common.names import WEBHOOK_GROUP
from raymq.common.namespaces import NO_NAMESPACE
from raymq.common.protocol.group import GroupConfig, check_group_config
from raymq.common.protocol.route import TopicRoute
from raymq.gateway.webhooks import ends as module
from raymq.gateway.webhooks.ends import RESULT_TOPICS_MAX, TaskEnds, ends_of
from tests.support.clients.fakes import topic_route


class FakeBroker:
    """A broker with the topics in which the group has offsets; None if it does not have the group."""

    def __init__(self, name: str) -> None:
        self.name, self.is_away = name, False
        self.topics: list[str] | None = None

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        if self.is_away:
            raise RequestTimeoutError(method, timeout_s)
        if method == "group_topics":
            if self.topics is None:
                raise GroupNotExistError(WEBHOOK_GROUP)
            return [f"%RETRY%{WEBHOOK_GROUP}", *self.topics]
        assert method == "start_receiving"
        group, [topic], query = arguments
        assert (group, query.where) == (WEBHOOK_GROUP, ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET)
        self.topics = [*(self.topics or []), topic]
        return None


class FakeCluster:
    """A client of two broker groups."""

    names = NO_NAMESPACE

    def __init__(self) -> None:
        self.all = {name: FakeBroker(name) for name in ("a", "b")}
        self.routes = self.admin = self
        self.config: GroupConfig | None = None

    def brokers(self) -> dict[str, FakeBroker]:
        return self.all

    def get(self, topic: str) -> TopicRoute:
        return topic_route(topic, a=2, b=1)

    def group_config(self, group: str) -> GroupConfig:
        if self.config is None:
            raise GroupNotExistError(group)
        return self.config

    def create_group(self, config: GroupConfig) -> None:
        check_group_config(config)
        self.config = config


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    found = FakeCluster()
    monkeypatch.setattr(module, "broker_client", found.all.get)
    return found


def ends(cluster: FakeCluster) -> TaskEnds:
    return TaskEnds(cluster)  # type: ignore[arg-type]


def test_a_registered_topic_is_known_at_every_broker_and_an_operators_group_stays(cluster: FakeCluster) -> None:
    assert ends(cluster).topics() == set()
    ends(cluster).register("jobs-results")
    assert ends(cluster).topics() == {"jobs-results"}
    assert {name: broker.topics for name, broker in cluster.all.items()} == {
        "a": ["jobs-results"],
        "b": ["jobs-results"],
    }
    assert cluster.config is not None
    assert cluster.config.retry_max_times == len(cluster.config.retry_intervals_s) == 10
    cluster.config = own = GroupConfig(WEBHOOK_GROUP, retry_max_times=3)
    ends(cluster).register("other-results")
    assert cluster.config is own


def test_a_broker_that_is_away_hides_no_other_topics_but_refuses_a_registration(cluster: FakeCluster) -> None:
    ends(cluster).register("jobs-results")
    cluster.all["b"].is_away = True
    assert ends(cluster).topics() == {"jobs-results"}
    with pytest.raises(RequestTimeoutError):
        ends(cluster).register("other-results")


def test_the_number_of_topics_is_bounded(cluster: FakeCluster) -> None:
    cluster.all["a"].topics = [f"results-{number}" for number in range(RESULT_TOPICS_MAX)]
    with pytest.raises(SystemBusyError, match="64"):
        ends(cluster).register("one-more")
    ends(cluster).register("results-7")


def test_the_condition_of_ends_compiles() -> None:
    assert ends_of("jobs-results").sql == "KEYS STARTSWITH 'hook-' AND TAGS IN ('FAILURE', 'REVOKED', 'SUCCESS')"
