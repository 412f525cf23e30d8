"""Tests of consumer groups with random faults: a simulated group (tests.support.group_sim.world) never violates its
invariants (tests.support.group_sim.invariants).

The test runs 1,000 seeds; RAYMQ_SOAK=1 runs 50,000, and RAYMQ_GROUP_SEED repeats one seed. The module also
tests the simulation: the simulation must find each planted bug.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from actors.core.rebalance.group import HeartbeatSender, RebalanceGroup
from actors.core.rebalance.slot_lease import Put, SlotLease
from raymq.common.protocol.group import CommitAnswer
from tests.support.cases import rounds
from tests.support.group_sim.invariants import LawBrokenError
from tests.support.group_sim.processes import LEASE_S, Broker, Member, Rebalance
from tests.support.group_sim.queues import MemberQueues
from tests.support.group_sim.world import World

ONE_SEED = os.environ.get("RAYMQ_GROUP_SEED")
BLOCKS = 1 if ONE_SEED else 10
SEEDS_PER_BLOCK = 1 if ONE_SEED else rounds(100, 5000)
FOUND_WITHIN_SEEDS = 1200
RARE = {
    "a repeated heartbeat frees queues": 200,
    "a process that is dead speaks for the one that follows it": 550,
    "two Rebalance actors claim the same groups": 3250,
}
"""For each rare planted bug, the first seed that the test runs. Other seeds show the bug in only one of hundreds or
thousands of runs."""


@pytest.mark.timeout(rounds(300, 7200))
@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_queue_has_two_owners_and_nothing_is_lost_skipped_or_reordered(block):
    first = int(ONE_SEED or block * SEEDS_PER_BLOCK)
    deliveries = handovers = take_overs = 0
    for seed in range(first, first + SEEDS_PER_BLOCK):
        world = World(seed)
        world.run()
        deliveries += world.ledger.deliveries
        handovers += world.ledger.handovers
        take_overs += world.take_overs
    if not ONE_SEED:
        assert take_overs > SEEDS_PER_BLOCK / 5, "the seeds hardly have one Rebalance actor follow another"
        assert deliveries > 40 * SEEDS_PER_BLOCK, "the seeds put hardly any load on the group"
        assert handovers > 4 * SEEDS_PER_BLOCK, "the seeds hardly move a queue"


class GrantsBeforeRelease(RebalanceGroup):
    """A planted bug: the consumer group grants a queue to a member while another member still holds the queue."""

    def _grant(self, name, now_s):
        return frozenset(queue for queue, target in self._target.items() if target == name)


class HeedsRepetitions(RebalanceGroup):
    """A planted bug: the consumer group treats a repeated heartbeat as a new heartbeat."""

    def _note_holding(self, name, holding, *, may_free):
        super()._note_holding(name, holding, may_free=True)


class HeedsLateHeartbeats(RebalanceGroup):
    """A planted bug: the consumer group uses the heartbeat that arrives last, even if the member sent it earlier than
    another heartbeat."""

    def heartbeat(self, heartbeat, now_s):
        member = self._members.get(heartbeat.member)
        if member is not None:
            member.sequence = 0
        return super().heartbeat(heartbeat, now_s)


class AdmitsTheDead(RebalanceGroup):
    """A planted bug: the consumer group accepts a heartbeat from a dead process after the member's process has
    restarted."""

    def _sender(self, heartbeat):
        sender = super()._sender(heartbeat)
        return HeartbeatSender.INVITED if sender is HeartbeatSender.STRANGER and heartbeat.session > 0 else sender


class ForgetsGrace(SlotLease):
    """A planted bug: a Rebalance actor does not wait for old leases to expire after a restart or a takeover."""

    def waits_for_old_leases(self, now_s):
        return False


class SpeaksWithoutLooking(SlotLease):
    """A planted bug: a Rebalance actor acts as the owner of a slot (a share of the consumer groups) although another
    actor has claimed the slot. The bug ends when the actor reads this claim in the register."""

    def valid(self, now_s):
        return self.held


class ClaimsWhatIsClaimed(SlotLease):
    """A planted bug: a Rebalance actor claims a slot (a share of the consumer groups) that another Rebalance actor has
    claimed, and overwrites that claim in the register."""

    def look(self, clock, wall_ns):
        look, answer = super().look(clock, wall_ns), None
        while True:
            try:
                call = look.send(answer)
            except StopIteration:
                return
            answer = yield replace(call, overwrite=True) if isinstance(call, Put) else call


class NeverFences(Member):
    """A planted bug: a member keeps its queues although its lease has expired and the group has not answered."""

    def fence_when_late(self) -> None:
        pass


class CommitsBeforeConsumed(Member):
    """A planted bug: a member commits messages when the listener receives them, not after the listener has processed
    them."""

    def commits(self, broker_name):
        given = {queue: self.tenures[queue].next_offset for queue in self.queues.holding}
        asked = self.queues.commits(broker_name, ask=True)
        return {queue: replace(commit, queue_offset=given[queue]) for queue, commit in asked.items()}


class SkippingQueues(MemberQueues):
    """A planted bug: a member starts reading a queue one message after the queue's start offset."""

    def started(self, process_queue, start):
        return super().started(process_queue, replace(start, queue_offset=start.queue_offset + 1))


