"""A query's finished offsets, committed to a consumer group, so that `raymq group describe` shows the query's lag.

The group only shows: a query goes on from its checkpoint, whatever the group's offsets are. A query is no member of the
group, so its commits fence nobody; a consumer that is a member should not use the same group.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

from raymq.client.consumer.group_offsets import GroupOffsets
from raymq.common.errors import RaymqError
from raymq.common.message import ConsumeFromWhere, MessageQueue
from raymq.common.names import check_group
from raymq.common.protocol.group import OffsetCommit, StartOffsetQuery
from raymq.common.retry import left_s

COMMIT_BUDGET_S: Final = 5.0
"""The time that a commit may take from the query; one that fails is made good by the next."""
COMMIT_PAUSE_S: Final = 1.0
NOT_A_MEMBER: Final = 0
"""The generation of a commit that fences nobody and is not fenced."""
_FROM_FIRST: Final = StartOffsetQuery(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)

logger = logging.getLogger(__name__)


class GroupCommits:
    """Commits offsets for one group, which is made if it does not exist. Not thread-safe."""

    def __init__(self, group: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._offsets, self._clock = GroupOffsets(check_group(group)), clock
        self._versions: dict[MessageQueue, int] = {}
        self._try_again_s = float("-inf")

    def commit(self, offsets: Mapping[MessageQueue, int]) -> bool:
        """Commit the offset of the next message of each queue, also back: the group shows where the query is.

        False, with a warning, when the brokers could not commit all of it within COMMIT_BUDGET_S; then nothing is tried
        for COMMIT_PAUSE_S.
        """
        if self._clock() < self._try_again_s:
            return False
        deadline_s = time.monotonic() + COMMIT_BUDGET_S
        try:
            self._learn_versions(sorted(offsets.keys() - self._versions.keys()), deadline_s)
            if reset := self._try(offsets, deadline_s):
                logger.warning(
                    "group %s: somebody has reset its offsets in %s; the query goes on from its checkpoint and commits "
                    "that. To have it start elsewhere, start it with a new checkpoint and starting_offsets",
                    self._offsets.group,
                    ", ".join(map(str, sorted(reset))),
                )
                self._try({queue: offsets[queue] for queue in reset}, deadline_s)
        except RaymqError as error:
            logger.warning("group %s: offsets are not committed yet: %s", self._offsets.group, error)
            self._versions.clear()  # the group may have been deleted
            self._try_again_s = self._clock() + COMMIT_PAUSE_S
            return False
        return True

    def _try(self, offsets: Mapping[MessageQueue, int], deadline_s: float) -> set[MessageQueue]:
        """Commit; returns the queues that were not committed because they have been reset, whose versions are known
        now."""
        commits = {
            queue: OffsetCommit(offset, NOT_A_MEMBER, self._versions[queue], backwards=True)
            for queue, offset in offsets.items()
            if queue in self._versions
        }
        answer = self._offsets.commit_offsets(commits, left_s(deadline_s))
        self._versions |= {queue: reset.reset_version for queue, reset in answer.reset.items()}
        return set(answer.reset)

    def _learn_versions(self, queues: list[MessageQueue], deadline_s: float) -> None:
        for broker_name in sorted({queue.broker_name for queue in queues}):
            self._offsets.ensure_group(broker_name, left_s(deadline_s))
        starts = self._offsets.start_offsets(dict.fromkeys(queues, NOT_A_MEMBER), _FROM_FIRST, left_s(deadline_s))
        self._versions |= {queue: start.reset_version for queue, start in starts.items()}
