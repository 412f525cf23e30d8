"""RocketMQ's replication frames (spec/storage.md §11, facts 23 and 24)."""

from __future__ import annotations

import pytest

from storage.ha_frames import (
    ConnectionState,
    DataHeader,
    FrameError,
    MasterHandshakeHeader,
    SlaveAck,
    SlaveHandshake,
    SlaveOffset,
    TransferHeader,
    encode_master_handshake,
    parse_epochs,
)
from storage.replication.epochs import EpochEntry

CLASSIC = [
    (DataHeader(1024, 16), "000000000000040000000010"),
    (DataHeader(1040, 0), "000000000000041000000000"),
    (SlaveOffset(1040), "0000000000000410"),
]
AUTO_SWITCH = [
    (SlaveHandshake(2), "00000001000000000000000000000002"),
    (SlaveAck(1040), "000000020000000000000410"),
    (
        TransferHeader(16, 1500, 2, 1500, 1400),
        "000000020000001000000000000005dc0000000200000000000005dc0000000000000578",
    ),
]
EPOCHS = [EpochEntry(1, 0), EpochEntry(2, 1500)]
MASTER_HANDSHAKE = bytes.fromhex(
    "000000010000001800000000000007d0000000020000000100000000000000000000000200000000000005dc"
)


@pytest.mark.parametrize(("frame", "text"), CLASSIC)
def test_fact_23_classic_frames(frame, text):
    assert frame.encode().hex() == text
    assert type(frame).parse(bytes.fromhex(text)) == frame
    assert len(text) == 2 * frame.SIZE


@pytest.mark.parametrize(("frame", "text"), AUTO_SWITCH)
def test_fact_24_auto_switch_frames(frame, text):
    assert frame.encode().hex() == text
    assert type(frame).parse(bytes.fromhex(text)) == frame
    assert len(text) == 2 * frame.SIZE


def test_fact_24_the_masters_handshake_names_its_epochs():
    assert encode_master_handshake(2000, EPOCHS) == MASTER_HANDSHAKE
    size = MasterHandshakeHeader.SIZE
    header = MasterHandshakeHeader.parse(MASTER_HANDSHAKE[:size])
    assert header == MasterHandshakeHeader(body_size=24, max_physical_offset=2000, last_epoch=2)
    assert header.body_size == len(MASTER_HANDSHAKE[size:])
    assert parse_epochs(MASTER_HANDSHAKE[size:]) == EPOCHS


def test_a_master_without_epochs_answers_too():
    answer = encode_master_handshake(0, [])
    assert MasterHandshakeHeader.parse(answer).body_size == 0
    assert parse_epochs(b"") == []


def test_a_slave_says_how_it_wants_to_begin():
    frame = SlaveHandshake(7, sync_from_last_file=True, async_learner=False)
    assert frame.encode().hex() == "00000001000100000000000000000007"
    assert SlaveHandshake.parse(frame.encode()) == frame
    assert SlaveHandshake.parse(SlaveHandshake(7, async_learner=True).encode()).async_learner


@pytest.mark.parametrize("frame", [frame for frame, _ in CLASSIC + AUTO_SWITCH])
def test_a_frame_cut_short_or_too_long_is_refused(frame):
    data = frame.encode()
    for wrong in (b"", data[:-1], data + b"\0"):
        with pytest.raises(FrameError, match="bytes where"):
            type(frame).parse(wrong)


@pytest.mark.parametrize("frame", [frame for frame, _ in AUTO_SWITCH])
def test_a_frame_of_another_state_is_refused(frame):
    data = ConnectionState.SUSPEND.to_bytes(4) + frame.encode()[4:]
    with pytest.raises(FrameError, match="state 3 where"):
        type(frame).parse(data)


@pytest.mark.parametrize(
    "frame", [SlaveOffset(-1), DataHeader(-1, 0), DataHeader(0, -1), SlaveAck(-5), TransferHeader(-1, 0, 1, 0, 0)]
)
def test_a_negative_place_or_size_is_refused(frame):
    with pytest.raises(FrameError, match="is -"):
        type(frame).parse(frame.encode())


def test_epochs_cut_short_are_refused():
    with pytest.raises(FrameError, match="23 bytes of epochs"):
        parse_epochs(MASTER_HANDSHAKE[MasterHandshakeHeader.SIZE : -1])