class SkipsOnHandover(Member):
    """A planted bug: a member treats the committed offset as the offset of the last consumed message, and so skips one
    message."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.queues = SkippingQueues(LEASE_S)


class TakesFailureForSuccess(Member):
    """A planted bug: a member treats a batch as consumed although the listener failed."""

    def heard(self, delivery, *, consumed):
        super().heard(delivery, consumed=True)


class DoesNotWaitForItsListener(Member):
    """A planted bug: a member releases a revoked queue while its listener still processes a batch of this
    queue."""

    def release(self) -> None:
        for queue in self.queues.holding:
            if not self.queues.may_deliver(queue):
                self.queues.lose(queue)
        super().release()


class IgnoresResets(Member):
    """A planted bug: a member keeps its read offset in a queue after the group's offset was reset."""

    def hear_of_commits(self, commits, answer, tenures):
        super().hear_of_commits(commits, replace(answer, reset={}), tenures)


class BelievesEveryCommit(Broker):
    """A planted bug: a broker accepts a commit with an offset lower than the committed offset, and rejects no commit as
    fenced."""

    def commit_offsets(self, commits) -> CommitAnswer:
        return super().commit_offsets(
            {queue: replace(commit, backwards=True, generation=1 << 80) for queue, commit in commits.items()}
        )


def with_core(core: type[RebalanceGroup]) -> type[Rebalance]:
    return type("WithFault", (Rebalance,), {"group_class": core})


def with_lease(lease: type[SlotLease]) -> type[Rebalance]:
    return type("WithFault", (Rebalance,), {"lease_class": lease})


FAULTS = {
    "a queue is granted before it is released": {"rebalance": with_core(GrantsBeforeRelease)},
    "a repeated heartbeat frees queues": {"rebalance": with_core(HeedsRepetitions)},
    "a late heartbeat is believed": {"rebalance": with_core(HeedsLateHeartbeats)},
    "a process that is dead speaks for the one that follows it": {"rebalance": with_core(AdmitsTheDead)},
    "a restarted Rebalance actor knows no grace": {"rebalance": with_lease(ForgetsGrace)},
    "a Rebalance actor that was taken over from speaks on": {"rebalance": with_lease(SpeaksWithoutLooking)},
    "two Rebalance actors claim the same groups": {"rebalance": with_lease(ClaimsWhatIsClaimed)},
    "a member does not fence itself": {"member": NeverFences},
    "offsets are committed before the messages are consumed": {"member": CommitsBeforeConsumed},
    "a message is skipped when a queue is handed over": {"member": SkipsOnHandover},
    "a failed batch counts as consumed": {"member": TakesFailureForSuccess},
    "a queue is released while its listener is busy": {"member": DoesNotWaitForItsListener},
    "a member does not notice resets": {"member": IgnoresResets},
    "a broker lets offsets go back": {"broker": BelievesEveryCommit},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_simulation_finds(fault):
    first = RARE.get(fault, 0)

    def run_all() -> None:
        for seed in range(first, first + FOUND_WITHIN_SEEDS):
            World(seed, **FAULTS[fault]).run()

    with pytest.raises(LawBrokenError, match="seed"):
        run_all()
