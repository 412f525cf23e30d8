"""The rules for names of topics and groups, and the names of actors.

Rules for topics and groups are RocketMQ's (spec/messaging.md §2.5). An actor's name is a value that formats and parses
itself, so no module spells a name by hand: `storage-broker-a-0` is `StorageName("broker-a", 0)`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from raymq.common.errors import IllegalNameError, InvalidArgumentError

NAMESPACE: Final = "raymq"
"""The Ray namespace of every raymq actor."""

INSTANCES: Final = "raymq-instances"
"""The Ray namespace of actors that run users' functions: push consumers' Listeners, and PredicateRunners."""

CONTROLLER: Final = "controller"
"""The actor that elects the master of each broker group of several replicas."""

BROKER_GROUPS_MAX: Final = 26
"""The most broker groups: a letter names each, from broker-a to broker-z."""
USERS_BROKER: Final = "broker-a"
"""The first broker group, which stores the changes of users and policies."""

CONSOLE: Final = "console"
"""The actor that serves the web console, if the cluster has one."""

TOPIC_NAME_MAX: Final = 127
INTERNAL_TOPIC_NAME_MAX: Final = 255
GROUP_NAME_MAX: Final = 120
RETRY_PREFIX: Final = "%RETRY%"
DLQ_PREFIX: Final = "%DLQ%"
LMQ_PREFIX: Final = "%LMQ%"
"""The prefix of light queues. A message is put into its light queues besides its own queue
(storage/dispatch/multi_dispatch.py)."""
SYSTEM_PREFIX: Final = "rmq_sys_"
STATE_TOPIC: Final = SYSTEM_PREFIX + "broker_state"
"""The topic with the records of a broker's state, in the broker's own store (actors.broker.state_log)."""
REPLY_SUFFIX: Final = "_REPLY_TOPIC"
"""The suffix of the topic with a cluster's replies to requests. The prefix is the cluster's name."""
SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
"""The topic with the messages of open transactions. It has one queue, 0."""
OP_HALF_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
"""The topic with records that name finished half messages."""
CHECK_MAX_TIME_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
"""The topic with half messages whose outcome no check could find out."""
TRACE_TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"
"""The topic with trace records (raymq.telemetry.trace), unless a client names another topic."""
AUTO_CREATE_TOPIC: Final = "TBW102"
"""A topic of brokers that create a topic at the first send. New topics get the permission of this topic."""

TRANSACTION_TOPICS: Final = frozenset((HALF_TOPIC, OP_HALF_TOPIC, CHECK_MAX_TIME_TOPIC))
"""The topics to which only transactions write."""

SYSTEM_TOPICS: Final = frozenset(
    """TBW102 SCHEDULE_TOPIC_XXXX BenchmarkTest RMQ_SYS_TRANS_HALF_TOPIC RMQ_SYS_TRACE_TOPIC
    RMQ_SYS_TRANS_OP_HALF_TOPIC TRANS_CHECK_MAX_TIME_TOPIC SELF_TEST_TOPIC OFFSET_MOVED_EVENT
    CHECKPOINT_TOPIC""".split()
)

SYSTEM_GROUP_PREFIX: Final = "CID_RMQ_SYS_"
SYSTEM_GROUPS: Final = frozenset(
    """TOOLS_CONSUMER FILTERSRV_CONSUMER SELF_TEST_C_GROUP CID_ONS-HTTP-PROXY CID_ONSAPI_PULL CID_ONSAPI_PERMISSION
    CID_ONSAPI_OWNER CID_RMQ_SYS_TRANS""".split()
)
"""RocketMQ's predefined groups (spec/messaging.md §2.7)."""

REBALANCE_SLOTS: Final = 4
"""The number of slots into which consumer groups are divided by name; also the most Rebalance actors of a cluster."""

NODE_ID_SHOWN: Final = 16
"""Hexadecimal digits of a Ray node's id that are shown; the whole id has 56."""

_LEGAL: Final = re.compile(r"[%|a-zA-Z0-9_-]+")
_RULE: Final = "use letters, digits and the characters % | - _"


def is_system_topic(topic: str) -> bool:
    """True if `topic` belongs to the server: users may not create it, delete it or send to it."""
    return topic in SYSTEM_TOPICS or topic.startswith(SYSTEM_PREFIX) or topic.endswith(REPLY_SUFFIX)


def is_internal_topic(topic: str) -> bool:
    """True if the server created `topic` for itself or for a group, or if `topic` is a light queue. No user created it
    by name."""
    return is_system_topic(topic) or topic.startswith((RETRY_PREFIX, DLQ_PREFIX, LMQ_PREFIX))


def is_light_queue(topic: str) -> bool:
    """True if `topic` is the topic of a light queue (`light_queue`)."""
    return topic.startswith(LMQ_PREFIX)


def light_queue(name: str) -> str:
    """Return the topic under which the light queue `name` is consumed:
    ``consumer.subscribe(raymq.light_queue("alice"))``.

    The topic has one queue, 0, in each broker group, with the messages whose `Message.light_queues` contain `name`.
    Raises IllegalNameError.

    >>> light_queue("alice")
    '%LMQ%alice'
    """
    if not isinstance(name, str) or not name.strip():
        raise IllegalNameError("light queue", str(name), "it is blank")
    if name.startswith(LMQ_PREFIX):
        raise IllegalNameError("light queue", name, f"{LMQ_PREFIX} is put before it")
    return _check("light queue", LMQ_PREFIX + name, INTERNAL_TOPIC_NAME_MAX)


