"""Tests of real Rebalance actors and members. The members of a sticky group keep their queues, and get resets with
their heartbeats."""

from __future__ import annotations

import raymq
from raymq.client.consumer.rebalance_client import Membership, call_holder, offsets_reset
from raymq.common.message import MessageQueue
from raymq.common.protocol.membership import AllocateStrategy, Allocation, GroupAssignment, GroupHeartbeat
from tests.support.history.waiting import eventually


class Member:
    """A member of a consumer group that consumes no messages, and releases revoked queues at once."""

    def __init__(self, mq: raymq.Client, group: str, name: str, topic: str) -> None:
        self.name, self.topic = name, topic
        self.held: frozenset[MessageQueue] = frozenset()
        self.offsets_version = 0
        self.membership: Membership = mq.rebalance.join(group, self)

    def next_heartbeat(self, *, leaving: bool = False) -> GroupHeartbeat:
        sticky = Allocation(AllocateStrategy.STICKY)
        return GroupHeartbeat(self.name, frozenset({self.topic}), self.held, leaving, sticky)

    def assigned(self, assignment: GroupAssignment, sent_s: float) -> None:
        if assignment.queues != self.held:
            self.membership.beat_soon()
        self.held, self.offsets_version = assignment.queues, assignment.offsets_version

    def unanswered(self, error: raymq.RaymqError) -> None:
        raise error


def test_a_sticky_group_keeps_its_queues_when_a_fourth_member_joins(mq: raymq.Client, group: str) -> None:
    topic = "sticky-orders"
    mq.admin.create_topic(topic, queues=12)
    members = [Member(mq, group, f"m{number}", topic) for number in range(3)]

    def settled(share: int) -> bool:
        return [len(member.held) for member in members] == [share] * len(members)

    eventually(lambda: settled(4), "12 queues shared by three")
    before = [member.held for member in members]
    newcomer = Member(mq, group, "m3", topic)
    members.append(newcomer)
    eventually(lambda: settled(3), "12 queues shared by four")
    assert all(member.held <= held for member, held in zip(members, before, strict=False))

    status = call_holder(group, "describe_group", 10.0)
    assert status["strategy"] == "STICKY"
    assert [(one["member"], len(one["queues"])) for one in status["members"]] == [(f"m{n}", 3) for n in range(4)]

    seen = newcomer.offsets_version
    offsets_reset(group)
    eventually(lambda: newcomer.offsets_version == seen + 1, "the news of the reset")
    for member in members:
        member.membership.leave(member.next_heartbeat(leaving=True))
    assert call_holder(group, "describe_group", 10.0)["members"] == []
