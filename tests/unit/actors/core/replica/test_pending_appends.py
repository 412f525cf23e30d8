"""Tests of PendingAppends: a flush or an acknowledgement of a replica completes the right waiting appends, in the right
order."""

from __future__ import annotations

from actors.core.replica.pending_appends import PendingAppends
from raymq.common.errors import StoreFailedError
from raymq.common.message import SendStatus
from raymq.common.protocol.store import AppendResult

RESULT = AppendResult(SendStatus.SEND_OK, 1, 2, 3)


class Append:
    """Fake append that completes at its deadline, or earlier if `done` is set."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.done = False
        self.error: StoreFailedError | None = None

    def settle(self, now_s: float) -> list[AppendResult] | None:
        if self.error is not None:
            raise self.error
        return [RESULT] if self.done or now_s >= self.deadline_s else None


def test_settled_appends_are_answered_in_order_and_others_stay():
    pending: PendingAppends[str] = PendingAppends()
    appends = {name: Append(5.0) for name in "abcd"}
    for name, append in appends.items():
        pending.add(append, name)
    assert pending.settle(0.0) == []
    appends["d"].done = appends["b"].done = True
    assert [settled.token for settled in pending.settle(1.0)] == ["b", "d"]
    assert len(pending) == 2
    assert [(settled.token, settled.results, settled.error) for settled in pending.settle(5.0)] == [
        ("a", [RESULT], None),
        ("c", [RESULT], None),
    ]
    assert pending.settle(9.0) == []


def test_a_failure_is_the_answer_of_its_append_alone():
    pending: PendingAppends[str] = PendingAppends()
    broken, good = Append(5.0), Append(5.0)
    pending.add(broken, "broken")
    pending.add(good, "good")
    broken.error, good.done = StoreFailedError("the disk failed"), True
    [first, second] = pending.settle(1.0)
    assert (first.token, first.error) == ("broken", broken.error)
    assert (second.token, second.error) == ("good", None)


def test_the_next_deadline_is_the_earliest():
    pending: PendingAppends[str] = PendingAppends()
    assert pending.next_deadline_s is None
    slow, quick = Append(9.0), Append(4.0)
    pending.add(slow, "slow")
    pending.add(quick, "quick")
    assert pending.next_deadline_s == 4.0
    pending.settle(4.0)
    assert pending.next_deadline_s == 9.0
    slow.deadline_s = 12.0  # the append's deadline changes when its flush is done and its wait for copies begins
    assert pending.next_deadline_s == 12.0
