"""Stores a broadcasting instance's offsets in a file on its node (spec/messaging.md §5.11).

    DIRECTORY/offsets.json        {"offsetTable": [{"topic": …, "brokerName": …, "queueId": 0, "offset": 12,
                                                    "creationId": "0a1b…"}, …]}
    DIRECTORY/offsets.json.bak    the same (storage/files/two_copies.py)

Both copies end with a version and a checksum, written as white space. A crash at any point leaves one complete file.

`creationId` is the creation id of the topic in the broker group (raymq.common.protocol.route.TopicConfig). If a topic
is deleted and created again, its stored offsets do not apply: the new topic is read from its beginning. Files of older
versions lack this field.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from raymq.client.consumer.assignment.offset_committer import COMMIT_TIMEOUT_S, RESET_QUERY_INTERVAL_S
from raymq.client.consumer.group_offsets import GroupOffsets
from raymq.client.consumer.push.settings import PushSettings
from raymq.client.scan.ranges import NO_CREATIONS, Creations, is_created_anew
from raymq.common.errors import NoPermissionError, RaymqError, ServiceNotAvailableError, StoreCorruptError
from raymq.common.message import MessageQueue
from raymq.common.protocol.group import CommitAnswer, OffsetCommit, QueueOffset
from storage.files.config_files import SealedText
from storage.files.damage import DamageNotes
from storage.files.two_copies import TwoCopies

DEFAULT_DIRECTORY: Final = "~/.raymq/offsets"
BROADCAST_CHECK_TIMEOUT_S: Final = 1.0
"""Timeout, in seconds, of a query that asks a broker whether the group may still read its topics."""
BROADCAST_CHECK_PAUSE_S: Final = 10.0
"""Pause, in seconds, after a query that a broker did not answer. The query asks the broker if the group may still read
its topics."""

logger = logging.getLogger(__name__)


class LocalOffsets:
    """The offset files of one broadcasting push-consumer instance, in `directory`. Only one instance at a time uses
    this directory: its Listener is a Ray actor with a unique name."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "offsets.json"
        self._copies = TwoCopies(self._file, SealedText(is_json=True), DamageNotes())
        self.creation_ids: dict[MessageQueue, str] = {}
        """Topic creation ids (raymq.common.protocol.route.TopicConfig) for the queues that have offsets, by queue.
        Unknown ids are missing."""
        self._saved_ids: dict[MessageQueue, str] = {}

    @property
    def has_new_ids(self) -> bool:
        """True if the known creation ids of topics differ from the ids in the offset file."""
        return self.creation_ids != self._saved_ids

    def load(self) -> dict[MessageQueue, int]:
        """Read the last saved offsets; empty if none were saved. Raises ServiceNotAvailableError if offset files exist,
        but none can be read."""
        try:
            text = self._copies.read()
            if text is None:
                return {}
            rows = json.loads(text)["offsetTable"]
            queues = [MessageQueue(r["topic"], r["brokerName"], int(r["queueId"])) for r in rows]
            offsets = {queue: int(row["offset"]) for queue, row in zip(queues, rows, strict=True)}
            pairs = zip(queues, rows, strict=True)
            self.creation_ids = {queue: str(row["creationId"]) for queue, row in pairs if "creationId" in row}
            self._saved_ids = dict(self.creation_ids)
            return offsets
        except (OSError, StoreCorruptError, ValueError, KeyError, TypeError) as error:
            raise ServiceNotAvailableError(
                f"cannot read the local offsets ({self._file}: {error}); repair or delete the file and its .bak copy"
            ) from error

    def save(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Save all offsets with their topics' creation ids. Durable on return.

        Raises ServiceNotAvailableError if the disk fails; the previously saved offsets are still on disk.
        """
        rows = [
            {
                "topic": queue.topic,
                "brokerName": queue.broker_name,
                "queueId": queue.queue_id,
                "offset": offset,
                **({"creationId": self.creation_ids[queue]} if queue in self.creation_ids else {}),
            }
            for queue, offset in sorted(offsets.items())
        ]
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._copies.write(json.dumps({"offsetTable": rows}).encode())
            self._saved_ids = dict(self.creation_ids)
        except OSError as error:
            raise ServiceNotAvailableError(f"cannot write the local offsets to file {self._file}: {error}") from error


class LocalFileOffsetStore:
    """An OffsetStore (raymq.client.consumer.assignment.offset_committer) for a broadcasting instance, which stores
    offsets in a local file.

    For a queue that is not in the file, the group's broker decides the start offset. `creations` returns the known
    creation ids of topics.
    """

    may_be_reset = True
    """True, so that the push-consumer instance asks the broker at intervals for offset resets. Local offsets are never
    reset, but the broker's answer also shows if the group may still read its topics."""

    def __init__(
        self,
        name: str,
        settings: PushSettings,
        offsets: GroupOffsets,
        creations: Callable[[Iterable[str]], Creations] = lambda topics: NO_CREATIONS,
    ) -> None:
        self._creations = creations
        self._query = settings.start
        self._brokers = offsets
        directory = Path(settings.offsets_dir or DEFAULT_DIRECTORY).expanduser()
        self._file = LocalOffsets(directory / settings.group / (settings.instance_name or name))
        self._lock = threading.Lock()
        self._known: dict[MessageQueue, int] | None = None
        self._topics = sorted(settings.topics)
        self._check_at_s: dict[str, float] = {}
        """For each broker: the time at which the broker must be asked again if the group may still read its topics.
        Each broker has its own thread, and only this thread uses the broker's entry, here and in `_verdicts`."""
        self._verdicts: dict[str, Mapping[str, str]] = {}
        """For each broker: the topics that the group may not read, each with the reason, from the broker's last
        answer."""

    def prepare(self, broker_name: str, timeout_s: float) -> None:
        with self._lock:
            if self._known is None:
                self._known = self._file.load()

    def start_offsets(self, generations: Mapping[MessageQueue, int]) -> dict[MessageQueue, QueueOffset]:
        refused = {name: self._refusals(name, COMMIT_TIMEOUT_S) for name in {q.broker_name for q in generations}}
        queues = [queue for queue in generations if queue.topic not in refused[queue.broker_name]]
        now = self._creations(sorted({queue.topic for queue in queues}))
        with self._lock:
            known = self._known or {}
            starts = {q: QueueOffset(self._start(q, known[q], now)) for q in queues if q in known}
            for queue in queues:
                if creation_id := now.get(queue.topic, {}).get(queue.broker_name):
                    self._file.creation_ids[queue] = creation_id
            return starts

    def _start(self, queue: MessageQueue, offset: int, now: Creations) -> int:
        """Return the offset at which the push-consumer instance starts to read a queue that is in the offset file. The
        caller holds the lock."""
        before = self._file.creation_ids.get(queue)
        if before is None or not is_created_anew(queue, {queue.topic: {queue.broker_name: before}}, now):
            return offset
        logger.warning("queue %s is read from its beginning, because its topic was deleted and created again", queue)
        return 0

    def start_offset(self, queue: MessageQueue, generation: int) -> QueueOffset:
        self._brokers.check_broadcast(queue.broker_name, COMMIT_TIMEOUT_S, topics=[queue.topic])
        self._brokers.ensure_group(queue.broker_name, COMMIT_TIMEOUT_S)
        return self._brokers.start_offset(queue, self._query, generation, COMMIT_TIMEOUT_S)

    def commit_offsets(self, commits: Mapping[MessageQueue, OffsetCommit], timeout_s: float) -> CommitAnswer:
        with self._lock:
            offsets = dict(self._known or {})
            for queue, commit in commits.items():
                if commit.queue_offset is not None:
                    offsets[queue] = commit.queue_offset
            if offsets != self._known or self._file.has_new_ids:
                self._file.save(offsets)
                self._known = offsets
        verdicts = {name: self._verdict(name) for name in {queue.broker_name for queue in commits}}
        return CommitAnswer(
            stopped={q: reason for q in commits if (reason := verdicts[q.broker_name].get(q.topic)) is not None}
        )

    def _verdict(self, broker_name: str) -> Mapping[str, str]:
        """Return the topics that the group may no longer read, each with the reason, from the broker's last answer.

        The broker is queried at intervals. If the broker cannot be reached, its last answer stays valid. The consumer
        can continue without the broker, because this process stores the offsets.
        """
        now_s = time.monotonic()
        if now_s >= self._check_at_s.get(broker_name, 0.0):
            self._check_at_s[broker_name] = now_s + RESET_QUERY_INTERVAL_S
            try:
                self._verdicts[broker_name] = self._refusals(broker_name, BROADCAST_CHECK_TIMEOUT_S)
            except RaymqError as error:
                logger.info(
                    "cannot check at broker %s whether the group may read, retrying later: %s", broker_name, error
                )
                self._check_at_s[broker_name] = time.monotonic() + BROADCAST_CHECK_PAUSE_S
        return self._verdicts.get(broker_name, {})

    def _refusals(self, broker_name: str, timeout_s: float) -> dict[str, str]:
        """Return the topics that the group may not read in the mode BROADCASTING now, each with the reason.

        Makes one call for all topics, and one call per topic only if the broker rejects the first call.
        """
        if not self._refusal(broker_name, self._topics, timeout_s):
            return {}
        reasons = {topic: self._refusal(broker_name, [topic], timeout_s) for topic in self._topics}
        return {topic: reason for topic, reason in reasons.items() if reason}

    def _refusal(self, broker_name: str, topics: Sequence[str], timeout_s: float) -> str:
        """Return the broker's reason why the group may not read one of these topics; empty if the group may read all of
        them."""
        try:
            self._brokers.check_broadcast(broker_name, timeout_s, topics=topics)
        except NoPermissionError as error:
            return str(error)
        return ""
