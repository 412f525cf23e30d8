"""Tests of the states of a queue that is assigned to a consumer: the transition table contains exactly the transitions
that the code makes."""

from __future__ import annotations

import pytest

from raymq.client.consumer.assignment.assigned_queue import (
    ASSIGNMENT_TRANSITIONS,
    AssignedQueue,
    AssignmentEvent,
    AssignmentState,
)
from raymq.client.consumer.pull.assigned_message_queue import AssignedMessageQueue
from raymq.common.message import MessageQueue
from raymq.common.protocol.group import QueueOffset
from tests.support.clients.records import fetched_of

LIVE = [state for state in AssignmentState if state is not AssignmentState.RELEASED]


def queue_in(state: AssignmentState) -> AssignedQueue:
    return AssignedMessageQueue(MessageQueue("orders", "a", 0), 1, state)


def test_every_state_has_its_row_and_can_be_reached():
    assert set(ASSIGNMENT_TRANSITIONS) == set(AssignmentState)
    reached = {AssignmentState.STARTING}
    for _ in AssignmentState:
        reached |= {after for state in reached for after in ASSIGNMENT_TRANSITIONS[state].values()}
    assert reached == set(AssignmentState)


def test_the_group_may_grant_revoke_and_take_a_queue_away_in_every_state_but_the_last():
    for state in LIVE:
        events = {AssignmentEvent.GRANT, AssignmentEvent.REVOKE, AssignmentEvent.LOSE}
        assert events <= set(ASSIGNMENT_TRANSITIONS[state])
        assert ASSIGNMENT_TRANSITIONS[state][AssignmentEvent.LOSE] is AssignmentState.RELEASED
    assert ASSIGNMENT_TRANSITIONS[AssignmentState.RELEASED] == {}, "a new grant is a new assignment"


def test_only_revoked_queues_are_released_and_only_a_starting_one_is_started():
    def having(event: AssignmentEvent) -> list[AssignmentState]:
        return [state for state, row in ASSIGNMENT_TRANSITIONS.items() if event in row]

    assert having(AssignmentEvent.RELEASE) == [AssignmentState.WITHDRAWN, AssignmentState.REVOKED]
    assert having(AssignmentEvent.START) == [AssignmentState.STARTING]


@pytest.mark.parametrize("state", AssignmentState)
@pytest.mark.parametrize("event", AssignmentEvent)
def test_state_changes_follow_the_transition_table(state, event):
    assigned, following = queue_in(state), ASSIGNMENT_TRANSITIONS[state].get(event)
    if following is None:
        with pytest.raises(AssertionError, match="cannot happen"):
            assigned.change(event)
        following = state
    else:
        assigned.change(event)
    assert assigned.state is following


def test_a_started_queue_goes_through_its_states():
    assigned = AssignedMessageQueue(MessageQueue("orders", "a", 0), 1)
    assigned.start(QueueOffset(7, 2))
    assert (assigned.position, assigned.committed, assigned.reset_version) == (7, 7, 2)
    assigned.fetched(fetched_of([7, 8]))
    assigned.revoke(5.0)
    assert (assigned.revoked, assigned.silent, assigned.buffered_count, assigned.revoked_at_s) == (True, True, 0, 5.0)
    assigned.grant(2)
    assert (assigned.state, assigned.generation, assigned.fetch_offset) == (AssignmentState.STARTED, 2, 7)
    assert assigned.revoked_at_s is None


def test_a_queue_revoked_before_its_start_starts_again_when_granted():
    assigned = queue_in(AssignmentState.STARTING)
    assigned.revoke(5.0)
    assert (assigned.revoked, assigned.started, assigned.dirty) == (True, False, False)
    assigned.grant(2)
    assert assigned.state is AssignmentState.STARTING
