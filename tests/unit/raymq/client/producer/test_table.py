"""Tests of sending Arrow tables. Either all rows are accepted, or an error is raised before the first row is sent. The
result has offset ranges instead of one entry per row."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from raymq.client.producer import table as table_send
from raymq.client.producer.table import QueueRange
from raymq.common.errors import InvalidArgumentError, MessageIllegalError, SendUnknownError, ServiceNotAvailableError
from raymq.common.message import Message, MessageQueue, SendStatus
from raymq.records.format.decode import decode_records
from raymq.records.format.hashing import java_hash
from tests.support.clients.fakes import WAIT_S, FakeStore, topic_route
from tests.support.clients.producers import Gate
from tests.support.history.waiting import eventually

TEXT_MAP = pa.map_(pa.string(), pa.string())


def stored(store: FakeStore) -> dict[int, list]:
    """Return the messages that a fake store received, by queue id."""
    queues: dict[int, list] = {}
    for batches in store.attempts:
        for batch in batches:
            queues.setdefault(batch.queue_id, []).extend(decode_records(batch.records, broker_name="a"))
    return queues


def test_every_column_arrives(make):
    table = pa.table(
        {
            "body": pa.array([b"1", b"2", b"3"]),
            "tags": pa.array(["paid", None, "open"]),
            "keys": pa.array([["k1", "k2"], [], None], pa.list_(pa.string())),
            "properties": pa.array([[("shop", "Zürich")], [], None], TEXT_MAP),
        }
    )
    result = make(store := FakeStore()).send_table("orders", table)
    assert result.ranges == (QueueRange(MessageQueue("orders", "a", 0), 0, 3),)
    assert (result.count, result.statuses) == (3, {SendStatus.SEND_OK: 3})
    [messages] = stored(store).values()
    assert [message.body for message in messages] == [b"1", b"2", b"3"]
    assert [message.tags for message in messages] == ["paid", None, "open"]
    assert [message.keys for message in messages] == [("k1", "k2"), (), ()]
    assert [dict(message.properties) for message in messages] == [{"shop": "Zürich"}, {}, {}]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view(), pa.string(), pa.large_string()])
def test_bodies_may_be_bytes_or_text(make, kind):
    values = ["é", "z"] if "string" in str(kind) else ["é".encode(), b"z"]
    make(store := FakeStore()).send_table("orders", pa.record_batch({"body": pa.array(values, kind)}))
    assert store.everything() == ["é".encode(), b"z"]


def test_rows_of_one_key_go_to_one_queue_in_their_order(make, monkeypatch):
    monkeypatch.setattr(table_send, "TABLE_SLICE_ROWS", 7)
    keys = [f"user-{n % 5}" if n % 3 else None for n in range(100)]
    table = pa.table({"body": [b"%d" % n for n in range(100)], "sharding_key": keys})
    result = make(store := FakeStore(), route=topic_route(a=4)).send_table("orders", table)
    assert sum(piece.count for piece in result.ranges) == 100
    stored_at = {message.body: (queue, at) for queue, them in stored(store).items() for at, message in enumerate(them)}
    for key in set(keys) - {None}:
        positions = [stored_at[b"%d" % n] for n in range(100) if keys[n] == key]
        assert positions == sorted(positions)
        assert {queue for queue, _ in positions} == {abs(java_hash(key)) % 4}


@pytest.mark.parametrize(
    ("column", "array", "expected"),
    [
        ("tags", pa.array(["a", None, "b"]).dictionary_encode(), ["a", None, "b"]),
        ("tags", pa.array(["a", None, "b"], pa.string_view()).dictionary_encode(), ["a", None, "b"]),
        ("tags", pc.run_end_encode(pa.array(["a", "a", "b"])), ["a", "a", "b"]),
        ("tags", pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), pa.array(["a", None])), ["a", None, "a"]),
        ("body", pa.array([b"x", b"x", b"y"]).dictionary_encode(), [b"x", b"x", b"y"]),
        ("body", pa.array([b"xy", b"xx", b"yy"], pa.binary(2)), [b"xy", b"xx", b"yy"]),
        ("keys", pa.array(["a", None, "b"]).dictionary_encode(), [("a",), (), ("b",)]),
        ("keys", pa.array([["a"], None, ["b", "c"]], pa.list_view(pa.string())), [("a",), (), ("b", "c")]),
        ("keys", pa.array([["a"], None, ["b", "c"]], pa.large_list_view(pa.string())), [("a",), (), ("b", "c")]),
        ("keys", pa.array([["a", "b"], None, ["b", "c"]], pa.list_(pa.string(), 2)), [("a", "b"), (), ("b", "c")]),
        (
            "keys",
            pa.array([["a"], None, ["b", "a"]], pa.list_view(pa.dictionary(pa.int32(), pa.string()))),
            [("a",), (), ("b", "a")],
        ),
        (
            "properties",
            pa.array([[("p", "a")], None, [("p", "b")]], pa.map_(pa.string(), pa.dictionary(pa.int8(), pa.string()))),
            [{"p": "a"}, {}, {"p": "b"}],
        ),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else None,
)
def test_a_column_in_another_layout_is_sent_as_its_values(make, monkeypatch, column, array, expected):
    monkeypatch.setattr(table_send, "TABLE_SLICE_ROWS", 2)
    # Double the column, so that the second half of the table is an Arrow slice whose offset is not 0.
    array = pa.concat_arrays([array, array])
    columns = {"body": pa.array([b"%d" % n for n in range(6)]), column: array}
    whole = pa.table(columns)
    for sent in (whole.slice(1), pa.concat_tables([whole.slice(1, 2), whole.slice(3)])):
        make(store := FakeStore()).send_table("orders", sent)
        [messages] = stored(store).values()
        found = [getattr(message, column) for message in messages]
        assert [dict(one) if column == "properties" else one for one in found] == (expected * 2)[1:]


def test_categories_and_the_index_of_pandas_are_accepted(make):
    frame = pd.DataFrame({"body": list("1234"), "tags": pd.Categorical(list("aaba"))})
    table = pa.Table.from_pandas(frame[frame["tags"] == "a"])
    assert "__index_level_0__" in table.column_names
    make(store := FakeStore()).send_table("orders", table)
    [messages] = stored(store).values()
    assert [(message.body, message.tags) for message in messages] == [(body, "a") for body in (b"1", b"2", b"4")]


def test_an_index_with_a_name_is_still_an_unknown_column(make):
    table = pa.Table.from_pandas(pd.DataFrame({"body": ["1"]}, index=pd.Index(["x"], name="customer")))
    with pytest.raises(InvalidArgumentError, match="column 'customer' is unknown"):
        make(FakeStore()).send_table("orders", table)


def test_the_values_of_another_layout_must_fit(make):
    numbers = pa.array([1, 2]).dictionary_encode()
    with pytest.raises(InvalidArgumentError, match=r"column 'tags' is dictionary<.*, not string"):
        make(FakeStore()).send_table("orders", pa.table({"body": [b"x", b"y"], "tags": numbers}))


@pytest.mark.parametrize("kind", [pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()], ids=str)
def test_keys_without_a_sign_are_hashed_like_other_numbers(make, kind):
    largest = min(2**kind.bit_width - 1, 2**63 - 1)
    for number in (0, 7, largest):
        queues = []
        for keys in (pa.array([number], kind), pa.array([number], pa.int64())):
            result = make(FakeStore(), route=topic_route(a=64)).send_table(
                "orders", pa.table({"body": [b"x"], "sharding_key": keys})
            )
            queues.append(result.ranges[0].queue)
        assert queues[0] == queues[1]


def test_a_key_that_is_too_large_is_refused_before_the_first_row_is_sent(make):
    keys = pa.array([1, None, 2**63], pa.uint64())
    with pytest.raises(MessageIllegalError, match=r"row 2: the sharding key 9223372036854775808 is greater than"):
        make(store := FakeStore()).send_table("orders", pa.table({"body": [b"x"] * 3, "sharding_key": keys}))
    assert store.attempts == []


def test_numbers_are_keys_too(make):
    table = pa.table({"body": [b"x"] * 3, "sharding_key": pa.array([1001, -1, 2], pa.int64())})
    result = make(FakeStore(), route=topic_route(a=4)).send_table("orders", table)
    assert {(piece.queue.queue_id, piece.count) for piece in result.ranges} == {(1, 2), (2, 1)}


def test_rows_without_a_key_are_spread_and_go_to_another_broker_when_refused(make):
    a, b = FakeStore("storage-a-0"), FakeStore("storage-b-0")
    a.connects = [ServiceNotAvailableError("away")] * 1000
    result = make(a, b, route=topic_route(a=1, b=1)).send_table("orders", pa.table({"body": [b"x"] * 3000}))
    assert {piece.queue.broker_name for piece in result.ranges} == {"b"}
    assert len(b.everything()) == 3000


def test_more_rows_than_the_buffer_holds_pass_through_it(make):
    producer = make(store := FakeStore(), max_buffered_messages=300, when_full="raise")
    table = pa.table({"body": [b"%d" % n for n in range(5000)]})
    assert producer.send_table("orders", table).count == 5000
    assert sorted(store.everything(), key=int) == [b"%d" % n for n in range(5000)]


@pytest.mark.parametrize("queues", [1, 2, 4, 5, 6, 16])
@pytest.mark.parametrize("column", ["body", "sharding_key"])
def test_rows_without_a_key_are_spread_evenly(make, queues, column):
    """Rows without a sharding key are spread evenly over the queues. The test fails if each part of a slice of rows has
    about 1 MiB. Then each slice has one large and one small part. The parts alternate between queues, so some queues
    get only small parts."""
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    rows = rng.randrange(256 * queues, 20_000 + 256 * queues)
    bodies = [bytes(rng.randrange(200, 400)) for _ in range(rows)]
    columns = {"body": bodies, "sharding_key": pa.nulls(rows, pa.string())}
    table = pa.table(columns if column == "sharding_key" else {"body": bodies})
    result = make(FakeStore(), route=topic_route(a=queues)).send_table("orders", table)
    counts = Counter[int]()
    for piece in result.ranges:
        counts[piece.queue.queue_id] += piece.count
    assert (len(counts), counts.total()) == (queues, rows)
    assert max(counts.values()) - min(counts.values()) <= rows / queues * 0.05


@pytest.mark.parametrize("rows", [300, 700, 257])
def test_small_tables_spread_their_rows_evenly_together(make, rows):
    producer = make(store := FakeStore(), route=topic_route(a=4))
    table = pa.table({"body": [b"x"] * rows})
    for _ in range(16):
        producer.send_table("orders", table)
    counts = [len(messages) for messages in stored(store).values()]
    assert len(counts) == 4
    assert max(counts) - min(counts) <= sum(counts) / 4 * 0.05


def test_rows_with_a_key_do_not_disturb_the_spread_of_the_others(make):
    rows = 20_000
    keys = pa.array(["one" if n % 3 else None for n in range(rows)])
    table = pa.table({"body": [bytes(300)] * rows, "sharding_key": keys, "tags": keys})
    make(store := FakeStore(), route=topic_route(a=4)).send_table("orders", table)
    counts = [sum(message.tags is None for message in messages) for messages in stored(store).values()]
    assert len(counts) == 4
    assert max(counts) - min(counts) <= sum(counts) / 4 * 0.05


def test_an_empty_table_is_sent(make):
    assert make(FakeStore()).send_table("orders", pa.table({"body": pa.array([], pa.binary())})).count == 0


@pytest.mark.parametrize(
    ("table", "what"),
    [
        ({"tags": ["x"]}, "column 'body' is missing"),
        ({"body": [1]}, "column 'body' is int64, not binary or string"),
        ({"body": [b"x"], "colour": ["red"]}, "column 'colour' is unknown"),
        ({"body": [b"x"], "tags": [b"x"], "keys": [1]}, "'tags' is binary, not string; column 'keys' is int64"),
        ({"body": [b"x"], "properties": [{"a": "b"}]}, "not map of string to string"),
        ({"body": [b"x"], "sharding_key": [1.5]}, "not string or integer"),
    ],
)
def test_columns_that_do_not_fit_are_refused_by_name(make, table, what):
    with pytest.raises(InvalidArgumentError, match=what):
        make(store := FakeStore()).send_table("orders", pa.table(table))
    assert store.attempts == []


def test_an_argument_that_is_no_table_is_refused(make):
    with pytest.raises(InvalidArgumentError, match="not list"):
        make(FakeStore()).send_table("orders", [b"x"])


@pytest.mark.parametrize(
    ("column", "value", "what"),
    [
        ("body", None, "row 4000: the message body is null"),
        ("body", b"", "row 4000: a message body must not be empty"),
        ("tags", "a || b", "row 4000: tag 'a || b'"),
        ("tags", "*", r"row 4000: tag '\*' is not legal"),
        ("keys", "two words", "row 4000: key 'two words' contains a space"),
        ("properties", [("TAGS", "x")], "row 4000: property 'TAGS' is reserved"),
        ("properties", [("a", "x"), ("a", "y")], "row 4000: a property name occurs twice"),
        ("properties", [("a", "x" * 33000)], "row 4000: a message's properties"),
    ],
)
def test_a_bad_row_is_named_and_no_row_is_sent(make, column, value, what):
    columns = {"body": [b"x"] * 5000, "tags": ["t"] * 5000, "keys": ["k"] * 5000, "properties": [[("p", "v")]] * 5000}
    columns[column][4000] = value
    table = pa.table({**columns, "properties": pa.array(columns["properties"], TEXT_MAP)})
    with pytest.raises(MessageIllegalError, match=what.replace("|", r"\|")) as raised:
        make(store := FakeStore()).send_table("orders", table)
    assert "no row was sent" in str(raised.value)
    assert store.attempts == []


def test_the_error_of_a_table_has_the_number_of_acknowledged_rows(make, clock):
    producer = make(store := FakeStore())
    store.script = [None, *[clock.passes(ServiceNotAvailableError("away"))] * 1000]
    with pytest.raises((SendUnknownError, ServiceNotAvailableError)) as raised:
        producer.send_table("orders", pa.table({"body": [b"x" * 5000] * 20_000}))
    acknowledged = len(store.everything())
    assert acknowledged
    assert raised.value.__notes__ == [f"{acknowledged} of the table's 20000 rows were acknowledged"]


def rich_table(rows: range) -> pa.Table:
    """Return a table that has a column for every message property. Each row has different values."""
    return pa.table(
        {
            "body": [b"%d" % n for n in rows],
            "tags": [f"tag{n}" for n in rows],
            "keys": [[f"k{n}", "all"] for n in rows],
            "properties": pa.array([[("n", str(n))] for n in rows], TEXT_MAP),
        }
    )


def assert_is_row(message, n: int) -> None:
    assert (message.body, message.tags, message.keys) == (b"%d" % n, f"tag{n}", (f"k{n}", "all"))
    assert dict(message.properties) == {"n": str(n)}


def test_rows_and_messages_that_gather_go_together_as_they_are(make):
    producer = make(store := FakeStore(script=[gate := Gate()]))
    producer.send_async(Message("orders", b"first"))
    assert gate.entered.wait(WAIT_S)
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(producer.send_table, "orders", rich_table(range(20)))
        assert eventually(lambda: producer.pipeline.buffer._count >= 21, "the rows wait")
        later = producer.send_async(Message("orders", b"later", "tag", ("key",)))
        gate.opened.set()
        assert sent.result(WAIT_S).count == 20
    later.result(WAIT_S)
    assert [len(batches) for batches in store.attempts] == [1, 1]
    [messages] = stored(store).values()
    for n, message in enumerate(messages[1:21]):
        assert_is_row(message, n)
    assert (messages[0].body, messages[0].tags) == (b"first", None)
    assert (messages[21].body, messages[21].tags, messages[21].keys) == (b"later", "tag", ("key",))


def test_several_parts_of_a_table_are_encoded_as_one_batch(make, monkeypatch):
    monkeypatch.setattr(table_send, "TABLE_SLICE_ROWS", 7)
    producer = make(store := FakeStore(script=[gate := Gate()]))
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(producer.send_table, "orders", rich_table(range(100)))
        assert eventually(lambda: producer.pipeline.buffer._count == 100, "the rows wait")
        gate.opened.set()
        assert sent.result(WAIT_S).count == 100
    assert max(len(batch) for batches in store.attempts for batch in batches) > 7
    [messages] = stored(store).values()
    for n, message in enumerate(messages):
        assert_is_row(message, n)


def test_refused_rows_are_distinguished_from_stored_rows(make):
    def refuse(batches):
        bodies = [m.body for batch in batches for m in decode_records(batch.records, broker_name="a")]
        return MessageIllegalError("the store does not like 13") if b"13" in bodies else None

    producer = make(store := FakeStore(script=[refuse] * 1000))
    with pytest.raises(MessageIllegalError, match="does not like 13") as raised:
        producer.send_table("orders", rich_table(range(40)))
    assert raised.value.__notes__ == ["39 of the table's 40 rows were acknowledged"]
    assert sorted(map(int, store.everything())) == [n for n in range(40) if n != 13]
    for messages in stored(store).values():
        for message in messages:
            assert_is_row(message, int(message.body))


def test_a_body_that_the_store_finds_too_long_is_refused(make):
    producer = make(store := FakeStore())
    store.max_message_size_bytes = 1000
    compressible = b"x" * 100_000
    assert producer.send_table("orders", pa.table({"body": [compressible, b"y"]})).count == 2
    with pytest.raises(MessageIllegalError, match="exceeds the store's limit of 1000"):
        producer.send_table("orders", pa.table({"body": [b"z", random.Random(1).randbytes(5000)]}))
    assert sorted(store.everything()) == [compressible, b"y", b"z"]


def test_a_body_longer_than_the_producer_allows_is_refused(make):
    producer = make(store := FakeStore(), max_message_size_bytes=10)
    with pytest.raises(
        MessageIllegalError, match="row 1: a message body of 11 bytes exceeds this producer's max_message_size"
    ):
        producer.send_table("orders", pa.table({"body": [b"x" * 10, b"y" * 11]}))
    assert store.attempts == []


def test_hooks_see_each_row_as_a_message(make):
    seen = []

    class Watch:
        def before_send(self, context):
            seen.append(("before", context.message))

        def after_send(self, context):
            seen.append(("after", context.result.queue_offset))

    make(FakeStore(), hooks=(Watch(),)).send_table("orders", rich_table(range(3)))
    for n in range(3):
        assert_is_row(seen[n][1], n)
    assert seen[3:] == [("after", 0), ("after", 1), ("after", 2)]


def test_large_tables_are_handed_over_in_parts_of_bounded_size(make, monkeypatch):
    monkeypatch.setattr(table_send, "PART_MAX_BYTES", 1000)
    producer = make(store := FakeStore(), route=topic_route(a=2))
    bodies = [bytes([n]) * size for n, size in enumerate([10, 990, 1, 5000, 999, 1, 1])]
    assert producer.send_table("orders", pa.table({"body": bodies})).count == 7
    assert sorted(store.everything()) == bodies


@pytest.mark.parametrize("table", [pa.table({"body": pa.nulls(2)}), pa.table({"body": ["x", None]})])
def test_null_bodies_are_refused_whatever_else_the_table_holds(make, table):
    with pytest.raises(MessageIllegalError, match="the message body is null"):
        make(store := FakeStore()).send_table("orders", table)
    with pytest.raises(MessageIllegalError, match="the message body is null"):
        make(store).send_table("orders", pa.Table.from_pandas(table.to_pandas(), preserve_index=False))
    assert store.attempts == []
