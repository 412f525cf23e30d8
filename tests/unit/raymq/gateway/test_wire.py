"""Tests of the gateway's messages: the table of their fields, the types in messages.pyi, unknown fields, and requests
with arbitrary bytes."""

from __future__ import annotations

import ast
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given, settings, strategies as st

from raymq.common.errors import InvalidArgumentError
from raymq.gateway.wire import messages as wire
from raymq.gateway.wire.enums import ENUMS, Code
from raymq.gateway.wire.parsing import (
    REQUEST_BYTES_MAX,
    SEND_MESSAGES_MAX,
    SEND_OTHERS_BYTES_MAX,
    RequestTooLargeError,
    parse_request,
)
from raymq.gateway.wire.table import MESSAGES, METHODS
from tests.support.cases import chaos_seed, check_all, examples
from tests.support.gateway.random_messages import fill
from tests.support.gateway.stubs import STUB, stub

ROOT = Path(__file__).parents[4]
MEMORY_MAX_BYTES = 160 << 20

# The program parses hostile requests, and prints how many bytes of memory the largest of these takes.
HOSTILE = """
import json, sys
from raymq.common.errors import InvalidArgumentError
from raymq.gateway.wire.messages import CLASSES
from raymq.gateway.wire.parsing import parse_request

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

MIB = 1 << 20
grown = []
for name, unit, total in (
    ("SendMessageRequest", b"\\x0a\\x00", 16 * MIB),
    ("SendMessageRequest", b"\\x0a\\x02\\x1a\\x00", 16 * MIB),
    ("SendMessageRequest", b"\\x12\\x00", 16 * MIB),
    ("AckMessageRequest", b"\\x1a\\x00", MIB),
    ("TelemetryCommand", b"\\x12\\x04\\x32\\x02\\x12\\x00", MIB),
    ("QueryRouteRequest", b"\\x12\\x02\\x12\\x00", MIB),
):
    before = resident()
    try:
        kept = parse_request(CLASSES[name], unit * (total // len(unit)))
    except InvalidArgumentError:
        kept = None
    grown.append(resident() - before)
print(json.dumps(max(grown)))
"""


QUEUE = """
import sys
import raymq, raymq.client.client, raymq.gateway.wire.table
print(sorted({"grpc", "raymq.gateway.wire.messages"} & sys.modules.keys()))
"""


def test_a_number_and_a_name_occur_once_in_a_message() -> None:
    names = [message.name for message in MESSAGES]
    assert len(names) == len(set(names)) == 65
    for message in MESSAGES:
        for values in zip(*((field.number, field.name) for field in message.fields), strict=True):
            assert len(set(values)) == len(values), message.name


def test_every_method_has_its_messages() -> None:
    assert len({method.name for method in METHODS}) == len(METHODS) == 17
    assert {name for method in METHODS for name in (method.request, method.response)} <= wire.CLASSES.keys()


def test_enumerations_have_a_zero_and_every_status_has_three_digits_of_http() -> None:
    for enum in ENUMS:
        assert 0 in list(enum), enum
    assert {code // 10_000 for code in Code} == {0, 2, 3, 4, 5, 6}


def test_the_stub_has_the_types_of_the_table() -> None:
    """`python -m tests.support.gateway.stubs` writes the stub anew."""
    assert ast.dump(ast.parse(STUB.read_text())) == ast.dump(ast.parse(stub()))


def test_unknown_fields_survive_a_copy() -> None:
    newer = b"\xfa\x3f\x05hello"  # field 1023 with a text
    raw = wire.Settings(user_agent=wire.UA(hostname="here")).SerializeToString() + newer
    command = wire.TelemetryCommand(settings=wire.Settings.FromString(raw))
    answer = wire.TelemetryCommand()
    answer.settings.CopyFrom(wire.TelemetryCommand.FromString(command.SerializeToString()).settings)
    [field] = UnknownFieldSet(answer.settings)
    assert (field.field_number, field.data) == (1023, b"hello")
    assert newer in answer.SerializeToString()


def test_an_empty_optional_field_is_not_an_absent_field() -> None:
    empty = wire.SystemProperties.FromString(wire.SystemProperties(tag="").SerializeToString())
    assert empty.HasField("tag")
    assert not wire.SystemProperties().HasField("tag")


def test_every_message_with_every_field_parses_from_its_own_bytes() -> None:
    rng = random.Random(chaos_seed())

    def check(name: str) -> None:
        message = fill(wire.CLASSES[name](), rng)
        assert type(message).FromString(message.SerializeToString()) == message

    check_all(sorted(wire.CLASSES), check)


@settings(max_examples=examples(300), deadline=None)
@given(
    name=st.sampled_from(sorted({method.request for method in METHODS})),
    seed=st.integers(0, 2**32),
    cuts=st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=4)), max_size=4),
)
def test_damaged_bytes_are_refused_or_parsed(name: str, seed: int, cuts: list[tuple[float, bytes]]) -> None:
    raw = bytearray(fill(wire.CLASSES[name](), random.Random(seed)).SerializeToString())
    for place, data in cuts:
        at = int(place * len(raw))
        raw[at : at + 2] = data
    try:
        request = parse_request(wire.CLASSES[name], bytes(raw))
    except InvalidArgumentError:
        return
    assert request.SerializeToString() is not None


