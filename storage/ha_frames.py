"""What master and slave say to each other on RocketMQ's replication port, as bytes (spec/storage.md §11).

Classic, big-endian; a slave's frame is both its request and its acknowledgement

    slave    | max_physical_offset 8 |
    master   | physical_offset 8 | body_size 4 | raw bytes of the log; none in a heartbeat |

Auto-switch, with epochs; each frame begins with the state that its sender is in

    slave    | state 4 = HANDSHAKE | sync_from_last_file 2 | async_learner 2 | broker_id 8 |
    master   | state 4 = HANDSHAKE | body_size 4 | max_physical_offset 8 | last_epoch 4 | epoch 4, start_offset 8 | … |
    master   | state 4 = TRANSFER | body_size 4 | physical_offset 8 | epoch 4 | epoch_start_offset 8 |
             | confirm_offset 8 | raw bytes of the log |
    slave    | state 4 = TRANSFER | max_physical_offset 8 |

A frame's head has a fixed size, `SIZE`: read so many bytes, `parse` them, then `body_size` more. No socket here, and
nothing that survives anything.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

from storage.replication.epochs import EpochEntry

_LONG = struct.Struct(">q")
_DATA = struct.Struct(">qi")
_SLAVE_HANDSHAKE = struct.Struct(">ihhq")
_MASTER_HANDSHAKE = struct.Struct(">iiqi")
_EPOCH = struct.Struct(">iq")
_TRANSFER = struct.Struct(">iiqiqq")
_ACK = struct.Struct(">iq")


class ConnectionState(IntEnum):
    """Where a connection is; the number is what a frame carries."""

    READY = 0
    HANDSHAKE = 1
    TRANSFER = 2
    SUSPEND = 3
    SHUTDOWN = 4


class FrameError(Exception):
    """Bytes that are not the frame that was expected: the connection is to be closed."""


def _unpack(layout: struct.Struct, data: bytes, state: ConnectionState | None = None) -> tuple[int, ...]:
    if len(data) != layout.size:
        raise FrameError(f"{len(data)} bytes where a frame's head has {layout.size}")
    values = layout.unpack(data)
    if state is None:
        return values
    if values[0] != state:
        raise FrameError(f"a frame of state {values[0]} where {state.name} ({state}) is expected")
    return values[1:]


def _require_not_negative(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 0:
            raise FrameError(f"{name} is {number}")


@dataclass(frozen=True, slots=True)
class SlaveOffset:
    """Classic, slave to master: where the slave's log ends. The first one asks for what follows, the others
    acknowledge what came before."""

    max_physical_offset: int
    SIZE: ClassVar[int] = _LONG.size

    def encode(self) -> bytes:
        return _LONG.pack(self.max_physical_offset)

    @classmethod
    def parse(cls, data: bytes) -> SlaveOffset:
        """FrameError unless `data` is one."""
        frame = cls(*_unpack(_LONG, data))
        _require_not_negative(max_physical_offset=frame.max_physical_offset)
        return frame


@dataclass(frozen=True, slots=True)
class DataHeader:
    """Classic, master to slave: `body_size` bytes of the log follow, from `physical_offset` on; 0 is a heartbeat."""

    physical_offset: int
    body_size: int
    SIZE: ClassVar[int] = _DATA.size

    def encode(self) -> bytes:
        return _DATA.pack(self.physical_offset, self.body_size)

    @classmethod
    def parse(cls, data: bytes) -> DataHeader:
        """FrameError unless `data` is one."""
        frame = cls(*_unpack(_DATA, data))
        _require_not_negative(physical_offset=frame.physical_offset, body_size=frame.body_size)
        return frame


@dataclass(frozen=True, slots=True)
class SlaveHandshake:
    """Auto-switch, the slave's first frame: who it is, and how it wants to begin."""

    broker_id: int
    sync_from_last_file: bool = False
    async_learner: bool = False
    SIZE: ClassVar[int] = _SLAVE_HANDSHAKE.size

    def encode(self) -> bytes:
        return _SLAVE_HANDSHAKE.pack(
            ConnectionState.HANDSHAKE, self.sync_from_last_file, self.async_learner, self.broker_id
        )

    @classmethod
    def parse(cls, data: bytes) -> SlaveHandshake:
        """FrameError unless `data` is one."""
        from_last, learner, broker_id = _unpack(_SLAVE_HANDSHAKE, data, ConnectionState.HANDSHAKE)
        return cls(broker_id, from_last == 1, learner == 1)


