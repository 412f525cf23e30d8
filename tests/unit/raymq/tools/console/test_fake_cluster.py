"""Tests that the methods of FakeCluster take the same arguments as the methods of Admin, Producer and ClusterControl,
and that FakeCluster has no other methods."""

from __future__ import annotations

from inspect import getmembers, isfunction, signature

import pytest

from raymq.client.admin.admin import Admin
from raymq.client.admin.dead_letters import DeadLetters
from raymq.client.producer.producer import Producer
from raymq.tools.console.cluster import ClusterControl
from tests.support.console.fake_cluster import FakeCluster, FakeLetters


def calls(kind: type) -> dict[str, object]:
    return {name: call for name, call in getmembers(kind, isfunction) if not name.startswith("_")}


def parameters(call: object) -> list[tuple[str, object, object]]:
    return [(one.name, one.kind, one.annotation) for one in signature(call).parameters.values()]


FAKE = {name: call for name, call in calls(FakeCluster).items() if name != "console_cluster"}
WRITTEN_OUT = {name: call for name, call in FAKE.items() if call.__name__ == name}
"""Methods of FakeCluster that declare their own arguments. The other methods copy them from the real methods
(as_in)."""


def test_every_call_of_the_control_is_there():
    assert len(FAKE) > 25
    assert calls(ClusterControl).keys() <= FAKE.keys()


@pytest.mark.parametrize("name", sorted(WRITTEN_OUT))
def test_a_call_takes_the_same_arguments(name: str):
    real = next(calls(kind)[name] for kind in (ClusterControl, Admin, Producer) if name in calls(kind))
    assert parameters(FAKE[name]) == parameters(real)


@pytest.mark.parametrize("name", sorted(calls(FakeLetters)))
def test_dead_letters_take_the_same_arguments(name: str):
    assert parameters(calls(FakeLetters)[name]) == parameters(calls(DeadLetters)[name])
