"""Tests of a process's user, with whose rights the process calls raymq. A process has one user at a time. The user can
change after all objects that act for this user have released the user."""

from __future__ import annotations

import pytest

from raymq.common import identity
from raymq.common.errors import ClientStateError
from raymq.common.identity import Identity, acting_as

ALICE, BOB = Identity("alice", b"a" * 32), Identity("bob", b"b" * 32)


@pytest.fixture(autouse=True)
def nobody():
    assert identity.present() is None
    yield
    assert identity.present() is None


def test_a_process_acts_as_a_user_until_the_last_one_gives_it_back():
    with acting_as(ALICE):
        with acting_as(Identity("alice", b"a" * 32)):
            assert identity.present() == ALICE
        assert identity.present() == ALICE
    assert identity.present() is None


@pytest.mark.parametrize("other", [BOB, Identity("alice", b"x")])
def test_no_other_user_may_act_at_the_same_time(other):
    with acting_as(ALICE):
        with pytest.raises(ClientStateError, match="acts as user 'alice'"):
            identity.take(other)
        with pytest.raises(ClientStateError) as refused:
            identity.take(other)
        wanted = (
            "acts as 'bob'" if other is BOB else "with another secret: close all clients of this process before it uses"
        )
        assert wanted in str(refused.value)
        identity.give_back(other)  # the process has another identity than `other`, so releasing `other` changes nothing
        assert identity.present() == ALICE
    with acting_as(other):
        assert identity.present() == other


def test_a_user_ends_with_its_task_though_the_task_fails():
    with pytest.raises(ZeroDivisionError), acting_as(ALICE):
        raise ZeroDivisionError
    assert identity.present() is None


def test_without_a_user_nothing_changes():
    with acting_as(None):
        assert identity.present() is None


def test_a_key_is_not_printed():
    assert "aaa" not in repr(ALICE)
