"""Tests of a pull consumer's decisions about assigned and revoked queues, and about the messages to read, return and
commit."""

from __future__ import annotations

import pytest

from raymq.client.consumer.assignment.assigned_queues import FENCE_AFTER_S
from raymq.client.consumer.pull.fetched_records import FetchedRecords
from raymq.client.consumer.pull.settings import PullSettings
from raymq.client.consumer.pull.subscription_state import SubscriptionState
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import ClientStateError, InvalidArgumentError, NoPermissionError
from raymq.common.message import MessageQueue
from raymq.common.protocol.group import CommitAnswer, OffsetCommit, QueueOffset
from raymq.common.protocol.membership import GroupAssignment
from tests.support.clients.records import RECORD_BYTES, fetched_of, offsets_of

Q0, Q1, Q2 = (MessageQueue("orders", "a", number) for number in range(3))


def make(*queues: MessageQueue, start: int = 0, **settings) -> SubscriptionState:
    """Return the state of a consumer that subscribes to `orders` and holds `queues` from offset `start` on, in
    generation 1."""
    core = SubscriptionState(PullSettings("billing", **settings), 0.0)
    core.subscribe(Subscription.parse("orders"))
    grant(core, *queues)
    start_all(core, start)
    return core


def start_all(core: SubscriptionState, start: int) -> None:
    for assigned in core.starting():
        core.started(assigned, QueueOffset(start))


def starting(core: SubscriptionState) -> dict[MessageQueue, int]:
    """Return the assigned queues whose start offset is unknown, each with the generation that granted the
    queue."""
    return {assigned.queue: assigned.generation for assigned in core.starting()}


def grant(
    core: SubscriptionState, *queues: MessageQueue, generation: int = 1, at_s: float = 0.0, resets: int = 0
) -> None:
    core.assignment_received(GroupAssignment(generation, frozenset(queues), 1, resets), at_s)


def fetch(core: SubscriptionState, queue: MessageQueue, *offsets: int, next_offset: int | None = None) -> bool:
    """Complete a queue's pending fetch with messages at the given offsets."""
    return fetch_run(core, queue, fetched_of(offsets, next_offset))


def fetch_run(core: SubscriptionState, queue: MessageQueue, run: FetchedRecords) -> bool:
    offset = core.wanted()[queue]
    core.request(queue, offset)
    return core.fetched(queue, offset, run)


def room(core: SubscriptionState, queue: MessageQueue) -> int:
    return core.request(queue, core.wanted()[queue]).max_messages


def poll(core: SubscriptionState, max_messages: int = 500, now_s: float = 0.0) -> list[tuple[int, int]]:
    """Poll once. Returns the queue id and offset of each message."""
    core.poll_begins(now_s)
    returned = []
    for part in core.peek(max_messages):
        assert core.is_current(part)
        offsets = offsets_of(part)
        returned += [(part.queue.queue_id, offset) for offset in offsets]
        core.taken(part, offsets)
    core.poll_ends(now_s)
    return returned


def commit(core: SubscriptionState, **refusals) -> dict[MessageQueue, int]:
    """Commit the offsets of finished messages, and simulate the brokers' answer: they accept the commit, except for the
    queues in `refusals`."""
    return core.commit_answered(core.uncommitted(), CommitAnswer(**refusals))


def wishes(core: SubscriptionState) -> dict[MessageQueue, int | None]:
    return {queue: commit.queue_offset for queue, commit in core.uncommitted().items()}


# Tests of assigned and revoked queues


def test_a_granted_queue_is_held_once_its_start_is_known():
    core = make()
    grant(core, Q0)
    assert starting(core) == {Q0: 1}
    assert core.assigned_queues == []
    assert core.holding == {Q0}, "others must not get it meanwhile"
    start_all(core, 7)
    assert core.assigned_queues == [Q0]
    assert core.get(Q0).position == 7
    assert core.wanted() == {Q0: 7}


