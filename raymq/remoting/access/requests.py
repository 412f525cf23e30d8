"""The table of requests: which actions on which resources each server method needs (spec/features.md §8).

`RULES` has methods as ``Broker.send``. The same rule applies to the frames of a lane (direct socket connection):
``Storage.append`` to an APPEND, ``Storage.fetch`` to a FETCH, ``Storage.bounds_of_queues`` to a WAIT. A method with the
rule `FOR_ANYBODY` needs a user but no permission: the answer concerns no topic or group, or contains only the names
that the user may see (actors.core.access.shown). Only raymq's own actors and super users may call the methods in
`FOR_SERVERS`, and methods without a rule. A call about several topics or groups needs the permission for each.

Differences from RocketMQ's table: a transaction producer needs Pub on its group, because the request that ends a
transaction names no topic. Calls about the whole cluster are for super users.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from raymq.common.delay import names_real_topic
from raymq.common.message import PROPERTY_REAL_TOPIC
from raymq.common.names import REPLY_SUFFIX, SYSTEM_PREFIX, TRACE_TOPIC, InstanceName
from raymq.records.format.dispatch import dispatch_view
from raymq.remoting.access.policies import Action, Need, Resource, ResourceType, group_resource, topic_resource

_Find = Callable[[Sequence[Any]], Iterable[Need]]  # Any: each method has its own argument types


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule of one server method: computes the permissions that a call needs from the call's arguments."""

    find: _Find

    def needed(self, arguments: Sequence[Any]) -> list[Need]:
        """Return the distinct permissions that a call with these arguments needs, in the order of the method's
        parameters."""
        return list(dict.fromkeys(self.find(arguments)))


_PUB, _SUB, _GET = Action.PUB, Action.SUB, Action.GET
_SEE: Final = (_PUB, _SUB, _GET, Action.LIST)
_READ: Final = (_SUB, _GET)
_LOOK: Final = (_PUB, _SUB, _GET)
_TRACE_PREFIX: Final = "rmq_sys_TRACE_DATA_"


def _on_topic(topic: str, *actions: Action) -> Need:
    return Need(actions, topic_resource(topic))


def _on_group(group: str, *actions: Action) -> Need:
    return Need(actions, group_resource(group))


def _sending(topic: str) -> Need:
    """Return the permission that sending to a topic needs. A consumer sends to a retry topic to return a message. So
    sending to a retry topic needs the rights of a consumer of the group."""
    resource = topic_resource(topic)
    return Need((_SUB if resource.type is ResourceType.GROUP else _PUB,), resource)


def _servers_only(topic: str) -> bool:
    """True for raymq's own topics, which hold the messages of all topics or the state of brokers.

    No resource pattern, such as ``Topic:*``, grants access to these topics.
    """
    return names_real_topic(topic) or (topic.startswith(SYSTEM_PREFIX) and not topic.startswith(_TRACE_PREFIX))


def _server(topic: str) -> Need:
    return Need((Action.ALL,), Resource(ResourceType.SERVER, topic))


def _append(given: Sequence[Any]) -> Iterable[Need]:
    """Return the permissions that an append to a store needs.

    A delayed message, or a message of a transaction, is stored in an internal topic of raymq, but needs the permission
    for its real topic.
    """
    for batch in given[0]:
        if names_real_topic(batch.topic):
            position = 0
            for size in batch.sizes.tolist():
                topic = dispatch_view(batch.records, position).properties.get(PROPERTY_REAL_TOPIC)
                yield _server(batch.topic) if topic is None or _servers_only(topic) else _sending(topic)
                position += size
        elif not _takes_from_all(batch.topic):
            yield _server(batch.topic) if _servers_only(batch.topic) else _sending(batch.topic)


def _takes_from_all(topic: str) -> bool:
    """True for topics to which every user may send: the trace topic (spec/features.md §7.3, 6) and reply topics.

    Reply topics are open to every user, because every consumer of a request may reply to it, and any user may be the
    requester.
    """
    return topic == TRACE_TOPIC or topic.endswith(REPLY_SUFFIX)


def _seeing(topics: Iterable[str], *actions: Action) -> Iterable[Need]:
    """Return the permissions that reading about `topics` needs: one of `actions` on each topic. Topics to which every
    user may send need no permission."""
    return [_on_topic(topic, *actions) for topic in topics if not _takes_from_all(topic)]


