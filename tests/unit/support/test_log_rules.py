"""Tests that the rules of the chaos tests find each planted fault, and find nothing in the observations of a
log."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from raymq.common.message import MessageQueue
from tests.support.cases import chaos_seed
from tests.support.history.log_rules import RULES, check_log, planted, violations
from tests.support.history.observations import Observation, Seen

QUEUES = [MessageQueue("orders", "broker-a", number) for number in range(2)]
READERS = ("first", "second")


def of_a_log(rng: random.Random) -> list[Observation]:
    """Return observations of a log whose requests overlap at random."""
    made: list[Observation] = []
    ends = dict.fromkeys(QUEUES, 0)
    for step in range(200):
        queue, now_s = rng.choice(QUEUES), float(step)
        begin_s, end_s = now_s - rng.random() * 5, now_s + rng.random() * 5
        offset, ends[queue] = ends[queue], ends[queue] + 1
        body = b"%d of %d" % (offset, queue.queue_id)
        made.append(Observation(Seen.ACKNOWLEDGED, begin_s, end_s, queue, offset, body))
        made += [Observation(Seen.READ, now_s, end_s, queue, offset, body, reader) for reader in READERS]
        made.append(Observation(Seen.TAIL, begin_s, end_s, queue, ends[queue]))
        made.append(Observation(Seen.COMMITTED, begin_s, end_s, queue, offset, actor="workers"))
    rng.shuffle(made)
    return made


def test_the_observations_of_a_log_have_no_violation_and_each_planted_fault_is_found():
    seed = chaos_seed()
    check_log(of_a_log(random.Random(seed)), random.Random(seed))


@pytest.mark.parametrize("rule", RULES)
def test_a_planted_fault_violates_its_rule(rule):
    rng = random.Random(chaos_seed())
    assert rule in violations(planted(of_a_log(rng), rule, rng))


def test_a_fault_of_no_rule_is_refused():
    with pytest.raises(ValueError, match="there is no rule 'lost'"):
        planted(of_a_log(random.Random(1)), "lost", random.Random(1))


def test_requests_that_overlap_in_time_contradict_nothing():
    late = Observation(Seen.TAIL, 0.0, 9.0, QUEUES[0], 7)
    early = Observation(Seen.TAIL, 8.0, 10.0, QUEUES[0], 3)
    assert violations([late, early]) == {}
    assert list(violations([late, replace(early, begin_s=9.5)])) == ["end went back"]


def test_a_read_message_stays_before_the_end():
    read = Observation(Seen.READ, 0.0, 1.0, QUEUES[0], 4, b"a", "first")
    assert violations([read, Observation(Seen.TAIL, 2.0, 3.0, QUEUES[0], 5)]) == {}
    assert list(violations([read, Observation(Seen.TAIL, 2.0, 3.0, QUEUES[0], 4)])) == ["end went back"]


def test_a_message_that_comes_again_is_no_violation():
    reads = [
        Observation(Seen.READ, at_s, at_s, QUEUES[0], offset, b"%d" % offset, "first")
        for at_s, offset in enumerate([4, 5, 4, 5, 6])
    ]
    assert violations(reads) == {}
