"""Refuses a push consumer whose group is consumed in the other mode, because both modes would deliver the same
messages.

In the mode "queue" each member commits the offsets of its queues. In the mode "share" (RocketMQ's POP) members lease
single messages. RocketMQ's broker keeps one mode for each group and topic, and all push clients follow it. In raymq the
first live member decides: a push consumer does not start while members of the group consume in the other mode.

The check reads the members' heartbeats. A member that ended without a farewell counts until its client expires.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Final

from raymq.common.errors import ClientStateError, NoPermissionError, RaymqError
from raymq.common.protocol.clients import CLIENT_EXPIRY_S, ConsumerConnection
from raymq.remoting.actor_ref import ActorRef

MODES_WAIT_S: Final = 5.0
"""Time in s for which a start waits for the farewell of members that have just stopped."""
MODES_CALL_S: Final = 5.0
MODES_PAUSE_S: Final = 0.2

logger = logging.getLogger(__name__)


def check_modes(group: str, mode: str, brokers: Sequence[str], wait_s: float = MODES_WAIT_S) -> None:
    """Raise ClientStateError if a live member of the group still consumes in the other mode after `wait_s`.
    Brokers that do not answer are not asked again; the other brokers have the same heartbeats."""
    deadline_s = time.monotonic() + wait_s
    while (other := _member_in_other_mode(group, mode, brokers)) is not None:
        if time.monotonic() >= deadline_s:
            consumer = other.consumer
            raise ClientStateError(
                f"group {group!r} is consumed with consume_mode={consumer.consume_mode!r} by member "
                f"{consumer.member or other.client_id}, so no consumer can start with consume_mode={mode!r}. Stop the "
                f"other members first, or use another group; a member that has died counts for "
                f"{CLIENT_EXPIRY_S:.0f} s. See: raymq group members {group}"
            )
        time.sleep(MODES_PAUSE_S)


def _member_in_other_mode(group: str, mode: str, brokers: Sequence[str]) -> ConsumerConnection | None:
    for name in brokers:
        try:
            found: list[ConsumerConnection] = ActorRef(name).call("consumer_connections", group, timeout_s=MODES_CALL_S)
        except NoPermissionError as error:
            logger.info("the members of group %s are not checked for their mode: %s", group, error)
            return None
        except RaymqError as error:
            logger.info("broker %s cannot say in which mode group %s is consumed: %s", name, group, error)
            continue
        for one in found:
            if one.consumer.group == group and one.consumer.consume_mode != mode:
                return one
    return None