@settings(max_examples=examples(300), deadline=None)
@given(name=st.sampled_from(sorted({method.request for method in METHODS})), raw=st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_or_parsed(name: str, raw: bytes) -> None:
    try:
        parse_request(wire.CLASSES[name], raw)
    except InvalidArgumentError:
        pass


def test_a_request_with_too_many_bytes_or_messages_is_refused() -> None:
    message = wire.Message(body=b"x" * 500)
    request = wire.SendMessageRequest(messages=[message] * SEND_MESSAGES_MAX)
    assert parse_request(wire.SendMessageRequest, request.SerializeToString()) == request
    request.messages.add()
    with pytest.raises(RequestTooLargeError, match="more than 1024 messages"):
        parse_request(wire.SendMessageRequest, request.SerializeToString())
    big = wire.AckMessageRequest(topic=wire.Resource(name="x" * REQUEST_BYTES_MAX))
    with pytest.raises(RequestTooLargeError, match="at most 1048576"):
        parse_request(wire.AckMessageRequest, big.SerializeToString())


def test_fields_beside_the_bodies_of_a_send_are_bounded() -> None:
    body = b"b" * (SEND_OTHERS_BYTES_MAX + 1)
    request = wire.SendMessageRequest(messages=[wire.Message(body=body), wire.Message(body=body)])
    assert parse_request(wire.SendMessageRequest, request.SerializeToString()) == request
    # an empty key has two bytes, and takes many times as much memory
    request.messages[1].system_properties.keys.extend([""] * (SEND_OTHERS_BYTES_MAX // 2))
    with pytest.raises(RequestTooLargeError, match="beside their bodies"):
        parse_request(wire.SendMessageRequest, request.SerializeToString())
    small = b"\x0a\x04\x1a\x05\x12\x00"
    with pytest.raises(InvalidArgumentError):
        parse_request(wire.SendMessageRequest, small + b"\x0a\x00" * 3)


def test_only_the_settings_of_a_client_keep_unknown_fields() -> None:
    unknown = b"\xfa\x3e\x04rest"
    topic = wire.Resource.FromString(unknown + b"\x12\x06orders")
    asked = parse_request(wire.QueryRouteRequest, wire.QueryRouteRequest(topic=topic).SerializeToString())
    assert asked.topic.SerializeToString() == b"\x12\x06orders", "a route repeats the topic for each queue"
    command = b"\x12" + bytes([len(unknown)]) + unknown
    assert parse_request(wire.TelemetryCommand, command).SerializeToString() == command


@pytest.mark.parametrize("cut", [1, 2, 3, 400])
def test_a_cut_request_is_refused(cut: int) -> None:
    raw = wire.SendMessageRequest(messages=[wire.Message(body=b"x" * 500)]).SerializeToString()
    with pytest.raises(InvalidArgumentError, match="ends inside a message"):
        parse_request(wire.SendMessageRequest, raw[:-cut] if cut != 2 else b"\x0a" + b"\xff" * 12)


def test_hostile_requests_take_bounded_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOSTILE],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) < MEMORY_MAX_BYTES


def test_the_queue_imports_neither_grpc_nor_the_messages() -> None:
    done = subprocess.run(
        [sys.executable, "-c", QUEUE],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == "[]"
