"""Administration: exports topics, groups and offsets of a cluster as one document, and imports it into another cluster.

The document is JSON (Metadata.to_json), for people and for version control too:

    {"version": 1,
     "topics":  {"orders": {"queues": {"broker-a": 2, "broker-b": 2}, "perm": 6, "order_config": "",
                            "attributes": {"message.type": "FIFO"}}},
     "groups":  {"billing": {"consume_enable": true, …, "forbidden": ["bills"]}},
     "offsets": {"billing": {"orders": {"broker-a": {"0": 17, "1": 9}}}}}

The document contains no messages. So offsets are useful if the stores themselves are copied, or if a group must return
to earlier offsets. An import skips an offset that the queue does not hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Final, Literal

from raymq.client.admin.groups import GroupAdmin
from raymq.common.errors import GroupNotExistError, InvalidArgumentError, RaymqError, TopicNotExistError
from raymq.common.message import MessageQueue
from raymq.common.names import is_internal_topic, is_system_group
from raymq.common.protocol.attributes import CLEANUP_POLICY, QUEUE_TYPE, RESERVE_TIME, TopicAttributes
from raymq.common.protocol.bounds import bound_arguments
from raymq.common.protocol.group import GroupConfig
from raymq.common.protocol.route import (
    PERM_ALL,
    NewTopic,
    TopicConfig,
    format_order_config,
    parse_order_config,
    spread_queues,
)

METADATA_VERSION: Final = 1
METADATA_PARTS: Final = ("topics", "groups", "offsets")

Part = Literal["topics", "groups", "offsets"]
Kind = Literal["topic", "group", "offsets"]
Offsets = dict[str, dict[str, dict[str, dict[int, int]]]]
"""Committed offsets by group, topic, broker group and queue id."""


@dataclass(frozen=True, slots=True)
class TopicMetadata:
    """A topic in an exported document.

    `queues`: the number of queues in each broker group. `perm`: the permission (4 to read plus 2 to write).
    `order_config`: the queues of an order topic (as `Admin.set_order_config` takes them). `attributes`: RocketMQ's
    topic attributes.
    """

    queues: Mapping[str, int]
    perm: int = PERM_ALL
    order_config: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupMetadata:
    """A consumer group in an exported document: its configuration, and the topics that it may not read."""

    config: GroupConfig
    forbidden: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Metadata:
    """An exported document: topics and groups by name, and the offsets that the groups have committed in the
    topics."""

    topics: Mapping[str, TopicMetadata] = field(default_factory=dict)
    groups: Mapping[str, GroupMetadata] = field(default_factory=dict)
    offsets: Offsets = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the document as JSON, sorted by names. Two documents can then be compared line by line."""
        groups = {}
        for name, group in self.groups.items():
            groups[name] = {**asdict(group.config), "forbidden": list(group.forbidden)}
            del groups[name]["group"]
        topics = {name: asdict(topic) for name, topic in self.topics.items()}
        document = {"version": METADATA_VERSION, "topics": topics, "groups": groups, "offsets": self.offsets}
        return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Metadata:
        """Parse a document that `to_json` wrote. Raises InvalidArgumentError if a part cannot be read; the error names
        the part."""
        try:
            document = json.loads(text)
        except ValueError as error:
            raise InvalidArgumentError(f"the exported metadata is not JSON: {error}") from error
        if not isinstance(document, dict) or document.get("version") != METADATA_VERSION:
            raise InvalidArgumentError(
                'the file was not written by `raymq export`: such a file begins with {"version": '
                f"{METADATA_VERSION}, …}}"
            )
        unknown = sorted(document.keys() - {"version", *METADATA_PARTS})
        if unknown:
            raise InvalidArgumentError(f"a file of `raymq export` has {', '.join(METADATA_PARTS)}, not {unknown[0]!r}")
        topics = {name: _read_topic(name, entry) for name, entry in _table(document, "topics").items()}
        groups = {name: _read_group(name, entry) for name, entry in _table(document, "groups").items()}
        return cls(topics, groups, _read_offsets(_table(document, "offsets")))