def is_system_group(group: str) -> bool:
    """True if `group` belongs to the server or its tools. Such a group need not be created."""
    return group in SYSTEM_GROUPS or group.startswith(SYSTEM_GROUP_PREFIX)


def retry_topic(group: str) -> str:
    """Return the retry topic of a group: it delivers failed messages again."""
    return RETRY_PREFIX + group


def dlq_topic(group: str) -> str:
    """Return the dead-letter topic of a group: messages that the group could not consume in all its attempts."""
    return DLQ_PREFIX + group


def reply_topic(cluster: str) -> str:
    """Return the topic of the replies to a cluster's requests.

    >>> reply_topic("raymq")
    'raymq_REPLY_TOPIC'
    """
    return cluster + REPLY_SUFFIX


def check_topic(topic: str) -> str:
    """Return `topic` if it is a legal name, else raise IllegalNameError (spec/messaging.md §2.5)."""
    internal = isinstance(topic, str) and topic.startswith((RETRY_PREFIX, DLQ_PREFIX, LMQ_PREFIX))
    return _check("topic", topic, INTERNAL_TOPIC_NAME_MAX if internal else TOPIC_NAME_MAX)


def check_user_topic(topic: str) -> str:
    """Return `topic` if it is a legal name and not a topic of the server, else raise IllegalNameError."""
    check_topic(topic)
    if is_system_topic(topic):
        raise IllegalNameError("topic", topic, "it is a system topic")
    if is_light_queue(topic):
        raise IllegalNameError(
            "topic", topic, "it is a light queue: name it in the light_queues of messages to other topics"
        )
    return topic


def check_group(group: str) -> str:
    """Return `group` if it is a legal producer or consumer group name, else raise IllegalNameError."""
    return _check("group", group, GROUP_NAME_MAX)


def _check(kind: str, name: str, longest: int) -> str:
    if not isinstance(name, str) or not name.strip():
        raise IllegalNameError(kind, str(name), "it is blank")
    if not _LEGAL.fullmatch(name):
        raise IllegalNameError(kind, name, _RULE)
    if len(name) > longest:
        raise IllegalNameError(kind, name, f"it has {len(name)} characters, at most {longest} are allowed")
    return name


@dataclass(frozen=True, slots=True, order=True)
class NameServerName:
    """`nameserver-0`"""

    index: int

    def __str__(self) -> str:
        return f"nameserver-{self.index}"


@dataclass(frozen=True, slots=True, order=True)
class StorageName:
    """`storage-broker-a-0`: replica 0 of broker group `broker-a`."""

    broker_name: str
    replica: int

    def __str__(self) -> str:
        return f"storage-{self.broker_name}-{self.replica}"

    @classmethod
    def parse(cls, text: str) -> StorageName:
        match = re.fullmatch(r"storage-(.+)-(\d+)", text)
        if match is None:
            raise IllegalNameError("storage actor", text, "expected storage-BROKER-REPLICA")
        return cls(match[1], int(match[2]))


@dataclass(frozen=True, slots=True, order=True)
class ReplicatorName:
    """`replicator-broker-a-1`: the actor that copies the log to replica 1 of broker group `broker-a`."""

    broker_name: str
    replica: int

    def __str__(self) -> str:
        return f"replicator-{self.broker_name}-{self.replica}"


@dataclass(frozen=True, slots=True, order=True)
class RebalanceName:
    """`rebalance-0`: one of the actors that assign the queues of consumer groups."""

    index: int

    def __str__(self) -> str:
        return f"rebalance-{self.index}"


@dataclass(frozen=True, slots=True, order=True)
class PullName:
    """`pull-3f9a2c…`: the actor that serves all push-consumer instances of a Ray node. The name has the prefix of the
    node's id."""

    node_id: str

    def __str__(self) -> str:
        return f"pull-{self.node_id[:NODE_ID_SHOWN]}"


@dataclass(frozen=True, slots=True, order=True)
class PredicateName:
    """`predicate-STORAGE-3f9a2c…-GROUP-0a1b…`: runs one predicate of a group on the node of a storage actor.

    `user`: the user as whom the predicate's actor reads, at the end of the name; empty without access control.
    """

    storage: str
    node_id: str
    group: str
    key: str
    user: str = ""

    def __str__(self) -> str:
        name = f"predicate-{self.storage}-{self.node_id[:NODE_ID_SHOWN]}-{self.group}-{self.key}"
        return f"{name}-{self.user}" if self.user else name


@dataclass(frozen=True, slots=True, order=True)
class InstanceName:
    """`pull-GROUP-0`: instance 0 of a push consumer, a member of its group under this name."""

    group: str
    instance: int

    def __str__(self) -> str:
        return f"pull-{self.group}-{self.instance}"

    @classmethod
    def parse(cls, text: str) -> InstanceName:
        """Parse the text of a name; the group's name may contain hyphens. Raises InvalidArgumentError."""
        kind, _, rest = text.partition("-")
        group, _, instance = rest.rpartition("-")
        if kind != "pull" or not group or not instance.isdecimal():
            raise InvalidArgumentError(f"{text!r} names no instance of a push consumer (pull-GROUP-0)")
        return cls(group, int(instance))
