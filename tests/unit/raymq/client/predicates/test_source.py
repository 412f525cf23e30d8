"""Tests of reading a store through the process of a predicate, when this process cannot be started. Ray's functions are
replaced; the tests need no cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RaySystemError, RuntimeEnvSetupError

import raymq
from raymq.client.predicates import source
from raymq.client.predicates.scan import FetchFailed
from raymq.client.predicates.source import GroupPredicate
from raymq.common.errors import ServiceNotAvailableError
from raymq.common.protocol.store import FetchRequest


class Storage:
    """Fake client of a storage actor on another node."""

    name = "storage-broker-a-0"

    def reader(self) -> None:
        return None

    def describe(self) -> Any:
        return SimpleNamespace(broker_name="broker-a", node_id="a" * 56)


class Runners:
    """Fake of the actor class PredicateRunner. `errors`: the errors of the next starts."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.started = 0

    def options(self, **options: Any) -> Runners:
        return self

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        if self.errors:
            raise self.errors.pop()
        self.started += 1
        return SimpleNamespace(fetch=SimpleNamespace(remote=lambda *args: "reference"))


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> Runners:
    made = Runners()
    monkeypatch.setattr(source, "PredicateRunnerActor", made)
    return made


def storage_of_a_predicate() -> Any:
    predicate = raymq.predicate(lambda message: True, runtime_env={"pip": ["nopackage"]})
    return GroupPredicate("billing", predicate).read_from(Storage())  # type: ignore[arg-type]  # a fake


def test_a_runtime_env_that_cannot_be_set_up_fails_the_fetch_with_rays_report(
    monkeypatch: pytest.MonkeyPatch, runners: Runners
) -> None:
    def get(reference: Any, timeout: float) -> Any:
        raise RuntimeEnvSetupError("pip failed:\nno package named 'nopackage'")

    monkeypatch.setattr(ray, "get", get)
    storage = storage_of_a_predicate()
    for started in (1, 2):
        [result] = storage.fetch([FetchRequest("orders", 0, 17, 32)], 1 << 20, 0.0, 1.0)
        assert isinstance(result, FetchFailed)
        assert "no package named 'nopackage'" in str(result.error)
        assert result.next_offset == 17
        assert runners.started == started


def test_a_process_that_ray_does_not_start_is_an_error_of_raymq_and_is_started_again(
    monkeypatch: pytest.MonkeyPatch, runners: Runners
) -> None:
    monkeypatch.setattr(ray, "get", lambda reference, timeout: ["answer"])
    runners.errors = [RaySystemError("no connection to Ray")]
    storage = storage_of_a_predicate()
    with pytest.raises(ServiceNotAvailableError, match="starting the process of"):
        storage.fetch([FetchRequest("orders", 0, 17, 32)], 1 << 20, 0.0, 1.0)
    assert storage.fetch([FetchRequest("orders", 0, 17, 32)], 1 << 20, 0.0, 1.0) == ["answer"]
