"""Tests of choosing the replica from which a consumer reads a queue."""

from __future__ import annotations

import pytest

from raymq.client.consumer.pull_from_which_node import AVOID_S, STAY_S, PullFromWhichNode
from raymq.common.message import MessageQueue

QUEUE, OTHER = MessageQueue("orders", "a", 0), MessageQueue("orders", "a", 1)
ALL = ("master", "slave-1", "slave-2")


@pytest.fixture
def which():
    return PullFromWhichNode()


def test_the_master_is_read_unless_an_answer_suggests_another_replica(which):
    assert which.choose(QUEUE, ALL, 0.0) == "master"
    assert not which.answered(QUEUE, "master", "", 0.0)
    assert which.choose(QUEUE, ALL, 1.0) == "master"


def test_the_suggested_replica_serves_only_its_queue_and_sends_the_reader_back(which):
    assert which.answered(QUEUE, "master", "slave-2", 0.0)
    assert which.choose(QUEUE, ALL, 0.1) == "slave-2"
    assert which.choose(OTHER, ALL, 0.1) == "master"
    assert not which.answered(QUEUE, "slave-2", "", 0.1)
    assert which.answered(QUEUE, "slave-2", "master", 0.2)
    assert which.choose(QUEUE, ALL, 0.3) == "master"


def test_a_slave_is_asked_while_the_master_fails_and_the_next_one_when_that_fails_too(which):
    which.failed("master", 0.0)
    assert which.choose(QUEUE, ALL, 0.1) == "slave-1"
    which.failed("slave-1", 0.2)
    assert which.choose(QUEUE, ALL, 0.3) == "slave-2"
    which.failed("slave-2", 0.4)
    # All replicas have failed, so `choose` returns the replica whose failure was the earliest.
    assert which.choose(QUEUE, ALL, 0.5) == "master"


def test_without_slaves_a_master_that_fails_is_asked_again(which):
    which.failed("master", 0.0)
    assert which.choose(QUEUE, ("master",), 0.1) == "master"


def test_a_failed_master_is_avoided_for_a_while_despite_a_slaves_answer(which):
    which.failed("master", 0.0)
    assert which.answered(QUEUE, "slave-1", "master", 1.0)
    assert which.choose(QUEUE, ALL, 1.0) == "slave-1"
    assert which.answered(QUEUE, "slave-1", "master", AVOID_S)
    assert which.choose(QUEUE, ALL, AVOID_S) == "master"


def test_a_slave_without_contact_to_the_master_keeps_a_reader_for_a_while(which):
    which.failed("master", 0.0)
    assert not which.answered(QUEUE, "slave-1", "", 1.0)
    assert which.choose(QUEUE, ALL, AVOID_S + 1.0) == "slave-1"
    assert not which.answered(QUEUE, "slave-1", "", STAY_S)
    assert which.answered(QUEUE, "slave-1", "", STAY_S + 1.0)
    assert which.choose(QUEUE, ALL, STAY_S + 1.0) == "master"


def test_a_broker_that_answers_is_no_longer_avoided(which):
    which.failed("master", 0.0)
    which.answered(OTHER, "master", "", 1.0)
    assert which.choose(QUEUE, ALL, 1.0) == "master"


def test_a_name_that_is_no_replica_now_is_not_asked(which):
    which.answered(QUEUE, "master", "slave-3", 0.0)
    assert which.choose(QUEUE, ALL, 0.1) == "master"


def test_remembered_replicas_expire(which):
    for number in range(1000):
        which.answered(MessageQueue("orders", "a", number), "master", "slave-1", number * STAY_S)
    assert len(which._preferred) == 1