def test_a_start_that_comes_when_the_queue_is_not_granted_any_more_counts_for_nothing():
    core = make()
    grant(core, Q0)
    [assigned] = core.starting()
    grant(core, generation=2)
    core.started(assigned, QueueOffset(7))
    assert (core.assigned_queues, core.holding) == ([], {Q0})
    assert core.release(0.0) == [Q0], "others wait for it"
    grant(core, Q0, generation=3)
    core.started(assigned, QueueOffset(7))
    assert starting(core) == {Q0: 3}, "nor does it count for the next assignment"


def test_queues_of_topics_without_a_subscription_are_not_taken():
    core = make()
    grant(core, MessageQueue("other", "a", 0))
    assert starting(core) == {}


def test_a_revoked_queue_is_held_until_the_program_has_finished_and_committed():
    core = make(Q0, Q1)
    fetch(core, Q0, 0, 1, 2)
    assert poll(core, 2) == [(0, 0), (0, 1)]
    grant(core, Q1, generation=2)
    assert core.release(0.0) == []
    assert core.holding == {Q0, Q1}
    assert core.assigned_queues == [Q1]
    assert not core.commit_is_urgent(), "the program may still work on what the poll returned"
    assert poll(core) == [], "nothing of it is returned any more"
    assert core.release(0.0) == [], "not before the commit"
    assert core.commit_is_urgent()
    assert core.uncommitted() == {Q0: OffsetCommit(2, 1, 0)}, "by the generation that was the owner"
    commit(core)
    assert core.release(0.0) == [Q0]
    assert core.holding == {Q1}


def test_a_revoked_queue_is_released_at_the_next_poll_without_auto_commit():
    core = make(Q0, auto_commit=False)
    fetch(core, Q0, 0, 1, 2)
    poll(core)
    grant(core, generation=2)
    assert core.release(0.0) == []
    core.finish({Q0: 1})
    assert wishes(core) == {Q0: 1}
    commit(core)
    assert core.release(0.0) == [], "only a poll, or a commit of all, says that the program has finished"
    poll(core)
    assert core.release(0.0) == [Q0]


def test_a_queue_granted_again_before_its_release_keeps_its_position():
    core = make(Q0)
    fetch(core, Q0, 0, 1, 2)
    poll(core, 1)
    grant(core, generation=2)
    grant(core, Q0, generation=3)
    assert starting(core) == {}
    assert core.wanted() == {Q0: 1}
    fetch(core, Q0, 1, 2)
    assert poll(core) == [(0, 1), (0, 2)]
    assert core.uncommitted() == {Q0: OffsetCommit(1, 3, 0)}


def test_without_an_answer_for_too_long_everything_is_given_up():
    core = make(Q0)
    fetch(core, Q0, 0)
    grant(core, Q0, Q1, at_s=100.0)
    [late] = core.starting()
    assert not core.fence(100.0 + FENCE_AFTER_S)
    assert core.fence(100.1 + FENCE_AFTER_S)
    assert core.holding == frozenset()
    assert core.peek(1) == []
    assert core.uncommitted() == {}
    core.started(late, QueueOffset(0))
    assert core.holding == frozenset()
    assert not core.fence(200.0), "once"


def test_a_fenced_queue_is_let_go_and_taken_again_only_in_a_newer_generation():
    core = make(Q0, Q1)
    fetch(core, Q0, 0)
    poll(core)
    poll(core)
    assert commit(core, fenced=frozenset({Q0})) == {}
    assert core.holding == {Q1}
    grant(core, Q0, Q1)
    assert starting(core) == {}
    grant(core, Q0, Q1, generation=2)
    assert starting(core) == {Q0: 2}


def test_a_refusal_from_before_a_new_grant_is_ignored():
    core = make(Q0)
    core.seek(Q0, 1)
    under_way = core.uncommitted()
    core.lose_all()
    grant(core, Q0, generation=3)
    start_all(core, 5)
    core.commit_answered(under_way, CommitAnswer(fenced=frozenset({Q0})))
    assert core.assigned_queues == [Q0]