def _looking(given: Sequence[Any]) -> Iterable[Need]:
    return _seeing((queue[0] for queue in given[0]), *_LOOK)


def _sequences(given: Sequence[Any]) -> Iterable[Need]:
    """Return the permissions that a caller needs to read a producer's sequence numbers. Internal queues, in which
    messages wait for their delivery, need no permission, because they reveal no topic."""
    return [_on_topic(queue[0], _PUB) for queue in given[2] if not names_real_topic(queue[0])]


def _fetch(given: Sequence[Any]) -> Iterable[Need]:
    for one in given[0]:
        if one.topic.endswith(REPLY_SUFFIX):
            # A client's replies are selected by a tag code derived from the client's id. Only that client has the id,
            # so a fetch with exactly one tag code needs no permission.
            if one.tag_codes is None or len(one.tag_codes) != 1:
                yield _server(one.topic)
        else:
            yield _server(one.topic) if _servers_only(one.topic) else _on_topic(one.topic, _SUB)


def _topic(*actions: Action) -> Rule:
    """Return the access rule of a method whose first argument is a topic: the user needs `actions` on this
    topic."""
    return Rule(lambda given: [_on_topic(given[0], *actions)])


def _group(*actions: Action) -> Rule:
    """Return the rule of a method whose first argument is a group or None. None means all groups; the method's answer
    contains only the groups that the user may see."""
    return Rule(lambda given: [] if not given or given[0] is None else [_on_group(given[0], *actions)])


def _group_and_topic(*actions: Action) -> Rule:
    """Return the access rule of methods whose first two arguments are a group and a topic. The caller needs `actions`
    on both."""
    return Rule(lambda given: [_on_group(given[0], *actions), _on_topic(given[1], *actions)])


def _group_and_topics(*actions: Action) -> Rule:
    """Return the rule of a method whose first arguments are a group and a list of topics, or a mapping by
    topic."""

    def find(given: Sequence[Any]) -> Iterable[Need]:
        topics = given[1] if len(given) > 1 else ()
        return [_on_group(given[0], *actions), *(_on_topic(topic, *actions) for topic in topics)]

    return Rule(find)


def _queues(*actions: Action) -> Rule:
    """Return the access rule of a method whose first argument is a list of queues: the user needs `actions` on the
    topic of every queue. Each queue is a tuple that begins with its topic."""
    return Rule(lambda given: [_on_topic(queue[0], *actions) for queue in given[0]])


def _leases(given: Sequence[Any]) -> Iterable[Need]:
    return [_on_group(given[0], _SUB), *(_on_topic(part.topic, _SUB) for part in given[1])]


def _receive(given: Sequence[Any]) -> Iterable[Need]:
    return [_on_group(given[0].group, _SUB), *(_on_topic(topic, _SUB) for topic in given[0].topics)]


def _host(given: Sequence[Any]) -> Iterable[Need]:
    settings, name = given[0].settings, given[0].instance.name
    # The caller needs the permission for two groups: the group that its settings name, and the group in the consumer
    # instance's name. Otherwise a caller could host an instance of its own group under the name of another group's
    # instance. That would end the other group's instance.
    groups = (settings.group, InstanceName.parse(name).group)
    topics = (one.topic for one in settings.subscriptions)
    return [*(_on_group(group, _SUB) for group in groups), *(_on_topic(topic, _SUB) for topic in topics)]


def _instance(given: Sequence[Any]) -> Iterable[Need]:
    return [_on_group(InstanceName.parse(given[0]).group, _SUB)]


def _direct_turn(given: Sequence[Any]) -> Iterable[Need]:
    return [_on_group(given[0].group, _SUB), *(_on_topic(topic, _SUB) for topic in given[0].topics)]


def _members(given: Sequence[Any]) -> Iterable[Need]:
    for group, heartbeat in given[0]:
        yield _on_group(group, _SUB)
        for topic in getattr(heartbeat, "topics", ()):
            yield _on_topic(topic, _SUB)


def _consumers(given: Sequence[Any]) -> Iterable[Need]:
    for one in given[0].consumers:
        yield _on_group(one.group, _SUB)


def _question(given: Sequence[Any]) -> Iterable[Need]:
    question = given[1]
    return [_on_group(question.group, *((_GET,) if question.kind == "running" else (Action.UPDATE,)))]


def _each_group(given: Sequence[Any]) -> Iterable[Need]:
    return [_on_group(config.group, Action.CREATE, Action.UPDATE) for config in given[0]]


