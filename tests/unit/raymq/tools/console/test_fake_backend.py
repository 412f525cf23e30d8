"""FakeBackend answers the calls of the Backend protocol, no others, and with the same arguments."""

from __future__ import annotations

from inspect import getmembers, isfunction, signature

import pytest

from raymq.tools.console.backend.protocol import Backend
from tests.support.console.fake_backend import FakeBackend


def calls(kind: type) -> dict[str, object]:
    return {name: call for name, call in getmembers(kind, isfunction) if not name.startswith("_")}


def test_both_have_the_same_calls():
    assert len(calls(Backend)) > 25
    assert calls(FakeBackend).keys() == calls(Backend).keys()


@pytest.mark.parametrize("name", sorted(calls(Backend)))
def test_a_call_takes_the_same_arguments(name: str):
    assert signature(getattr(FakeBackend, name)) == signature(getattr(Backend, name))
