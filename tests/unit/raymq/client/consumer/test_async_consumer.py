"""Tests that the asyncio consumers have the methods of the blocking consumers, with the same signatures and
docstrings."""

from __future__ import annotations

import inspect

import pytest

from raymq.client.consumer.pull.async_consumer import AsyncPullConsumer
from raymq.client.consumer.pull.consumer import PullConsumer
from raymq.client.consumer.simple.async_consumer import AsyncSimpleConsumer
from raymq.client.consumer.simple.consumer import SimpleConsumer

TWINS = [(PullConsumer, AsyncPullConsumer), (SimpleConsumer, AsyncSimpleConsumer)]
AT_ONCE = {"unsubscribe", "assignment", "acknowledge", "position", "pause", "resume", "paused"}
"""Methods of AsyncPullConsumer that are plain methods, not coroutines, because they never block."""


def methods(kind: type) -> dict[str, object]:
    return {name: one for name, one in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


@pytest.mark.parametrize(("blocking", "awaiting"), TWINS, ids=lambda kind: kind.__name__)
def test_twins_have_the_same_methods_and_arguments(blocking: type, awaiting: type) -> None:
    ours, theirs = methods(awaiting), methods(blocking)
    assert ours.keys() == theirs.keys()
    for name, method in ours.items():
        assert inspect.signature(method) == inspect.signature(theirs[name]), name
        assert inspect.getdoc(method), f"help() says nothing about {name}"
        at_once = awaiting is AsyncPullConsumer and name in AT_ONCE
        assert inspect.iscoroutinefunction(method) is not at_once, name


@pytest.mark.parametrize(("kind", "name"), [(AsyncPullConsumer, "commit"), (AsyncSimpleConsumer, "ack")])
def test_an_awaited_method_has_the_docstring_of_its_twin(kind: type, name: str) -> None:
    blocking = {awaiting: twin for twin, awaiting in TWINS}[kind]
    assert inspect.getdoc(getattr(kind, name)) == inspect.getdoc(getattr(blocking, name))