FOR_ANYBODY: Final = Rule(lambda given: [])

RULES: Final[Mapping[str, Rule]] = {
    # Methods of storage actors that read and write messages
    "Storage.append": Rule(_append),
    "Storage.fetch": Rule(_fetch),
    "Storage.bounds_of_queues": Rule(_looking),
    "Storage.queue_bounds": Rule(lambda given: _seeing(given[:1], *_LOOK)),
    "Storage.queue_bounds_many": Rule(_looking),
    "Storage.bytes_of_spans": _queues(*_LOOK),
    "Storage.stored_times": _queues(*_LOOK),
    "Storage.offset_by_time": _topic(*_LOOK),
    "Storage.next_sequences": Rule(_sequences),
    "Storage.report_damage": _queues(*_READ),
    "Storage.end_transaction": Rule(lambda given: [_on_group(given[0].producer_group, _PUB)]),
    "Storage.query_by_key": _topic(*_READ),
    "Storage.query_by_unique_id": _topic(*_READ),
    "Storage.query_by_unique_ids": _topic(*_READ),
    "Storage.describe": FOR_ANYBODY,
    # Methods of brokers that send and deliver messages
    "Broker.send": Rule(lambda given: [_sending(given[0])]),
    "Broker.pull": _group_and_topic(_SUB),
    "Broker.send_back": _group(_SUB),
    "Broker.replay": _group(Action.UPDATE),
    "Broker.ask_listener": Rule(lambda given: [_sending(given[0].topic)]),
    "Broker.take_requests": Rule(_direct_turn),
    "Broker.start_receiving": _group_and_topics(_SUB),
    "Broker.receive_messages": Rule(_receive),
    "Broker.ack_messages": Rule(_leases),
    "Broker.change_invisible": Rule(_leases),
    "Broker.extend_invisible": Rule(_leases),
    "Broker.take_transaction_checks": _group(_PUB),
    "Broker.take_group_checks": Rule(lambda given: [_on_group(group, _PUB) for group in given[0]]),
    "Broker.leave_transaction_checks": _group(_PUB),
    # Methods that read or change topics
    "Broker.auto_create_topic": _topic(_PUB, Action.CREATE),
    "Broker.create_topic": _topic(Action.CREATE),
    "Broker.create_topics": Rule(lambda given: [_on_topic(one.topic, Action.CREATE) for one in given[0]]),
    "Broker.update_topic": _topic(Action.UPDATE),
    "Broker.delete_topic": _topic(Action.DELETE),
    "Broker.topic_config": _topic(*_SEE),
    "Broker.topic_stats": _topic(*_LOOK),
    "Broker.topic_offsets": _topic(*_READ),
    # Methods that read or change consumer groups
    "Broker.ensure_group": _group(_SUB, Action.CREATE),
    "Broker.update_group": Rule(lambda given: [_on_group(given[0].group, Action.CREATE, Action.UPDATE)]),
    "Broker.update_groups": Rule(_each_group),
    "Broker.delete_group": _group(Action.DELETE),
    "Broker.group_config": _group(*_SEE),
    "Broker.group_stats": _group(*_READ),
    "Broker.group_topics": _group(*_READ),
    "Broker.group_progress": _group_and_topic(*_READ),
    "Broker.groups": FOR_ANYBODY,
    "Broker.check_broadcast": _group_and_topics(_SUB),
    "Broker.forbid_topic": _group(Action.UPDATE),
    "Broker.forbidden_topics": _group(*_READ),
    # Methods that read or change consumer offsets
    "Broker.start_offset": Rule(lambda given: [_on_group(given[0], _SUB), _on_topic(given[1].topic, _SUB)]),
    "Broker.start_offsets": _group_and_topics(_SUB),
    "Broker.committed_offsets": _group_and_topic(*_READ),
    "Broker.commit_offsets": _group_and_topics(_SUB, Action.UPDATE),
    "Broker.reset_offsets": _group_and_topic(_SUB, Action.UPDATE),
    "Broker.delete_offsets": _group_and_topics(_SUB, Action.UPDATE),
    # Methods for connected clients
    "Broker.heartbeat": Rule(_consumers),
    "Broker.unregister_client": FOR_ANYBODY,
    "Broker.knows_client": FOR_ANYBODY,
    "Broker.consumer_connections": _group(*_READ),
    "Broker.producer_connections": _group(*_LOOK),
    "Broker.ask_client": Rule(_question),
    "Broker.take_questions": FOR_ANYBODY,
    "Broker.answer_question": FOR_ANYBODY,
    "Broker.start_pull": FOR_ANYBODY,
    "Broker.start_rebalance": FOR_ANYBODY,
    "Broker.describe": FOR_ANYBODY,
    "Broker.status": FOR_ANYBODY,
    "Broker.config": FOR_ANYBODY,
    # Methods for the members of consumer groups
    "Rebalance.heartbeats": Rule(_members),
    "Rebalance.conflict": Rule(
        lambda given: [_on_group(given[0], _SUB), *(_on_topic(topic, _SUB) for topic in given[2])]
    ),
    "Rebalance.describe_group": _group(*_READ),
    "Rebalance.offsets_reset": _group(_SUB, Action.UPDATE),
    # Methods of the actors that host push consumers
    "Pull.host": Rule(_host),
    "Pull.next_tasks": Rule(_instance),
    "Pull.report": Rule(_instance),
    "Pull.instance_status": Rule(_instance),
    "Pull.suspend": Rule(_instance),
    "Pull.resume": Rule(_instance),
    "Pull.pause_queues": Rule(_instance),
    "Pull.resume_queues": Rule(_instance),
    "Pull.stop": Rule(_instance),
    "Pull.describe": FOR_ANYBODY,
    "Pull.status": FOR_ANYBODY,
    # Methods that read topic routes
    "NameServer.topic_route": Rule(lambda given: _seeing(given[:1], *_SEE)),
    "NameServer.topic_routes": Rule(lambda given: _seeing(given[0], *_SEE)),
    "NameServer.topics": FOR_ANYBODY,
    "NameServer.brokers": FOR_ANYBODY,
    "NameServer.all_brokers": FOR_ANYBODY,
    "NameServer.clusters": FOR_ANYBODY,
    # Methods of the Controller that replicas call
    "Controller.leader": FOR_ANYBODY,
    "Controller.status": FOR_ANYBODY,
    "ConsoleService.describe": FOR_ANYBODY,
    "ConsoleService.status": FOR_ANYBODY,
    "Gateway.status": FOR_ANYBODY,
}
"""The rule of each server method, by server class and method, such as ``Broker.send``."""

