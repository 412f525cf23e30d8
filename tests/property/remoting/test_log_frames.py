"""Tests of the frames that copy the commit log to a replica: the decoder returns what the encoder received, and refuses
all other bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from raymq.common.errors import InvalidArgumentError, ServiceNotAvailableError
from raymq.common.protocol.store import HoleCopy, HoleUnit
from raymq.remoting.lane.log_chunks import (
    ChunkHead,
    ReadLog,
    decode_append_log,
    decode_chunk,
    decode_copied,
    decode_read_log,
    encode_append_log,
    encode_chunk_head,
    encode_copied,
    encode_read_log,
)
from tests.support.cases import examples

LONG = st.integers(-(2**63), 2**63 - 1)
READS = st.builds(
    ReadLog,
    follower=st.integers(-(2**31), 2**31 - 1),
    store_id=st.text(max_size=60),
    learner=st.booleans(),
    epoch=LONG,
    next_offset=LONG,
    acked_offset=LONG,
    min_bytes=LONG,
    max_bytes=LONG,
    wait_s=st.floats(allow_nan=False),
)
UNITS = st.builds(HoleUnit, st.text(max_size=20), LONG, LONG, LONG, LONG, LONG)
HOLES = st.builds(HoleCopy, st.text(max_size=60), st.lists(UNITS, max_size=3).map(tuple), LONG)
HEADS = st.builds(
    ChunkHead, LONG, LONG, LONG, st.none() | st.tuples(st.integers(1, 2**63 - 1), LONG), st.none() | HOLES
)
DECODERS: list[tuple[Callable[[memoryview], Any], type[Exception]]] = [
    (decode_read_log, InvalidArgumentError),
    (decode_append_log, InvalidArgumentError),
    (decode_chunk, ServiceNotAvailableError),
    (decode_copied, ServiceNotAvailableError),
]


@given(READS)
def test_a_read_log_is_read_as_it_was_written(request_):
    assert decode_read_log(memoryview(encode_read_log(request_))) == request_


@given(LONG, HEADS, st.binary(max_size=200))
def test_a_carrier_does_not_change_a_chunk(epoch, head, data):
    answer = encode_chunk_head(head) + data
    assert decode_chunk(memoryview(answer)) == (head, data)
    assert decode_append_log(memoryview(encode_append_log(epoch) + answer)) == (epoch, head, data)


@given(LONG, LONG, LONG)
def test_the_answer_to_a_chunk_is_read_as_it_was_written(next_offset, acked_offset, copied_bytes):
    assert decode_copied(encode_copied(next_offset, acked_offset, copied_bytes)) == (
        next_offset,
        acked_offset,
        copied_bytes,
    )


@given(READS, st.sampled_from(["follower", "epoch", "next_offset", "acked_offset", "min_bytes", "max_bytes"]))
def test_a_number_that_does_not_fit_is_refused_before_anything_is_sent(request_, field):
    with pytest.raises(InvalidArgumentError):
        encode_read_log(request_._replace(**{field: 2**63}))


@given(st.binary(max_size=120))
@settings(max_examples=examples(300))
def test_any_bytes_are_decoded_or_refused(data):
    for decode, refusal in DECODERS:
        try:
            decode(memoryview(data))
        except refusal:
            pass


@given(READS, st.data())
def test_a_read_log_with_missing_or_extra_bytes_is_refused(request_, data):
    payload = encode_read_log(request_)
    cut = data.draw(st.integers(0, len(payload) - 1))
    for damaged in (payload[:cut], payload + b"x"):
        with pytest.raises(InvalidArgumentError):
            decode_read_log(memoryview(damaged))
