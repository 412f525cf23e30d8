"""Tests that raymq refuses functions that run none of their code when called, such as coroutine functions, wherever it
accepts a function."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest

import raymq
from raymq.client.producer.hooks import SendHooks
from raymq.client.transactions.producer import TransactionProducer
from raymq.common.errors import ConfigError, InvalidArgumentError
from raymq.common.shipping import deferred_kind
from storage.hooks.hook import find_hook


async def coroutine(argument: Any) -> None:
    """Stand-in for a user's coroutine function."""


def generator(argument: Any) -> Any:
    yield argument


async def async_generator(argument: Any) -> Any:
    yield argument


class Later:
    async def __call__(self, argument: Any) -> None:
        """Stand-in for the method `__call__` of a user's class. It is a coroutine function."""


class Plain:
    def __call__(self, argument: Any) -> None:
        """Stand-in for the method `__call__` of a user's class. It is a plain function."""


KINDS = [
    (coroutine, "a coroutine function"),
    (generator, "a generator function"),
    (async_generator, "an async generator function"),
    (functools.partial(functools.partial(coroutine)), "a coroutine function"),
    (Later(), "a coroutine function"),
    (functools.partial(Later()), "a coroutine function"),
    (Later().__call__, "a coroutine function"),
]


@pytest.mark.parametrize(("function", "kind"), KINDS)
def test_the_kind_of_a_function_that_runs_later_is_found(function: Any, kind: str) -> None:
    assert deferred_kind(function) == kind


@pytest.mark.parametrize("function", [print, Plain(), Plain().__call__, functools.partial(print), Plain, len, "".join])
def test_a_plain_function_has_no_such_kind(function: Any) -> None:
    assert deferred_kind(function) == ""


@pytest.mark.parametrize(("function", "kind"), KINDS)
def test_predicates_checks_and_send_hooks_refuse_it(function: Any, kind: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"is {kind}"):
        raymq.predicate(function, name="wanted")
    with pytest.raises(InvalidArgumentError, match=f"is {kind}"):
        TransactionProducer(None, function, routes=None, storage=None, brokers=None, client_id="c")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=f"is {kind}"):
        SendHooks("g", [], [function])
    with pytest.raises(InvalidArgumentError, match=f"is {kind}"):
        SendHooks("g", [SimpleNamespace(before_send=print, after_send=function)], [])


def test_a_stores_hooks_refuse_it() -> None:
    with pytest.raises(ConfigError, match="is a coroutine function, so calling it does not run its code"):
        find_hook(f"{__name__}:Later", "put_hooks")