def test_a_forbidden_queue_is_kept_and_continues_where_it_stopped():
    core = make(Q0, Q1)
    fetch(core, Q0, 0, 1)
    assert poll(core, 1) == [(0, 0)]
    core.pause([Q1])
    core.commit_answered(core.reset_queries(), CommitAnswer(stopped={Q0: "forbidden to read", Q1: "forbidden to read"}))
    assert (core.assigned_queues, core.holding) == ([Q0, Q1], frozenset({Q0, Q1}))
    assert (core.peek(10), core.wanted(), core.all_forbidden) == ([], {}, True)
    assert {queue: str(error) for queue, error in core.forbidden.items()} == dict.fromkeys(
        (Q0, Q1), "forbidden to read"
    )
    assert not core.waits_for_broker()
    grant(core, Q0, Q1, generation=1)  # the queues are granted again with the same generation as before
    assert core.all_forbidden
    assert poll(core) == []  # this poll also marks the messages of the previous poll as finished by the program
    assert commit(core, stopped={Q0: "forbidden to read"}) == {Q0: 1}
    core.commit_answered(core.reset_queries(), CommitAnswer())
    assert (core.wanted(), core.paused, dict(core.forbidden)) == ({Q0: 1}, [Q1], {})


def test_a_queue_that_was_forbidden_before_it_began_waits_for_its_start_offset():
    core = make()
    grant(core, Q0, Q1)
    [first, second] = core.starting()
    assert core.forbid(first, NoPermissionError("no"))
    assert not core.forbid(first, NoPermissionError("no")), "known"
    assert (core.starting(forbidden=False), core.starting()) == ([second], [first, second])
    assert core.waits_for_broker()
    core.started(second, QueueOffset(0))
    assert not core.waits_for_broker(), "it is asked for at its time only"
    core.started(first, QueueOffset(5))
    assert (core.wanted(), dict(core.forbidden)) == ({Q0: 5, Q1: 0}, {})


def test_a_reset_of_a_queue_that_is_forbidden_counts_once_it_is_allowed():
    core = make(Q0)
    core.commit_answered(core.reset_queries(), CommitAnswer({Q0: QueueOffset(7, 1)}, stopped={Q0: "no"}))
    assert (core.wanted(), core.all_forbidden) == ({}, True)
    core.commit_answered(core.reset_queries(), CommitAnswer())
    assert core.wanted() == {Q0: 7}


def test_the_last_commit_before_a_queue_is_forbidden_counts():
    core = make(Q0)
    core.seek(Q0, 1)
    commits = core.uncommitted()
    assert core.commit_answered(commits, CommitAnswer(stopped={Q0: "no"})) == {Q0: 1}


def test_a_queue_that_is_forbidden_and_then_revoked_goes_to_others():
    core = make(Q0, Q1)
    core.commit_answered(core.reset_queries(), CommitAnswer(stopped={Q0: "no"}))
    assert not core.all_forbidden
    grant(core, Q1, generation=2)
    assert core.release(0.0) == [Q0]
    assert dict(core.forbidden) == {}


def test_a_revoked_queue_that_is_forbidden_is_committed_and_goes_to_others():
    core = make(Q0)
    core.seek(Q0, 1)
    grant(core, generation=2)
    commits = core.uncommitted()
    core.commit_answered(commits, CommitAnswer(stopped={Q0: "no"}))
    assert (core.release(0.0), dict(core.forbidden)) == ([Q0], {})


def test_a_queue_whose_topic_is_gone_is_let_go():
    core = make(Q0, Q1)
    core.commit_answered(core.reset_queries(), CommitAnswer(gone=frozenset({Q0})))
    assert core.assigned_queues == [Q1]


def test_an_unsubscribed_topic_is_returned_no_more_and_let_go_after_the_next_poll():
    core = make(Q0)
    fetch(core, Q0, 0, 1)
    poll(core, 1)
    core.unsubscribe("orders", 0.0)
    grant(core, Q0, Q1)
    assert starting(core) == {}, "the group has not heard of it yet"
    assert core.release(0.0) == []
    assert poll(core) == []
    assert commit(core) == {Q0: 1}
    assert core.release(0.0) == [Q0]


