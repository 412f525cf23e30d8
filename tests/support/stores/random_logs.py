"""Random commit logs, as bytes. Most records are as a store writes them. Some records are as another program might
write them, and some bytes are damaged."""

from __future__ import annotations

import random
import shutil
import struct
from pathlib import Path

from raymq.common.names import SCHEDULE_TOPIC
from raymq.records.format.crc import body_crc
from raymq.records.format.layout import encode_blank
from raymq.records.logfiles.directory import file_name

FILE_BYTES = 8192
STORED_MS = 1_700_000_000_000
TOPICS = [b"alpha", b"beta", b"\xc3\xbc", SCHEDULE_TOPIC.encode()]
LMQ_TOPICS = [b"%LMQ%a", b"%LMQ%b", b"%LMQ%c"]
ODD_TOPICS = [b"", b"..", b"a/b", b"\xff", b"t" * 140]
PRODUCERS = [b"p", b"q", b"\xff", f"rmq_sys_delivery/{SCHEDULE_TOPIC}/2".encode()]
ODD_PROPERTIES = [
    b"TAGS\x01a\x02TAGS\x01b\x02",
    b"TAGS\x01\x02",
    b"\x02\x02TAGS\x01x\x01y",
    b"TAGS\x01\xff\xfe\x02",
    b"XTAGS\x01a\x02TAG\x01b\x02",
    b"TAGS\x01" + b"long" * 200 + b"\x02",
    b"n\x01v\x00",
    b"TAGS\x01red\x00",
    b"RMQ_PID\x01p\x02RMQ_EPOCH\x010\x02RMQ_SEQ\x01900\x02REAL_TOPIC\x01alpha\x02",
    b"REAL_TOPIC\x01a\x02REAL_TOPIC\x01b\x02",
    b"TAGS\x01x\xed\xa0\x80y",
    b"\x01",
    b"INNER_MULTI_DISPATCH\x01%LMQ%a\x02",
    b"INNER_MULTI_DISPATCH\x01%LMQ%a,%LMQ%b\x02INNER_MULTI_QUEUE_OFFSET\x010\x02",
    b"INNER_MULTI_DISPATCH\x01%LMQ%a,..,alpha,\x02INNER_MULTI_QUEUE_OFFSET\x01x,0,0\x02",
    b"INNER_MULTI_DISPATCH\x01%LMQ%a,%LMQ%a\x02INNER_MULTI_QUEUE_OFFSET\x010,0\x02",
    b"INNER_MULTI_DISPATCH\x01%LMQ%b\x02INNER_MULTI_QUEUE_OFFSET\x01999999999999\x02",
    b"RMQ_PID\x01p\x02",
    b"RMQ_EPOCH\x011\x02RMQ_SEQ\x011\x02",
    b"RMQ_PID\x01\x02RMQ_EPOCH\x011\x02RMQ_SEQ\x011\x02",
    b"RMQ_PID\x01p\x02RMQ_EPOCH\x01x\x02RMQ_SEQ\x011\x02",
    b"RMQ_PID\x01p\x02RMQ_EPOCH\x01 1\x02RMQ_SEQ\x0117\x02",
    b"RMQ_PID\x01p\x02RMQ_EPOCH\x011\x02RMQ_SEQ\x01-1\x02",
    b"RMQ_PID\x01p\x02RMQ_EPOCH\x010\x02RMQ_SEQ\x01%d\x02" % 10**17,
    b"RMQ_PID\x01p\x02RMQ_EPOCH\x010\x02RMQ_SEQ\x01%d\x02" % 10**18,
]