@dataclass(frozen=True, slots=True)
class ImportStep:
    """One step of an import, or of its dry run. `kind` is "topic", "group" or "offsets".

    `action`: what was changed; "same" if nothing had to change. `failed`: True if the object was not imported; `action`
    has the reason.
    """

    kind: Kind
    name: str
    action: str
    failed: bool = False


class MetadataAdmin(GroupAdmin):
    """The administration calls that export the topics, groups and offsets of a cluster, and import them into another
    cluster."""

    def export_metadata(
        self,
        *,
        topics: str = "*",
        groups: str = "*",
        progress: Callable[[int], None] = lambda count: None,
    ) -> Metadata:
        """Export the topics and groups whose names match `topics` and `groups`, and the offsets of these groups in
        these topics.

        `topics` and `groups` are patterns that may have ``*`` and ``?``. Leaves out the server's own topics and groups,
        and retry and dead-letter topics. `progress` is called with 1 for each topic and group. A change during the call
        may be missing from the export. Every broker must run: raises ServiceNotAvailableError or RequestTimeoutError if
        a broker does not answer for 20 s.
        """
        brokers = self._broker_names()
        found: dict[str, TopicMetadata] = {}
        for topic in (name for name in self.list_topics() if fnmatchcase(name, topics)):
            try:
                found[topic] = self._topic_metadata(topic)
            except TopicNotExistError:
                continue  # skip the topic: it was deleted after its name was listed
            progress(1)
        known: dict[str, GroupMetadata] = {}
        offsets: Offsets = {}
        for group in (name for name in self.list_groups() if fnmatchcase(name, groups) and not is_system_group(name)):
            try:
                known[group] = GroupMetadata(self.group_config(group), tuple(self.forbidden_topics(group)))
            except GroupNotExistError:
                continue
            committed = self._offsets_of(group, found, brokers)
            if committed:
                offsets[group] = committed
            progress(1)
        return Metadata(found, known, offsets)

    def _topic_metadata(self, topic: str) -> TopicMetadata:
        route = self.topic_route(topic)
        config: TopicConfig = self._call_broker(min(route.brokers), "topic_config", topic)
        return TopicMetadata(route.queue_counts(), config.perm, config.order_config, dict(config.attributes))

    def _offsets_of(
        self, group: str, topics: Iterable[str], brokers: Sequence[str]
    ) -> dict[str, dict[str, dict[int, int]]]:
        found: dict[str, dict[str, dict[int, int]]] = {}
        for broker_name in brokers:
            try:
                consumed = self._call_broker(broker_name, "group_topics", group)
            except GroupNotExistError:
                continue  # skip a broker that does not have the consumer group
            for topic in sorted(set(consumed).intersection(topics)):
                committed = self._call_broker(broker_name, "committed_offsets", group, topic)
                found.setdefault(topic, {})[broker_name] = dict(sorted(committed.items()))
        return found

    def import_metadata(
        self,
        metadata: Metadata,
        *,
        parts: Sequence[Part] = METADATA_PARTS,
        dry_run: bool = False,
        progress: Callable[[int], None] = lambda count: None,
    ) -> list[ImportStep]:
        """Create and change the topics, groups and offsets that `metadata` names, and nothing else. Returns the steps,
        in order.

        A missing topic is created. If all of its broker groups exist in this cluster, each gets the same number of
        queues as in the document. Otherwise the topic's queues are spread over the existing broker groups. An existing
        topic gets the document's permission, message type and times. It may get more queues, but never fewer. Groups
        get the document's configuration and forbidden topics. An offset is set if the queue holds it, even if the
        group's offset moves backwards, and while consumers run.

        With `dry_run` nothing changes. `progress` is called with 1 for each step. An impossible change is a failed
        step, and the other steps continue. Raises ServiceNotAvailableError or RequestTimeoutError after 20 s while a
        broker is unreachable. Raises InvalidArgumentError if `parts` has an unknown part. Repeating the call is safe.
        """
        if wrong := [part for part in parts if part not in METADATA_PARTS]:
            raise InvalidArgumentError(f"metadata has no part {wrong[0]!r}; the parts are {', '.join(METADATA_PARTS)}")
        work: list[tuple[Kind, str, Callable[[], str]]] = []
        if "topics" in parts:
            for name, topic in sorted(metadata.topics.items()):
                work.append(("topic", name, partial(self._import_topic, name, topic, dry_run)))
        if "groups" in parts:
            for name, group in sorted(metadata.groups.items()):
                work.append(("group", name, partial(self._import_group, group, dry_run)))
        if "offsets" in parts:
            created = metadata.topics.keys() if dry_run and "topics" in parts else set()
            for group_name, by_topic in sorted(metadata.offsets.items()):
                for name, table in sorted(by_topic.items()):
                    step = partial(self._import_offsets, group_name, name, table, name in created, dry_run)
                    work.append(("offsets", f"{group_name} in {name}", step))
        done = []
        for kind, name, do in work:
            try:
                done.append(ImportStep(kind, name, do()))
            except RaymqError as error:
                if error.retryable:
                    raise
                done.append(ImportStep(kind, name, str(error), failed=True))
            progress(1)
        return done

    def _import_topic(self, name: str, topic: TopicMetadata, dry_run: bool) -> str:
        here = self._broker_names()
        same_brokers = set(topic.queues) <= set(here)
        counts = dict(topic.queues) if same_brokers else spread_queues(sum(topic.queues.values()), here)
        order_config = topic.order_config if same_brokers else ""
        attributes = TopicAttributes.parse(topic.attributes)
        try:
            known = self._topic_metadata(name)
        except TopicNotExistError:
            if not dry_run:
                self._create_with(name, counts, topic)
                if topic.perm != PERM_ALL:
                    self.update_topic(name, perm=topic.perm)
                if order_config:
                    self.set_order_config(name, order_config)
            return f"created with {sum(counts.values())} queues"
        for fixed in (CLEANUP_POLICY, QUEUE_TYPE):
            if known.attributes.get(fixed, "") != topic.attributes.get(fixed, ""):
                raise InvalidArgumentError(
                    f"the topic exists with another {fixed}, which cannot change: delete the topic first, or "
                    f"leave {fixed} unchanged"
                )
        changes: dict[str, Any] = {}
        if sum(topic.queues.values()) > sum(known.queues.values()):
            changes["queues"] = sum(topic.queues.values())
        if known.perm != topic.perm:
            changes["perm"] = topic.perm
        if TopicAttributes.parse(known.attributes).message_type is not attributes.message_type:
            changes["message_type"] = attributes.message_type
        if known.attributes.get(RESERVE_TIME, "") != topic.attributes.get(RESERVE_TIME, ""):
            changes["reserve_time_s"] = (attributes.reserve_time_ms or 0) / 1000
        if TopicAttributes.parse(known.attributes).bound != attributes.bound:
            changes |= bound_arguments(attributes.bound)
        ordered = order_config != known.order_config and same_brokers
        if not dry_run:
            if changes:
                self.update_topic(name, **changes)
            if ordered:
                self.set_order_config(name, order_config or None)
        changed = [*changes, *(["order_config"] if ordered else [])]
        return f"changed: {', '.join(changed)}" if changed else "same"

    def _create_with(self, name: str, counts: Mapping[str, int], topic: TopicMetadata) -> None:
        """Create a topic with the number of queues that `counts` gives for each broker group. On return every client
        can use it."""
        layout = format_order_config(counts)
        for broker_name, count in sorted(counts.items()):
            self._call_broker(broker_name, "create_topics", [NewTopic(name, count, layout, dict(topic.attributes))])
        self._routes.invalidate(name)
        self._wait_for_routes({name: sum(counts.values())})

    def _import_group(self, group: GroupMetadata, dry_run: bool) -> str:
        name = group.config.group
        try:
            known = GroupMetadata(self.group_config(name), tuple(self.forbidden_topics(name)))
        except GroupNotExistError:
            known = None
        if known == group:
            return "same"
        if not dry_run:
            self.create_group(group.config)
            before = set() if known is None else set(known.forbidden)
            for topic in sorted(before ^ set(group.forbidden)):
                # Every broker must store whether the group may read the topic, because any broker may get queues of the
                # topic later.
                for broker_name in self._broker_names():
                    self._call_broker(broker_name, "forbid_topic", name, topic, topic in group.forbidden)
        return "created" if known is None else "changed"

    def _import_offsets(
        self, group: str, topic: str, table: Mapping[str, Mapping[int, int]], is_new: bool, dry_run: bool
    ) -> str:
        wanted = {MessageQueue(topic, name, q): at for name, by_queue in table.items() for q, at in by_queue.items()}
        try:
            held = {one.queue: one for one in self.describe_topic(topic)}
        except TopicNotExistError:
            if is_new:
                return f"0 of {len(wanted)} set: the topic does not exist yet"
            raise
        usable = {
            queue: at
            for queue, at in wanted.items()
            if queue in held and held[queue].min_offset <= at <= held[queue].max_offset
        }
        known: dict[MessageQueue, int | None] = {}
        for broker_name in sorted({queue.broker_name for queue in usable}):
            committed = self._call_broker(broker_name, "committed_offsets", group, topic)
            known |= {one: committed.get(one.queue_id) for one in usable if one.broker_name == broker_name}
        new = {queue: at for queue, at in usable.items() if known[queue] != at}
        if new and not dry_run:
            self._set_offsets(group, new)
        left_out = len(wanted) - len(usable)
        if not new and not left_out:
            return "same"
        return f"{len(new)} of {len(wanted)} set" + (
            f"; {left_out} left out, because the queues here do not contain these offsets" if left_out else ""
        )