def test_assigned_queues_are_exactly_the_list_and_belong_to_no_generation():
    core = SubscriptionState(PullSettings("billing"), 0.0)
    topics = {"orders": Subscription.parse("orders")}
    core.assign(topics, {Q0: QueueOffset(3, reset_version=2), Q1: QueueOffset(0)}, 0.0)
    assert core.assigned_queues == [Q0, Q1]
    assert not core.fence(1e9)
    assert core.uncommitted()[Q0] == OffsetCommit(3, 0, 2), "the start, which the brokers have not noted yet"
    fetch(core, Q0, 3, 4)
    poll(core, 1)
    core.assign(topics, {Q0: QueueOffset(0), Q2: QueueOffset(9)}, 0.0)
    assert core.assigned_queues == [Q0, Q2]
    assert core.get(Q0).position == 4, "it goes on where it is"
    assert poll(core) == [(0, 4)]


def test_a_program_that_does_not_poll_is_noticed_but_not_one_whose_poll_waits():
    core = make(Q0)
    assert not core.is_absent(300.0)
    assert core.is_absent(300.1)
    core.poll_begins(300.1)
    assert not core.is_absent(9999.0)
    core.poll_ends(9999.0)
    assert not core.is_absent(9999.0 + 300.0)


def test_one_polls_at_a_time():
    core = make(Q0)
    core.poll_begins(0.0)
    with pytest.raises(ClientStateError, match="another thread or task"):
        core.poll_begins(0.0)
    core.poll_ends(0.0)
    core.poll_begins(0.0)


# Tests of fetching messages and returning them from polls


def test_messages_are_returned_in_order_and_as_many_as_asked_for():
    core = make(Q0)
    fetch(core, Q0, 0, 1, 2)
    fetch(core, Q0, 3, 5, next_offset=9)
    assert poll(core, 4) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert core.get(Q0).position == 4
    assert poll(core) == [(0, 5)]
    assert core.get(Q0).position == 9, "what the tags excluded is passed"


def test_queues_take_turns():
    core = make(Q0, Q1, Q2)
    for queue in (Q0, Q1, Q2):
        fetch(core, queue, 0, 1, 2, 3)
    assert poll(core, 2) == [(0, 0), (0, 1)]
    assert poll(core, 5) == [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0)]
    assert [queue for queue, _ in poll(core)] == [0, 0, 2, 2, 2]


def test_peeked_messages_are_returned_again_until_they_are_taken():
    core = make(Q0)
    fetch(core, Q0, 0, 1)
    assert [offsets_of(part) for part in core.peek(9)] == [[0, 1]]
    assert poll(core) == [(0, 0), (0, 1)]


@pytest.mark.parametrize(
    "come_between",
    [
        lambda core: core.seek(Q0, 1),
        lambda core: core.pause([Q0]),
        lambda core: core.lose_all(),
        lambda core: core.unsubscribe("orders", 0.0),
        grant,
        lambda core: core.commit_answered(core.reset_queries(), CommitAnswer({Q0: QueueOffset(1, 1)})),
    ],
)
def test_a_slice_is_not_returned_when_something_has_come_between(come_between):
    core = make(Q0)
    fetch(core, Q0, 0, 1, 2)
    [part] = core.peek(9)
    come_between(core)
    assert not core.is_current(part)


def test_an_answer_to_a_question_of_before_a_seek_is_dropped():
    core = make(Q0)
    core.request(Q0, 0)
    core.seek(Q0, 5)
    assert not core.fetched(Q0, 0, fetched_of([0, 1]))
    core.seek(Q0, 0)
    assert not core.fetched(Q0, 0, fetched_of([0, 1])), "even if the place is the same"
    core.seek(Q0, 5)
    assert not core.out_of_range(Q0, 0, 3)
    assert core.wanted() == {Q0: 5}
    assert core.peek(9) == []