@dataclass(frozen=True, slots=True)
class MasterHandshakeHeader:
    """Auto-switch, the head of the master's answer: where its log ends, its newest epoch, and how many bytes of epochs
    follow (`parse_epochs`)."""

    body_size: int
    max_physical_offset: int
    last_epoch: int
    SIZE: ClassVar[int] = _MASTER_HANDSHAKE.size

    @classmethod
    def parse(cls, data: bytes) -> MasterHandshakeHeader:
        """FrameError unless `data` is one."""
        frame = cls(*_unpack(_MASTER_HANDSHAKE, data, ConnectionState.HANDSHAKE))
        _require_not_negative(body_size=frame.body_size, max_physical_offset=frame.max_physical_offset)
        return frame


def encode_master_handshake(max_physical_offset: int, epochs: Sequence[EpochEntry]) -> bytes:
    """The whole answer of a master whose log ends at `max_physical_offset`; `epochs` are those of its epoch file."""
    last_epoch = epochs[-1].epoch if epochs else -1
    head = (ConnectionState.HANDSHAKE, len(epochs) * _EPOCH.size, max_physical_offset, last_epoch)
    return _MASTER_HANDSHAKE.pack(*head) + b"".join(_EPOCH.pack(*entry) for entry in epochs)


def parse_epochs(body: bytes) -> list[EpochEntry]:
    """The epochs behind a master's handshake header. FrameError when they are cut short."""
    if len(body) % _EPOCH.size:
        raise FrameError(f"{len(body)} bytes of epochs, which take {_EPOCH.size} each")
    return [EpochEntry(*values) for values in _EPOCH.iter_unpack(body)]


@dataclass(frozen=True, slots=True)
class TransferHeader:
    """Auto-switch, master to slave: `body_size` bytes of the log follow, all of them of `epoch`; 0 is a heartbeat.

    Up to `confirm_offset` every member of the sync-state set has the log.
    """

    body_size: int
    physical_offset: int
    epoch: int
    epoch_start_offset: int
    confirm_offset: int
    SIZE: ClassVar[int] = _TRANSFER.size

    def encode(self) -> bytes:
        return _TRANSFER.pack(
            ConnectionState.TRANSFER,
            self.body_size,
            self.physical_offset,
            self.epoch,
            self.epoch_start_offset,
            self.confirm_offset,
        )

    @classmethod
    def parse(cls, data: bytes) -> TransferHeader:
        """FrameError unless `data` is one."""
        frame = cls(*_unpack(_TRANSFER, data, ConnectionState.TRANSFER))
        _require_not_negative(body_size=frame.body_size, physical_offset=frame.physical_offset)
        return frame


@dataclass(frozen=True, slots=True)
class SlaveAck:
    """Auto-switch, slave to master: everything before `max_physical_offset` is in the slave's log."""

    max_physical_offset: int
    SIZE: ClassVar[int] = _ACK.size

    def encode(self) -> bytes:
        return _ACK.pack(ConnectionState.TRANSFER, self.max_physical_offset)

    @classmethod
    def parse(cls, data: bytes) -> SlaveAck:
        """FrameError unless `data` is one."""
        frame = cls(*_unpack(_ACK, data, ConnectionState.TRANSFER))
        _require_not_negative(max_physical_offset=frame.max_physical_offset)
        return frame
