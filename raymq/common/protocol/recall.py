"""Recall of a delayed message, by the handle in its SendResult (spec/features.md §10).

A handle has RocketMQ's format: URL-safe base64 of ``v1 TOPIC BROKER DELIVER_MS UNIQUE_ID``. A recall is a record in a
separate timer queue (`raymq.common.delay.TIMER_RECALL_QUEUE`) of the message's broker group. The recall's property
TIMER_DEL_UNIQKEY contains the message's key. By the time a message is due, the store's scheduler has read every recall
that was stored before. The scheduler writes a recalled message to RECALLED_TOPIC instead of the message's own topic
(storage.schedule.recalls).
"""

from __future__ import annotations

import base64
import binascii
from typing import Final, NamedTuple

from raymq.common.errors import RecallError
from raymq.common.names import SYSTEM_PREFIX

RECALL_TAG: Final = "_RECALL_TAG_"
RECALL_BODY: Final = b"0"
RECALLED_TOPIC: Final = SYSTEM_PREFIX + "recalled"
"""The topic of recalled messages, with one queue. The store writes a recalled message to this topic at the message's
delivery time."""
_VERSION: Final = "v1"


class RecallHandle(NamedTuple):
    """The identity of a delayed message: its topic, broker group, delivery time (ms since 1970) and unique id."""

    topic: str
    broker_name: str
    deliver_at_ms: int
    message_id: str

    def __str__(self) -> str:
        """Return the handle as text.

        >>> str(RecallHandle("orders", "broker-a", 1800000000000, "0A0000011A2B18B4AAC23B9ACA000005"))[:20]
        'djEgb3JkZXJzIGJyb2tl'
        """
        fields = (_VERSION, self.topic, self.broker_name, str(self.deliver_at_ms), self.message_id)
        return base64.urlsafe_b64encode(" ".join(fields).encode()).decode()

    @classmethod
    def parse(cls, text: str) -> RecallHandle:
        """Parse the text of a recall handle. Raises RecallError if `text` is not a handle."""
        try:
            fields = base64.b64decode(text.encode(), b"-_", validate=True).decode().split(" ")
        except (AttributeError, binascii.Error, UnicodeError):
            fields = []
        if len(fields) != 5 or fields[0] != _VERSION or not (fields[3].isascii() and fields[3].isdecimal()):
            raise RecallError(
                f"{text!r} is not a recall handle: use the recall_handle in the SendResult of a message with "
                "deliver_at_ms"
            )
        return cls(fields[1], fields[2], int(fields[3]), fields[4])


def delete_key(topic: str, message_id: str) -> str:
    """Return the value of the property TIMER_DEL_UNIQKEY in the recall of a message.

    >>> delete_key("orders", "ID1")
    'orders+ID1'
    """
    return f"{topic}+{message_id}"