def test_a_new_subscription_also_filters_messages_already_read():
    core = make(Q0)
    fetch(core, Q0, 1, next_offset=4)
    narrow = core.request(Q0, 4)
    assert narrow.tag_codes is None
    core.subscribe(Subscription.parse("orders"))
    assert [offsets_of(part) for part in core.peek(9)] == [[1]], "the same one changes nothing"
    core.subscribe(Subscription.parse("orders", "AaAa"))
    assert core.peek(9) == []
    assert core.wanted() == {Q0: 0}
    assert not core.fetched(Q0, 4, fetched_of([], 9))
    assert core.request(Q0, 0).tag_codes == {2031744}


def test_a_request_that_is_late_is_of_no_use_and_small():
    core = make(Q0)
    core.seek(Q0, 5)
    assert core.request(Q0, 0).max_messages == 1
    assert core.request(Q1, 0).max_messages == 1
    core.pause([Q0])
    assert core.request(Q0, 5).max_messages == 1
    assert not core.fetched(Q0, 5, fetched_of([5]))


def test_reads_that_find_nothing_move_the_position_only_when_nothing_waits():
    core = make(Q0)
    fetch_run(core, Q0, fetched_of([], 4))
    assert core.get(Q0).position == 4
    fetch(core, Q0, 4, 5)
    fetch_run(core, Q0, fetched_of([], 9))
    assert core.get(Q0).position == 4
    assert poll(core) == [(0, 4), (0, 5)]
    assert core.get(Q0).position == 9


def test_a_queue_is_read_again_when_less_than_half_of_its_share_waits():
    core = make(Q0, threshold_count=4)
    assert room(core, Q0) == 4
    fetch(core, Q0, 0, 1, 2, 3)
    assert core.wanted() == {}
    poll(core, 1)
    assert core.wanted() == {}
    poll(core, 1)
    assert core.wanted() == {Q0: 4}
    assert room(core, Q0) == 2


def test_reading_is_bounded_by_bytes_per_queue():
    core = make(Q0, Q1, threshold_bytes=1 << 20, threshold_count=65_535, threshold_all_count=65_535, span_max=65_535)
    many = (1 << 20) // RECORD_BYTES // 2
    fetch_run(core, Q0, fetched_of(range(many)))
    assert core.wanted() == {Q0: many, Q1: 0}
    fetch_run(core, Q0, fetched_of([many]))
    assert core.wanted() == {Q1: 0}
    poll(core, 1)
    assert core.wanted() == {Q0: many + 1, Q1: 0}


