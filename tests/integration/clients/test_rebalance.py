"""A real Rebalance actor and members that speak to it: a sticky group keeps its queues, and hears of resets."""

from __future__ import annotations

from dataclasses import dataclass, field

import raymq
from raymq.consumer.rebalance_client import RebalanceClient, offsets_reset
from raymq.message import MessageQueue
from raymq.names import RebalanceName
from raymq.protocol.membership import AllocateStrategy, Allocation, GroupHeartbeat
from raymq.remoting.actor_ref import ActorRef
from tests.support.history.waiting import eventually


@dataclass
class Member:
    """A consumer without messages: it lets go at once of what it may not hold."""

    name: str
    topic: str
    client: RebalanceClient
    held: frozenset[MessageQueue] = field(default_factory=frozenset)
    offsets_version: int = 0

    def beat(self, *, leaving: bool = False) -> None:
        sticky = Allocation(AllocateStrategy.STICKY)
        heartbeat = GroupHeartbeat(self.name, frozenset({self.topic}), self.held, leaving, sticky)
        assignment = self.client.heartbeat(heartbeat)
        self.held, self.offsets_version = assignment.queues, assignment.offsets_version


def test_a_sticky_group_keeps_its_queues_when_a_fourth_member_joins(mq: raymq.Client, group: str) -> None:
    topic = "sticky-orders"
    mq.admin.create_topic(topic, queues=12)
    members = [Member(f"m{number}", topic, RebalanceClient(group, mq.routes)) for number in range(3)]

    def settled(share: int) -> bool:
        for member in members:
            member.beat()
        return [len(member.held) for member in members] == [share] * len(members)

    eventually(lambda: settled(4), "12 queues shared by three")
    before = [member.held for member in members]
    newcomer = Member("m3", topic, RebalanceClient(group, mq.routes))
    members.append(newcomer)
    eventually(lambda: settled(3), "12 queues shared by four")
    assert all(member.held <= held for member, held in zip(members, before, strict=False))

    status = ActorRef(str(RebalanceName(group))).call("status")
    assert status["strategy"] == "STICKY"
    assert [(one["member"], len(one["queues"])) for one in status["members"]] == [(f"m{n}", 3) for n in range(4)]

    seen = newcomer.offsets_version
    offsets_reset(group)
    newcomer.beat()
    assert newcomer.offsets_version == seen + 1
    for member in members:
        member.beat(leaving=True)
    assert ActorRef(str(RebalanceName(group))).call("status")["members"] == []