_SERVERS: Final[Mapping[str, str]] = {
    "Broker": "auth_state change_access close look_for_master readings set_config unset_config users",
    "Storage": "damage damaged_bytes report_log"
    " agree_on_topics align append_log change_settings check_transactions clean close delayed delete_topic"
    " deleted_young following history light_queues limit_topics log_holes log_part mend_log note_lacking obey"
    " open_topics read_config read_log record_at statistics status transactions verification verify write_config",
    "NameServer": "add_write_perm broker_heartbeat change_topics get_kv list_kv put_kv register_broker"
    " unregister_broker wipe_write_perm",
    "Rebalance": "close status",
    "Pull": "close",
    "Controller": "balance cancel_change change_min_in_sync change_replicas close designate drain draining homes"
    " settings",
    "Replicator": "close status",
    "ConsoleService": "check close settings",
    "Gateway": "check close describe settings",
}

FOR_SERVERS: Final = frozenset(f"{server}.{name}" for server, names in _SERVERS.items() for name in names.split())
"""The methods that only raymq's own actors and super users may call."""

OVER_LANES_ONLY: Final = frozenset(
    {
        *("Storage.end_transaction", "Storage.read_log", "Storage.append_log", "Pull.next_tasks", "Pull.report"),
        *("Storage.queue_bounds_many", "Storage.stored_times", "Storage.bytes_of_spans", "Storage.offset_by_time"),
        *("Storage.next_sequences", "Storage.report_damage", "Storage.query_by_unique_ids"),
        *("Broker.commit_offsets", "Broker.receive_messages", "Broker.ack_messages", "Broker.change_invisible"),
        "Broker.extend_invisible",
        *("Broker.take_questions", "Broker.ask_listener", "Broker.take_requests"),
    }
)
"""The requests that have a rule but no actor method, because clients send them only over lanes (direct socket
connections)."""


def rules_of(server_class: str) -> dict[str, Rule]:
    """Return the access rules of the methods of one server class, by method name."""
    prefix = f"{server_class}."
    return {name.removeprefix(prefix): rule for name, rule in RULES.items() if name.startswith(prefix)}
