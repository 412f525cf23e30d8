"""Tests of the questions about the settings of consumer groups: one broker that answers is enough."""

from __future__ import annotations

from typing import Any

import pytest

from raymq.common.errors import (
    AccessDeniedError,
    GroupNotExistError,
    RaymqError,
    RequestTimeoutError,
    ServiceNotAvailableError,
)
from raymq.common.protocol.group import GroupConfig
from raymq.gateway.service import cluster
from raymq.gateway.service.cluster import BrokersGroupSettings
from tests.support.clients.producers import Clock

AWAY = ServiceNotAvailableError("away")
CONFIG = GroupConfig("billing", retry_max_times=3)


class Brokers:
    """Brokers in memory. `answers`: the answer of each broker, or its error. `asked`: the brokers that were asked."""

    def __init__(self, **answers: GroupConfig | RaymqError) -> None:
        self.answers, self.asked = answers, list[str]()
        self.clock = Clock()
        self.settings = BrokersGroupSettings(lambda: list(answers), self._broker, self.clock)

    def _broker(self, name: str) -> Any:
        brokers = self

        class Broker:
            def call(self, method: str, group: str, *, timeout_s: float) -> GroupConfig:
                assert (method, group) == ("group_config", "billing")
                assert 0 < timeout_s <= cluster.GROUP_CALL_S
                brokers.asked.append(name)
                answer = brokers.answers[name]
                if isinstance(answer, RaymqError):
                    raise answer
                return answer

        return Broker()


def test_the_first_broker_that_has_the_group_answers_for_all() -> None:
    brokers = Brokers(b=CONFIG, a=CONFIG)
    assert brokers.settings.group_config("billing") == CONFIG
    assert brokers.asked == ["a"]
    brokers.answers["a"] = GroupNotExistError("billing")
    assert brokers.settings.group_config("billing") == CONFIG
    assert brokers.asked == ["a", "a", "b"]


@pytest.mark.parametrize("failure", [AWAY, RequestTimeoutError("a call", 5.0)])
def test_a_broker_that_is_away_is_asked_last_for_a_while(failure: RaymqError) -> None:
    brokers = Brokers(a=failure, b=CONFIG)
    for _ in range(3):
        assert brokers.settings.group_config("billing") == CONFIG
    assert brokers.asked == ["a", "b", "b", "b"]
    brokers.clock.now_s += cluster.GROUP_CALL_S + 1
    brokers.answers["a"] = CONFIG
    for _ in range(2):
        assert brokers.settings.group_config("billing") == CONFIG
    assert brokers.asked[4:] == ["a", "a"]


def test_a_group_that_no_answering_broker_has_does_not_exist() -> None:
    brokers = Brokers(a=GroupNotExistError("billing"), b=AWAY)
    with pytest.raises(GroupNotExistError):
        brokers.settings.group_config("billing")
    assert brokers.asked == ["a", "b"]


def test_brokers_are_asked_again_while_none_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = Brokers(a=AWAY)
    monkeypatch.setattr(cluster, "GROUP_PATIENCE_S", 0.3)
    with pytest.raises(ServiceNotAvailableError, match="away"):
        brokers.settings.group_config("billing")
    assert len(brokers.asked) > 1
    with pytest.raises(ServiceNotAvailableError, match="no broker is registered"):
        Brokers().settings.group_config("billing")


def test_a_refusal_is_final() -> None:
    brokers = Brokers(a=AccessDeniedError("ann", "Get on Group:billing", "no policy allows it"), b=CONFIG)
    with pytest.raises(AccessDeniedError):
        brokers.settings.group_config("billing")
    assert brokers.asked == ["a"]
