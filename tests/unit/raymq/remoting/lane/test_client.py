"""Tests of the client's end of lanes (direct connections beside Ray's calls): the kernel accepts the timeouts that a
lane sets on its socket, and received bytes are split into frames."""

from __future__ import annotations

import socket
import struct

import pytest

from raymq.remoting.lane.client import timeval
from raymq.remoting.lane.frames import ProtocolError, ReceivedBytes, pack_header


@pytest.mark.parametrize("timeout_s", [1e-9, 0.5, 4.9999995, 4.99999999999, 5.0, 5.0000001, 86_400.0])
def test_every_timeout_is_one_that_a_socket_takes_and_is_not_shorter(timeout_s: float) -> None:
    one, other = socket.socketpair()
    with one, other:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(timeout_s))
    seconds, microseconds = struct.unpack("ll", timeval(timeout_s))
    assert 0 <= microseconds < 1_000_000
    assert timeout_s < seconds + microseconds / 1e6 <= timeout_s + 2e-6


@pytest.mark.parametrize("checked", [False, True])
def test_frames_are_found_wherever_the_received_bytes_are_cut(checked: bool) -> None:
    payloads = [b"", b"a", b"four", b"x" * 30]
    data = b"".join(
        pack_header(len(one), 16, 0, 1, number, checked=checked) + one for number, one in enumerate(payloads)
    )
    for cut in range(len(data) + 1):
        for second in (cut, (cut + len(data)) // 2, len(data)):
            received = ReceivedBytes(checked=checked, payload_max=30)
            found = []
            for part in (data[:cut], data[cut:second], data[second:]):
                received.add(part)
                while (frame := received.take_frame()) is not None:
                    found.append(frame)
            assert [(fields[-1], payload) for fields, payload in found] == list(enumerate(payloads))


def test_a_frame_that_is_too_long_or_damaged_is_refused_before_its_payload_arrives() -> None:
    received = ReceivedBytes(checked=False, payload_max=30)
    received.add(pack_header(31, 16, 0, 1, 1, checked=False))
    with pytest.raises(ProtocolError, match="at most 30 are allowed"):
        received.take_frame()
    received = ReceivedBytes(checked=True, payload_max=30)
    received.add(b"\1" + pack_header(0, 16, 0, 1, 1, checked=True)[1:])
    with pytest.raises(ProtocolError, match="damaged"):
        received.take_frame()