def test_reading_is_bounded_in_all():
    core = make(Q0, Q1, threshold_all_count=3)
    assert room(core, Q0) == 1, "each queue's part of what is left"
    fetch(core, Q0, 0)
    fetch(core, Q1, 0)
    assert set(core.wanted()) == {Q0, Q1}
    fetch(core, Q0, 1)
    assert core.wanted() == {}
    poll(core, 1)
    assert set(core.wanted()) == {Q0, Q1}
    core = make(Q0, Q1, threshold_all_bytes=1 << 20, threshold_count=65_535, threshold_all_count=65_535)
    fetch_run(core, Q0, fetched_of(range(-(-(1 << 20) // RECORD_BYTES))))
    assert core.wanted() == {}


def test_reading_is_bounded_by_the_span_of_offsets():
    core = make(Q0, span_max=10)
    fetch(core, Q0, 0, 11, next_offset=12)
    assert core.wanted() == {}
    poll(core, 1)
    assert core.wanted() == {}, "from the next message to be returned on"
    poll(core, 1)
    assert core.wanted() == {Q0: 12}


def test_a_deleted_offset_is_skipped_after_earlier_messages():
    core = make(Q0, auto_commit=False)
    fetch(core, Q0, 0, 1)
    assert core.out_of_range(Q0, 2, 100)
    assert core.wanted() == {Q0: 100}
    assert poll(core) == [(0, 0), (0, 1)]
    assert core.out_of_range(Q0, 100, 150)
    assert core.get(Q0).position == 150
    assert wishes(core) == {}, "what the poll returned is not finished yet"
    assert core.out_of_range(Q0, 150, 120), "and back, where the log has lost its tail"
    assert core.wanted() == {Q0: 120}
    core.finish_all()
    assert wishes(core) == {Q0: 120}


# Tests of pausing queues


def test_a_paused_queue_is_neither_read_nor_returned_and_takes_no_room():
    core = make(Q0, Q1, threshold_all_count=2)
    fetch(core, Q0, 0)
    fetch(core, Q1, 0)
    assert core.wanted() == {}
    core.request(Q0, 1)
    core.pause([Q0])
    assert core.paused == [Q0]
    assert core.wanted() == {Q1: 1}
    assert not core.fetched(Q0, 0, fetched_of([0])), "a read that was under way"
    assert poll(core) == [(1, 0)]
    core.resume([Q0])
    assert core.paused == []
    fetch(core, Q0, 0, 1)
    assert poll(core) == [(0, 0), (0, 1)]


def test_pausing_several_queues_changes_none_when_one_is_not_held():
    core = make(Q0)
    with pytest.raises(ClientStateError, match="orders@a:1 is not assigned"):
        core.pause([Q0, Q1])
    assert core.paused == []


# Tests of committing offsets


def test_with_auto_commit_a_poll_finishes_messages_of_earlier_polls():
    core = make(Q0)
    fetch(core, Q0, 0, 1, 2)
    poll(core, 2)
    assert wishes(core) == {}
    poll(core, 1)
    assert wishes(core) == {Q0: 2}
    assert commit(core) == {Q0: 2}
    assert wishes(core) == {}


def test_without_auto_commit_only_the_program_finishes_messages():
    core = make(Q0, auto_commit=False)
    fetch(core, Q0, 0, 1, 2)
    poll(core, 2)
    poll(core, 1)
    assert wishes(core) == {}
    assert not core.commit_is_urgent()
    core.finish_all()
    assert wishes(core) == {Q0: 3}


def test_a_commit_of_offsets_goes_as_far_as_polls_have_come_and_never_back():
    core = make(Q0, Q1, auto_commit=False)
    fetch(core, Q0, 0, 1, 2)
    poll(core)
    for offsets in ({Q0: 4}, {Q0: -1}, {Q0: True}, {Q0: 1.0}, {Q1: 0, Q0: 9}):
        with pytest.raises(InvalidArgumentError, match="polls have only reached offset 3"):
            core.finish(offsets)
    with pytest.raises(ClientStateError):
        core.finish({Q0: 1, Q2: 0})
    assert wishes(core) == {}
    core.finish({Q0: 2})
    core.finish({Q0: 1})
    assert core.uncommitted() == {Q0: OffsetCommit(2, 1, 0)}


def test_a_seek_back_is_committed_as_one_until_the_brokers_have_taken_it():
    core = make(Q0, start=10, auto_commit=False)
    core.seek(Q0, 3)
    assert core.uncommitted() == {Q0: OffsetCommit(3, 1, 0, backwards=True)}
    commit(core)
    fetch(core, Q0, 3, 4)
    poll(core)
    core.finish_all()
    assert core.uncommitted() == {Q0: OffsetCommit(5, 1, 0)}


def test_a_seek_forward_is_no_seek_back():
    core = make(Q0)
    core.seek(Q0, 8)
    assert core.uncommitted() == {Q0: OffsetCommit(8, 1, 0)}


def test_a_seek_back_while_a_commit_is_under_way_is_not_lost():
    core = make(Q0, auto_commit=False)
    fetch(core, Q0, 0, 1, 2, 3)
    poll(core)
    core.finish_all()
    under_way = core.uncommitted()
    core.seek(Q0, 2)
    assert core.commit_answered(under_way, CommitAnswer()) == {Q0: 4}
    assert core.uncommitted() == {Q0: OffsetCommit(2, 1, 0, backwards=True)}
    under_way = core.uncommitted()
    core.seek(Q0, 1)
    core.commit_answered(under_way, CommitAnswer())
    assert core.uncommitted() == {Q0: OffsetCommit(1, 1, 0, backwards=True)}


def test_a_reset_queue_drops_waiting_messages_and_continues_at_the_offset():
    core = make(Q0, Q1, auto_commit=False)
    fetch(core, Q0, 0, 1, 2)
    poll(core, 1)
    core.finish_all()
    assert core.reset_queries() == {Q0: OffsetCommit(None, 1, 0), Q1: OffsetCommit(None, 1, 0)}
    commits = core.uncommitted()
    answer = CommitAnswer({Q0: QueueOffset(50, reset_version=3)})
    assert core.commit_answered(commits, answer) == {}
    assert core.get(Q0).position == 50
    assert core.wanted()[Q0] == 50
    assert wishes(core) == {}, "that is what is committed"
    fetch(core, Q0, 50)
    core.commit_answered(commits, answer)
    assert poll(core) == [(0, 50)], "the same reset, heard of twice"
    core.finish_all()
    assert core.uncommitted() == {Q0: OffsetCommit(51, 1, 3)}


def test_a_commit_answered_after_a_reset_does_not_count_as_one():
    core = make(Q0, auto_commit=False)
    fetch(core, Q0, 0, 1)
    poll(core)
    core.finish_all()
    under_way = core.uncommitted()
    core.commit_answered(core.reset_queries(), CommitAnswer({Q0: QueueOffset(0, 1)}))
    core.commit_answered(under_way, CommitAnswer())
    fetch(core, Q0, 0)
    poll(core)
    core.finish_all()
    assert core.uncommitted() == {Q0: OffsetCommit(1, 1, 1)}


# Tests of consumers that acknowledge each message separately


def test_messages_before_the_first_unacknowledged_message_are_committed():
    core = make(Q0, acknowledge_each=True)
    fetch(core, Q0, 0, 1, 2, 3)
    assert poll(core, 3) == [(0, 0), (0, 1), (0, 2)]
    core.acknowledge({Q0: [1]})
    assert poll(core) == [(0, 3)], "a poll finishes nothing"
    core.finish_all()
    assert wishes(core) == {}, "nor does a commit"
    core.acknowledge({Q0: [0]})
    assert wishes(core) == {Q0: 2}
    core.acknowledge({Q0: [3, 2]})
    assert commit(core) == {Q0: 4}


def test_messages_that_nobody_wants_are_passed_once_all_before_them_are_acknowledged():
    core = make(Q0, acknowledge_each=True)
    fetch(core, Q0, 0, 1, next_offset=9)
    poll(core)
    core.acknowledge({Q0: [0, 1]})
    assert wishes(core) == {Q0: 9}


def test_a_revoked_queue_is_kept_until_its_messages_are_acknowledged_and_committed():
    core = make(Q0, Q1, acknowledge_each=True)
    fetch(core, Q0, 0, 1, 2)
    assert poll(core, 2) == [(0, 0), (0, 1)]
    grant(core, Q1, generation=2)
    assert poll(core) == [], "the third comes to the next owner"
    core.acknowledge({Q0: [1]})
    assert core.release(0.0) == []
    core.acknowledge({Q0: [0]})
    assert (core.release(0.0), core.commit_is_urgent()) == ([], True)
    assert commit(core) == {Q0: 2}
    assert core.release(0.0) == [Q0]


def test_an_acknowledgement_of_a_message_of_another_owner_counts_for_nothing():
    core = make(Q0, acknowledge_each=True)
    fetch(core, Q0, 0, 1)
    poll(core)
    core.lose([Q0])
    core.acknowledge({Q0: [0, 1], Q2: [5]})
    assert wishes(core) == {}
    grant(core, Q0, generation=2)
    start_all(core, 0)
    core.acknowledge({Q0: [0]})
    assert wishes(core) == {}, "it was not returned since"


@pytest.mark.parametrize(
    "move", [lambda core: core.seek(Q0, 1), lambda core: core.out_of_range(Q0, 4, 1)], ids=["seek", "the log was cut"]
)
def test_after_a_move_messages_must_be_acknowledged_again(move):
    core = make(Q0, acknowledge_each=True)
    fetch(core, Q0, 0, 1, 2, 3)
    poll(core)
    core.acknowledge({Q0: [0, 1]})
    commit(core)
    move(core)
    fetch(core, Q0, 1, 2)
    assert poll(core) == [(0, 1), (0, 2)]
    core.acknowledge({Q0: [2]})
    assert core.get(Q0).commit_offset == 1
    core.acknowledge({Q0: [1]})
    assert core.get(Q0).commit_offset == 3


def test_a_pause_keeps_unacknowledged_messages():
    core = make(Q0, acknowledge_each=True)
    fetch(core, Q0, 0, 1, 2)
    poll(core, 2)
    core.pause([Q0])
    core.acknowledge({Q0: [1]})
    core.resume([Q0])
    fetch(core, Q0, 2)
    assert poll(core) == [(0, 2)]
    core.acknowledge({Q0: [2, 0]})
    assert wishes(core) == {Q0: 3}


# Tests of PRIORITY topics


def leveled(*levels: int, start: int = 0) -> SubscriptionState:
    """Return the state of a consumer that holds some levels of a PRIORITY topic."""
    core = make(*(MessageQueue("orders", "a", level) for level in levels), start=start)
    core.subscribe(Subscription.parse("orders"), has_levels=True)
    return core


def test_polls_return_high_levels_first_and_each_level_within_its_bound():
    core = leveled(0, 5, 9)
    for level, count in ((0, 20), (5, 20), (9, 20)):
        fetch(core, MessageQueue("orders", "a", level), *range(count))
    first = [poll(core, 1)[0][0] for _ in range(8)]
    assert sorted(first) == [0, 5, 9, 9, 9, 9, 9, 9]
    assert len(poll(core)) == 3 * 20 - 8


def test_a_poll_without_messages_of_the_topic_is_no_turn():
    core = leveled(0, 9)
    for _ in range(20):
        assert poll(core) == []
    turns = dict(core._levels._turns)
    fetch(core, MessageQueue("orders", "a", 0), 0)
    assert poll(core) == [(0, 0)]
    assert core._levels._turns == {"orders": turns["orders"] + 1}


def read_all(core: SubscriptionState, max_messages: int) -> None:
    """Read mapped files for a poll, as the consumer does."""
    missing = core.missing(max_messages)
    while missing > 0 and (turn := core.next_unread(missing)) is not None:
        queue, request, end = turn
        upto = min(end, request.queue_offset + request.max_messages)
        core.fetched(queue, request.queue_offset, fetched_of(range(request.queue_offset, upto), upto))
        missing -= upto - request.queue_offset


def test_messages_in_mapped_files_are_read_by_level_although_lower_levels_are_buffered():
    core = leveled(1, 2, 3)
    low, middle, high = (MessageQueue("orders", "a", level) for level in (1, 2, 3))
    fetch(core, middle, *range(500))
    for queue in (low, high):
        core.read_in_place(queue)
        core.end_known(queue, 0, 0, 1000)
    counted = {1: 0, 2: 0, 3: 0}
    for _ in range(80):
        read_all(core, 5)
        for level, _ in poll(core, 5):
            counted[level] += 1
        assert core.get(low).buffered_count <= 64
        assert core.get(high).buffered_count <= 64
    assert counted == {3: 300, 2: 50, 1: 50}


def test_a_topic_that_is_not_subscribed_any_more_has_no_turns():
    core = leveled(0, 9)
    core.unsubscribe("orders", 0.0)
    assert not core._levels
    queues = {MessageQueue("orders", "a", 0): QueueOffset(0)}
    core.assign({"orders": Subscription.parse("orders")}, queues, 0.0, {"orders"})
    assert core._levels
    core.assign({}, {}, 0.0)
    assert not core._levels
