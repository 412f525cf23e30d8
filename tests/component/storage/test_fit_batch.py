"""Tests of a store that must extend the records of its producers, because its address is an IPv6 address or because it
adds a property CRC."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from raymq.common.errors import MessageIllegalError
from raymq.common.message import Message
from raymq.records.format.decode import decode_records
from raymq.records.format.encode import EncodedBatch, encode_batch
from raymq.records.format.message_id import offset_message_id
from storage.append.fit_batch import with_ipv6_store_host
from storage.message_store import MessageStore
from tests.support.stores.stores import bodies_of, killed_copy, make_batch, read_queue, small_settings

pytestmark = pytest.mark.usefixtures("no_flushes")

BODIES = [b"%03d" % index + b"x" * (index * 7 % 400) for index in range(300)]


def open_ipv6(root: Path, **changes) -> MessageStore:
    return MessageStore.open(small_settings(root, **changes), broker_name="a", store_host=("fd00::17", 10911))


def encoded(bodies: list[bytes], *, born_ip: str = "127.0.0.1", store_host_ipv6: bool = False) -> EncodedBatch:
    return encode_batch(
        [Message("orders", body, tags="T", keys=["k"], flag=5) for body in bodies],
        0,
        born_host=(born_ip, 5000),
        born_timestamp_ms=1_700_000_000_000,
        message_ids=[f"{index:032X}" for index in range(len(bodies))],
        store_host_ipv6=store_host_ipv6,
    )


@pytest.mark.parametrize("born_ip", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("count", [1, 2, 50])
def test_room_made_later_is_the_room_that_the_encoder_would_have_left(count, born_ip):
    made = with_ipv6_store_host(encoded(BODIES[:count], born_ip=born_ip))
    left = encoded(BODIES[:count], born_ip=born_ip, store_host_ipv6=True)
    assert bytes(made.records) == bytes(left.records)
    assert np.array_equal(made.sizes, left.sizes)
    assert with_ipv6_store_host(left) is left


def test_a_batch_with_wrong_sizes_is_refused():
    batch = encoded(BODIES[:3])
    batch.sizes[1] += 1
    with pytest.raises(MessageIllegalError):
        with_ipv6_store_host(batch)


@pytest.mark.parametrize("prop_crc", [False, True])
def test_producers_use_such_a_store_as_any_other(tmp_path, prop_crc):
    changes = {"enabled_append_prop_crc": prop_crc, "force_verify_prop_crc": prop_crc}
    store = open_ipv6(tmp_path / "store", **changes)
    [single] = store.append([make_batch(BODIES[:1], producer=("p", 0, 0))])
    [rest] = store.append([make_batch(BODIES[1:], producer=("p", 0, 1))])
    [again] = store.append([make_batch(BODIES[:1], producer=("p", 0, 0))])
    assert again.duplicate
    killed = killed_copy(tmp_path / "store", tmp_path / "killed")
    messages = read_queue(store)
    assert [message.body for message in messages] == BODIES
    assert {message.store_host for message in messages} == {"[fd00::17]:10911"}
    [found] = decode_records(store.queries.by_physical_offset(messages[7].physical_offset))
    assert found.body == BODIES[7]
    assert found.offset_message_id == offset_message_id("fd00::17", 10911, found.physical_offset)
    assert single.physical_offset == 0
    assert rest.physical_offsets == tuple(message.physical_offset for message in messages[1:])
    store.close()
    for root in (tmp_path / "store", killed):
        store = open_ipv6(root, **changes)
        assert store.status().cut_bytes == 0
        assert bodies_of(store) == BODIES
        store.append([make_batch([b"more"])])
        store.close()


def test_a_store_with_a_new_address_family_reads_its_old_records(tmp_path):
    root = tmp_path / "store"
    for number, host in enumerate(["127.0.0.1", "fd00::17", "10.0.0.1", "::1"]):
        store = MessageStore.open(small_settings(root), broker_name="a", store_host=(host, 10911))
        store.append([make_batch([b"%d" % number])])
        assert bodies_of(store) == [b"%d" % index for index in range(number + 1)]
        store.close()


@pytest.mark.parametrize(("host", "prop_crc"), [("127.0.0.1", True), ("::1", False), ("::1", True)])
def test_a_producer_gets_the_offsets_of_records_that_the_store_made_longer(tmp_path, host, prop_crc):
    settings = small_settings(tmp_path, enabled_append_prop_crc=prop_crc)
    store = MessageStore.open(settings, broker_name="a", store_host=(host, 10911))
    batch = make_batch(BODIES[:5], producer=("p", 0, 0))
    for duplicate in (False, True):
        [result] = store.append([batch])
        assert result.duplicate is duplicate
        assert result.physical_offsets == tuple(message.physical_offset for message in read_queue(store))
    store.close()