class Log:
    """A random commit log: mostly records that a store writes, sometimes records that RocketMQ or another writer might
    write."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.oddity = dice.choice((0.0, 0.0, 0.02, 0.2))
        self.disorder = dice.choice((0.0, 0.0, 0.01, 0.1))
        self.batches = dice.choice((0.0, 0.0, 0.0, 0.02, 0.3))
        self.dispatches = dice.choice((0.0, 0.0, 0.02, 0.3))
        self.topics = dice.sample(TOPICS, dice.randrange(1, 4))
        self.topic, self.queue_id, self.producer = self.topics[0], 0, PRODUCERS[0]
        self.queue_offsets: dict[tuple[bytes, int], int] = {}
        self.sequences: dict[bytes, int] = {}
        self.files = [bytearray()]
        self.starts: list[int] = []

    def write(self, count: int) -> None:
        for _ in range(count):
            self.append()

    def append(self) -> None:
        before = self.queue_offsets.copy(), self.sequences.copy()
        record = self.record(len(self.files) * FILE_BYTES - FILE_BYTES + len(self.files[-1]))
        if len(self.files[-1]) + len(record) + 8 > FILE_BYTES:
            self.files[-1] += encode_blank(FILE_BYTES - len(self.files[-1]))
            self.files.append(bytearray())
            # The record did not fit into the log file and is encoded again for the next file, with the same queue
            # offset and sequence.
            self.queue_offsets, self.sequences = before
            record = self.record(len(self.files) * FILE_BYTES - FILE_BYTES)
        self.starts.append(len(self.files) * FILE_BYTES - FILE_BYTES + len(self.files[-1]))
        self.files[-1] += record

    def record(self, physical_offset: int) -> bytes:
        dice = self.dice
        odd = dice.random() < self.oddity
        if dice.random() < 0.4:
            self.topic, self.queue_id = dice.choice(self.topics), dice.randrange(2)
        topic, queue_id = dice.choice(ODD_TOPICS) if odd and dice.random() < 0.1 else self.topic, self.queue_id
        flags = dice.choice((0, 0x10, 0x20, 0x30, 0x4, 0x8, 0xC, 0x80)) if odd else 0
        queue_offset = self.queue_offsets.get((topic, queue_id), 0)
        messages = dice.randrange(1, 4) if dice.random() < self.batches else 0
        if messages:
            flags |= 0x80
        if messages or not flags & 0x84:
            self.queue_offsets[topic, queue_id] = queue_offset + max(messages, 1)
        if dice.random() < self.disorder:
            queue_offset = dice.choice((queue_offset + 1, 0, -1, 1 << 40, max(queue_offset - 2, 0)))
        body = dice.randbytes(dice.choice((0, 1, 12, 50, 50, 50, 300)))
        properties = dice.choice(ODD_PROPERTIES) if odd else self.properties()
        if messages:
            properties = b"INNER_NUM\x01%d\x02INNER_BASE\x01%d\x02" % (messages, queue_offset)
        elif not odd and not flags & 0x84 and topic != TOPICS[-1]:
            properties = self.elsewhere(properties)
        long_topic = len(topic) > 127 or (odd and dice.random() < 0.3)
        head = struct.pack(
            f">iiiiqqiq{20 if flags & 0x10 else 8}sq{20 if flags & 0x20 else 8}siqi",
            -626843477 if long_topic else -626843481,
            body_crc(body), queue_id, 0, queue_offset, physical_offset, flags, STORED_MS,
            bytes(range(20)), STORED_MS + len(self.files) * 5000, bytes(range(20)), 0, 0, len(body),
        )  # fmt: skip
        topic_size = struct.pack(">h", len(topic)) if long_topic else bytes([len(topic)])
        rest = body + topic_size + topic + struct.pack(">h", len(properties)) + properties
        return struct.pack(">i", 4 + len(head) + len(rest)) + head + rest

    def properties(self) -> bytes:
        dice = self.dice
        text = dice.choice(
            (b"", b"TAGS\x01red\x02", b"TAGS\x01\xe6\xb6\x88\x02", b"n\x01v\x02TAGS\x01blue\x02", b"n\x01v")
        )
        text += dice.choice((b"", b"DELAY\x01%d\x02" % dice.randrange(20))) if not text or text[-1] == 2 else b""
        if dice.random() < 0.8 and (not text or text[-1] == 2):
            if dice.random() < 0.3:
                self.producer = dice.choice(PRODUCERS)
            producer = self.producer
            sequence = self.sequences.get(producer, 0) + dice.choice((1, 1, 1, 1, 1, 1, 7, -2))
            self.sequences[producer] = sequence = max(sequence, 0)
            epoch = dice.randrange(2) if dice.random() < 0.1 else 0
            text += b"RMQ_PID\x01%b\x02RMQ_EPOCH\x01%d\x02RMQ_SEQ\x01%d\x02" % (producer, epoch, sequence)
        return text

    def elsewhere(self, properties: bytes) -> bytes:
        """Return `properties`, unchanged or with more properties; chance decides. The added properties also place the
        record in one or two light queues (LMQ)."""
        if self.dice.random() >= self.dispatches or not properties.endswith(b"\x02"):
            return properties
        names = self.dice.sample(LMQ_TOPICS, self.dice.randrange(1, 3))
        offsets = [self.queue_offsets.get((name, 0), 0) for name in names]
        for name, offset in zip(names, offsets, strict=True):
            self.queue_offsets[name, 0] = offset + 1
        texts = b",".join(names), b",".join(b"%d" % offset for offset in offsets)
        return properties + b"INNER_MULTI_DISPATCH\x01%b\x02INNER_MULTI_QUEUE_OFFSET\x01%b\x02" % texts

    def put(self, root: Path) -> None:
        """Write the log below `root`, each file at its full size."""
        directory = root / "commitlog"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        for index, data in enumerate(self.files):
            (directory / file_name(index * FILE_BYTES)).write_bytes(data.ljust(FILE_BYTES, b"\0"))

    def delete(self, topic: bytes) -> None:
        """Forget the queue offsets of a topic, as if the topic was deleted: the topic's next records start at queue
        offset 0 again."""
        self.queue_offsets = {key: offset for key, offset in self.queue_offsets.items() if key[0] != topic}

    def damage(self) -> None:
        dice = self.dice
        file = dice.choice(self.files)
        if not file:
            return
        at = dice.randrange(len(file))
        match dice.randrange(4):
            case 0:
                file[at] ^= 1 << dice.randrange(8)
            case 1:
                file[at : at + 512] = bytes(len(file[at : at + 512]))
            case 2:
                # damage one byte of a record: in its header, or at a length field after its body
                start = dice.choice(self.starts)
                at = start % FILE_BYTES + dice.randrange(100)
                target = self.files[start // FILE_BYTES]
                if at < len(target):
                    target[at] = dice.randrange(256)
            case _:
                file[at : at + 20] = dice.randbytes(len(file[at : at + 20]))