def _table(document: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    table = document.get(part, {})
    if not isinstance(table, dict):
        raise InvalidArgumentError(f"{part} must be a table of names, not {table!r:.80}")
    return table


def _fields(where: str, entry: object, kind: type, also: Iterable[str] = ()) -> dict[str, Any]:
    """Return the fields of one entry of an exported document. Raises InvalidArgumentError if the entry has a field that
    the class `kind` does not have."""
    known = {one.name for one in fields(kind)} | set(also)
    if not isinstance(entry, dict) or not entry.keys() <= known:
        raise InvalidArgumentError(f"{where} must have the fields {', '.join(sorted(known))}, but is {entry!r:.120}")
    return entry


def _read_topic(name: str, entry: object) -> TopicMetadata:
    if is_internal_topic(name):
        raise InvalidArgumentError(f"topic {name!r} is a system topic and cannot be imported")
    values = _fields(f"topic {name!r}", entry, TopicMetadata)
    queues, attributes = values.get("queues"), values.get("attributes", {})
    if not isinstance(queues, dict) or not queues or not all(_is_count(count) for count in queues.values()):
        raise InvalidArgumentError(f"the queues of topic {name!r} must be numbers by broker group, not {queues!r:.80}")
    if not isinstance(attributes, dict):
        raise InvalidArgumentError(f"the attributes of topic {name!r} must be a table, not {attributes!r:.80}")
    TopicAttributes.parse(attributes)
    if values.get("order_config"):
        parse_order_config(values["order_config"])
    return TopicMetadata(**values)


def _read_group(name: str, entry: object) -> GroupMetadata:
    values = dict(_fields(f"group {name!r}", entry, GroupConfig, ["forbidden"]))
    forbidden = values.pop("forbidden", [])
    if not isinstance(forbidden, list) or not all(isinstance(topic, str) for topic in forbidden):
        raise InvalidArgumentError(
            f"the forbidden topics of group {name!r} must be a list of names, not {forbidden!r:.80}"
        )
    return GroupMetadata(GroupConfig(**{**values, "group": name}), tuple(sorted(forbidden)))


def _read_offsets(table: Mapping[str, Any]) -> Offsets:
    try:
        found = {
            group: {
                topic: {broker: {int(q): at for q, at in queues.items()} for broker, queues in by_broker.items()}
                for topic, by_broker in by_topic.items()
            }
            for group, by_topic in table.items()
        }
    except (AttributeError, ValueError) as error:
        raise InvalidArgumentError(
            f"offsets must be numbers by group, topic, broker group and queue id: {error}"
        ) from error
    for group, by_topic in found.items():
        for topic, by_broker in by_topic.items():
            for queues in by_broker.values():
                if not all(_is_offset(at) for at in queues.values()):
                    raise InvalidArgumentError(
                        f"the offsets of group {group!r} in topic {topic!r} must be numbers from 0, not {queues}"
                    )
    return found


def _is_offset(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_count(value: object) -> bool:
    return _is_offset(value) and value != 0
