"""Messages of one topic as columns: a sequence that creates a Message only when an item is read.

MessageColumns can replace any sequence of messages, even in a producer's retries. The encoder reads the columns without
creating a Message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from msgspec.structs import force_setattr
from numpy.typing import NDArray

from raymq.common.message import PROPERTY_KEYS, PROPERTY_TAGS, Message
from raymq.records.format.layout import decode_properties
from raymq.records.kernels.byte_column import ByteColumn
from raymq.records.kernels.fields import Ints
from raymq.records.kernels.property_text import joined_texts


@dataclass(frozen=True, slots=True, eq=False)
class MessageColumns(Sequence[Message]):
    """A sequence of n checked messages without delay and flags, stored as columns.

    `properties`: each message's property text as on disk (raymq.records.kernels.property_text); None if no message has
    properties. `tag_codes`: the hashes of the messages' tags, shape (n,); None if no message has tags. A slice with
    step 1 is a MessageColumns over the same memory; an index gives a Message, which is a copy.
    """

    topic: str
    bodies: ByteColumn
    properties: ByteColumn | None = None
    tag_codes: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.bodies)

    @overload
    def __getitem__(self, index: int) -> Message: ...

    @overload
    def __getitem__(self, index: slice) -> MessageColumns: ...

    def __getitem__(self, index: int | slice) -> Message | MessageColumns:
        rows = range(len(self))[index]
        if isinstance(rows, int):
            return self._message(rows)
        if rows.step != 1:
            return self.take(np.arange(rows.start, rows.stop, rows.step))
        first, end = rows.start, max(rows.start, rows.stop)
        texts = None if self.properties is None else self.properties.slice(first, end)
        codes = None if self.tag_codes is None else self.tag_codes[first:end]
        return MessageColumns(self.topic, self.bodies.slice(first, end), texts, codes)

    def take(self, rows: Ints) -> MessageColumns:
        """Return a copy of the messages at the indices `rows`, in that order."""
        texts = None if self.properties is None else self.properties.take(rows)
        codes = None if self.tag_codes is None else self.tag_codes[rows]
        return MessageColumns(self.topic, self.bodies.take(rows), texts, codes)

    @classmethod
    def chained(cls, parts: Sequence[MessageColumns]) -> MessageColumns:
        """Join several MessageColumns of one topic into one, in order."""
        if len(parts) == 1:
            return parts[0]
        counts = [len(part) for part in parts]
        codes = None
        if any(part.tag_codes is not None for part in parts):
            codes = np.concatenate([np.zeros(len(p), np.int64) if p.tag_codes is None else p.tag_codes for p in parts])
        return cls(
            parts[0].topic,
            ByteColumn.chained([part.bodies for part in parts]),
            joined_texts([part.properties for part in parts], counts),
            codes,
        )

    @property
    def sizes(self) -> Ints:
        """The size of each message's body and properties in bytes, shape (n,)."""
        return self.bodies.sizes if self.properties is None else self.bodies.sizes + self.properties.sizes

    def _message(self, row: int) -> Message:
        properties: dict[str, str] = {}
        if self.properties is not None:
            properties = decode_properties(self.properties.slice(row, row + 1).tolist()[0])
        tags, keys = properties.pop(PROPERTY_TAGS, None), properties.pop(PROPERTY_KEYS, "")
        [body] = self.bodies.slice(row, row + 1).tolist()
        message = Message(self.topic, body)
        if tags is not None or keys or properties:
            # Set the message's tags, keys and properties without a check. The user's values were checked when the
            # columns were made. raymq may have added reserved properties afterwards, and a check would refuse these
            # properties.
            force_setattr(message, "tags", tags)
            force_setattr(message, "keys", tuple(keys.split(" ")) if keys else ())
            force_setattr(message, "properties", properties)
        return message
