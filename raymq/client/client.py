"""A program's connection to raymq: `connect`, and the Client that makes producers, consumers and the admin
object."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, TypeVar, Unpack, cast

import ray

from raymq.client.cluster.attach import attach_ray, connected_by_raymq
from raymq.client.cluster.embedded import EmbeddedCluster
from raymq.client.cluster.launcher import ProgressCallback
from raymq.client.consumer.assignment.offset_committer import CommitThreads
from raymq.client.consumer.rebalance_client import RebalanceClient
from raymq.client.producer.observers import SendSpans, SendTrace
from raymq.client.producer.producer import Producer
from raymq.client.producer.senders.sender_context import in_sender
from raymq.client.producer.settings import ProducerOptions, ProducerSettings, check_repeatable
from raymq.common import identity
from raymq.common.closing import Closing, closed_on_error, direct, in_forked_child
from raymq.common.errors import (
    AuthenticationError,
    ClientStateError,
    ClusterNotFoundError,
    RaymqError,
    check_option_names,
)
from raymq.common.identity import Identity
from raymq.common.message import ConsumeFromWhere, MessageQueue
from raymq.common.names import BROKER_GROUPS_MAX, TRACE_TOPIC, check_topic
from raymq.common.namespaces import NO_NAMESPACE, Namespace
from raymq.common.numbers import INT32_MAX, NOT_NEGATIVE, POINT_IN_TIME_MS, NumberRange, bounded, checked
from raymq.common.parallel import aside, start_daemon
from raymq.common.protocol.group import StartOffsetQuery
from raymq.common.retry import persist_until
from raymq.remoting.access.credentials import Credentials, find_credentials
from raymq.remoting.actor_ref import running_nameservers
from raymq.remoting.broker_client import close_broker_clients
from raymq.remoting.heartbeats import Heartbeats
from raymq.remoting.namespaced_routes import NamespacedRoutes
from raymq.remoting.route_cache import ROUTE_TIMEOUT_S, RouteCache
from raymq.remoting.storage_clients import StorageClients
from raymq.telemetry.trace.deliveries import DeliveryTrace
from raymq.telemetry.trace.dispatcher import (
    TRACE_PRODUCER_GROUP,
    TRACE_SEND_TIMEOUT_S,
    TraceDispatcher,
    TraceStatistics,
)
from raymq.telemetry.trace.spans import spans_if_set

if TYPE_CHECKING:
    from raymq.client.admin.admin import Admin
    from raymq.client.consumer.pull.async_consumer import AsyncPullConsumer
    from raymq.client.consumer.pull.consumer import PullConsumer
    from raymq.client.consumer.pull.engine import PullEngine
    from raymq.client.consumer.pull.settings import PullOptions
    from raymq.client.consumer.push.consumer import PushConsumer, PushOptions
    from raymq.client.consumer.simple.async_consumer import AsyncSimpleConsumer
    from raymq.client.consumer.simple.consumer import SimpleConsumer
    from raymq.client.consumer.simple.engine import SimpleEngine
    from raymq.client.consumer.simple.settings import SimpleOptions
    from raymq.client.producer.async_producer import AsyncProducer
    from raymq.client.producer.repeatable.writer import RepeatableWriter
    from raymq.client.request.requests import ClientRequests
    from raymq.client.transactions.checks import Check
    from raymq.client.transactions.producer import TransactionProducer

CONSUME_TIMESTAMP_AGO_MS: Final = 30 * 60_000
"""Default maximum age, in ms, of the first message that a new group with CONSUME_FROM_TIMESTAMP reads: half an hour, as
in RocketMQ."""

NAMESPACE_VARIABLE: Final = "RAYMQ_NAMESPACE"

QUEUES_TIMEOUT_S: Final = 20.0
"""Timeout in seconds for reading a topic's queues. It allows for a restart of the NameServers."""

CLOSE_AT_EXIT_S: Final = 60.0
"""Maximum time in seconds that an exiting process waits for a `Client.close` call whose caller was interrupted."""


class _Closable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closable)

logger = logging.getLogger(__name__)

_inherited_ray: list[object] = []
"""In a forked child process: a reference to the parent's connection to Ray, which the child has inherited; otherwise
empty. Only the parent process can use this connection."""

CHECK_THREADS: Final = NumberRange(1, 1000)
"""Valid range for the number of threads in which a transaction producer checks local transactions."""


@in_forked_child
def _note_inherited_ray() -> None:
    _inherited_ray.clear()
    if ray.is_initialized():
        _inherited_ray.append(ray._private.worker.global_worker.core_worker)


def _refuse_inherited_ray() -> None:
    """Raise ClientStateError if this process was forked from a process that is connected to Ray. Calls to Ray over the
    inherited connection are never answered."""
    connected = bool(_inherited_ray) and ray.is_initialized()
    if connected and ray._private.worker.global_worker.core_worker is _inherited_ray[0]:
        raise ClientStateError(
            f"process {os.getpid()} was forked from a process that is connected to Ray, and Ray's connection does "
            "not survive a fork: fork before the program connects, or start the process with multiprocessing's "
            "'spawn' or 'forkserver' method, and call raymq.connect() there"
        )


@checked
@bounded(broker_groups=NumberRange(1, BROKER_GROUPS_MAX))
def connect(
    address: str | None = None,
    *,
    embedded: bool = False,
    config: str | Path | None = None,
    data_dir: str | Path | None = None,
    broker_groups: int | None = None,
    progress: ProgressCallback | None = None,
    credentials: Credentials | None = None,
    trace: bool | str = False,
    namespace: str | None = None,
) -> Client:
    """Connect to the raymq of a Ray cluster, or start a raymq on this machine.

    Without `embedded`: uses the Ray to which this process is connected. If the process is not connected, connects to
    the Ray at `address`, or else to this machine's Ray (raymq.client.cluster.attach). Raises ClusterNotFoundError if no
    Ray runs there, or if that Ray runs no raymq.

    With `embedded=True`: starts the servers, and first a local Ray unless this process has one. The settings are read
    from `config` (default: `raymq.yaml` in the current directory, if it exists). `data_dir` and `broker_groups`
    override them. Closing the client stops what `connect` started. Messages, topics and groups stay in `data_dir`. Its
    default, `~/.raymq/store`, is also the default of `raymq up`, so a later run and `raymq up` continue with them.
    Raises ConfigError, StoreLockedError or StoreError if the start fails, and leaves nothing running. Raises
    ClientStateError if a raymq already runs. `progress` is called with each step's name. By default the steps and the
    data directory are printed on standard error, if it is a terminal.

    `credentials`: the user for whom every request is made, if access control is on. By default the credentials of the
    environment or of a file, if they exist (raymq.remoting.access.credentials). A process acts as one user at a time:
    raises ClientStateError while the process has a client of another user. Raises AuthenticationError if access control
    is on and no known user is given.

    In a forked child of a process that is connected to Ray, this function raises ClientStateError at once.

    `trace`: if True, this client's producers, push and pull consumers write the records of all sends, deliveries and
    transactions to RMQ_SYS_TRACE_TOPIC (`Admin.trace` reads them). A str names another topic for the records. Raises
    TopicNotExistError if the named topic does not exist.

    `namespace`: the namespace of this client's topics and groups (raymq.common.namespaces). The default is the
    environment variable RAYMQ_NAMESPACE, or else no namespace. Raises IllegalNameError if the namespace is invalid.
    """
    _refuse_inherited_ray()
    names = Namespace(os.environ.get(NAMESPACE_VARIABLE, "") if namespace is None else namespace)
    who = identity.present() if credentials is None else credentials.identity
    if who is None:
        found = find_credentials()
        who = None if found is None else found.identity
    if who is None:
        return _traced(_connect(address, embedded, config, data_dir, broker_groups, progress, names), trace)
    identity.take(who)
    try:
        client = _traced(_connect(address, embedded, config, data_dir, broker_groups, progress, names), trace)
    except BaseException:
        identity.give_back(who)
        raise
    client._acts_as(who)
    return client


def _connect(
    address: str | None,
    embedded: bool,
    config: str | Path | None,
    data_dir: str | Path | None,
    broker_groups: int | None,
    progress: ProgressCallback | None,
    names: Namespace,
) -> Client:
    """Check the arguments of `connect`, start the servers if `embedded` is true, and return the client. Called after
    the process has taken the user's identity."""
    if not embedded:
        if config is not None or data_dir is not None or broker_groups is not None:
            raise ClientStateError(
                "config, data_dir and broker_groups are for an embedded raymq: pass embedded=True, or leave "
                "config, data_dir and broker_groups out"
            )
        release = _attach(address)
        with closed_on_error(release, "the connection to Ray"):
            client = Client(release, names)
        return _checked(client)
    if address is not None:
        raise ClientStateError("embedded=True starts raymq on this machine; leave out address or embedded")
    # Import the settings only when they are needed. Their models take an eighth of a second to make.
    from raymq.common.config.cluster import load_settings

    settings = load_settings(config, data_dir=data_dir, broker_groups=broker_groups)
    if ray.is_initialized() and running_nameservers():
        raise ClientStateError(
            "this Ray cluster already runs raymq: connect with raymq.connect(), without embedded=True"
        )
    cluster = EmbeddedCluster(settings)
    report = _print_step if progress is None else progress
    cluster.start(report)
    with closed_on_error(cluster.stop, "the embedded raymq"):
        report(f"raymq runs in this program; messages are stored in {settings.data_dir}")
        client = Client(cluster.stop, names)
    return _checked(client)


def _print_step(step: str) -> None:
    """Print a step of the servers' start on standard error if it is a terminal, because the first start takes up to a
    minute."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"raymq: {step}", file=sys.stderr, flush=True)


def _checked(client: Client) -> Client:
    """Return a new client after a NameServer has accepted a call of this process's user.

    If the NameServer refuses the user, closes the client and raises AuthenticationError. If no NameServer is reachable,
    returns the client without this check. The client's first call then raises the error.
    """
    with closed_on_error(client.close, "the client"):
        try:
            client.routes.clusters()
        except AuthenticationError:
            raise
        except RaymqError as error:
            logger.info("cannot check whether this process's user exists, because no NameServer answers: %s", error)
    return client


def _traced(client: Client, trace: bool | str) -> Client:
    """Start the trace of a new client if `trace` requests it, and return the client. If the trace cannot start, closes
    the client and raises the error."""
    if trace:
        with closed_on_error(client.close, "the client"):
            client._begin_trace(TRACE_TOPIC if trace is True else client.names.wrap(check_topic(trace)))
    return client


def _attach(address: str | None) -> Callable[[], None]:
    """Connect this process to Ray. Returns a function that disconnects the process; the function does nothing if the
    process was connected before this call."""
    release: Callable[[], None] = ray.shutdown if attach_ray(address) else lambda: None
    with closed_on_error(release, "the connection to Ray"):
        if not running_nameservers():
            raise ClusterNotFoundError(
                "this Ray cluster does not run raymq: start it with `raymq up`, or use raymq.connect(embedded=True)"
            )
    return release


class Client(Closing):
    """A connection to raymq, made by `connect`. Close it, or use it in a `with` statement; closing the client also
    closes its producers and consumers."""

    def __init__(self, release: Callable[[], None], names: Namespace = NO_NAMESPACE) -> None:
        self._release, self.names = release, names
        self._lock = threading.Lock()
        self._open: dict[int, Any] = {}
        self._requests: ClientRequests | None = None
        self._admin: Admin | None = None
        """The object that the property `admin` returns. None before its first use."""
        self._closed = False
        self._identity: Identity | None = None
        self._trace: TraceDispatcher | None = None
        self._spans = spans_if_set()
        self.node_id: str = ray.get_runtime_context().get_node_id()
        self._born_host = (ray.util.get_node_ip_address(), 0)
        self.routes = RouteCache(running_nameservers(), suggests=True)
        self.storages = StorageClients(self.node_id)
        self.heartbeats = Heartbeats(self.routes, self._born_host[0], self.node_id)
        self.rebalance = RebalanceClient(self.routes)
        self._commits = CommitThreads()
        self._pid = os.getpid()
        self._ended = threading.Event()
        """Event that is set after `close` has finished."""
        atexit.register(self._close_at_exit)

    def _acts_as(self, who: Identity) -> None:
        """Set the user for whom the process acts. `close` releases the user."""
        self._identity = who

    def _begin_trace(self, topic: str) -> None:
        """Start the trace of all producers and consumers that this client makes after this call."""
        self.routes.wait(topic, ROUTE_TIMEOUT_S)
        self._trace = TraceDispatcher(self._trace_producer, topic)

    def _trace_producer(self) -> Producer:
        return Producer(
            TRACE_PRODUCER_GROUP,
            routes=self.routes,
            storage=self.storages.get,
            born_host=self._born_host,
            settings=ProducerSettings(send_timeout_s=TRACE_SEND_TIMEOUT_S),
        )

    def trace_statistics(self) -> TraceStatistics:
        """Return the numbers of messages whose trace records this client has sent, dropped, or failed to send.
        Listeners in the cluster count their own records. All counts are 0 without a trace."""
        return TraceStatistics() if self._trace is None else self._trace.statistics()

    @property
    def admin(self) -> Admin:
        """The administration of topics, messages, groups, stores and NameServers. The object is always the same, so
        that calls one after another share its list of broker groups."""
        from raymq.client.admin.admin import Admin
        from raymq.client.admin.namespaced import NamespacedCalls

        self._check_open()
        if self._admin is None:
            admin = Admin(self.routes, self.storages)
            self._admin = cast("Admin", NamespacedCalls(admin, self.names)) if self.names else admin
        return self._admin

    def producer(self, group: str = "default", **settings: Unpack[ProducerOptions]) -> Producer:
        """Make a producer. `settings` are the fields of ProducerSettings: `send_timeout_s`, `max_buffered_bytes`,
        `when_full`, `compression`, `hooks` …"""
        self._check_open()
        check_option_names("a producer", settings, ProducerOptions.__annotations__)
        producer = Producer(
            group,
            routes=self.routes,
            storage=self.storages.get,
            born_host=self._born_host,
            settings=ProducerSettings(**settings),
            requests=self._requests_of_all,
            observers=[
                *(() if self._trace is None else [SendTrace(self.names.wrap(group), self._trace)]),
                *(() if self._spans is None else [SendSpans(group, self._spans)]),
            ],
            names=self.names,
            on_close=self._forget,
        )
        self.heartbeats.set_producer(producer, self.names.wrap(group))
        return self._track(producer)

    def async_producer(self, group: str = "default", **settings: Unpack[ProducerOptions]) -> AsyncProducer:
        """Make a producer for programs with an event loop. `settings`: as in `producer`."""
        from raymq.client.producer.async_producer import AsyncProducer

        return AsyncProducer(self.producer(group, **settings))

    @bounded(check_threads=CHECK_THREADS)
    def transaction_producer(
        self, group: str, *, check: Check, check_threads: int = 1, **settings: Unpack[ProducerOptions]
    ) -> TransactionProducer:
        """Make a producer whose messages become visible only if a local transaction commits.

        ``check(message)`` returns the outcome of a message's local transaction: a LocalTransactionState, or None while
        the outcome is unknown. It runs in `check_threads` threads of this process. `settings`: as in `producer`.
        """
        from raymq.client.transactions.producer import TransactionProducer

        sender = self.producer(group, **settings)
        with closed_on_error(sender.close, "the producer of the half messages"):
            producer = TransactionProducer(
                sender,
                check,
                routes=self.routes,
                storage=self.storages.get,
                brokers=self.routes.brokers,
                client_id=f"{self.heartbeats.client_id}@{secrets.token_hex(4)}",
                check_threads=check_threads,
                on_close=self._forget,
            )
        return self._track(producer)

    def write_queues(self, topic: str, timeout_s: float = QUEUES_TIMEOUT_S) -> tuple[MessageQueue, ...]:
        """Return all queues of a topic, in the order that maps sharding keys to queues. A repeatable write and all its
        repeats must use the same list.

        Raises TopicNotExistError if the topic does not exist; NoPermissionError if the topic is not writable;
        ServiceNotAvailableError if the queues stay unknown for `timeout_s`.
        """
        self._check_open()
        routes = NamespacedRoutes(self.routes, self.names)
        routes.invalidate(topic)  # do not use the cached route: queues may have been added a moment ago
        return persist_until(time.monotonic() + timeout_s, lambda left_s: routes.get(topic).require_all_queues())

    @bounded(epoch=NOT_NEGATIVE, first_queue=NumberRange(0, INT32_MAX), now_ms=POINT_IN_TIME_MS)
    def repeatable_writer(
        self,
        topic: str,
        *,
        producer_id: str,
        epoch: int = 0,
        queues: Sequence[MessageQueue] | None = None,
        first_queue: int = 0,
        now_ms: int | None = None,
        **settings: Unpack[ProducerOptions],
    ) -> RepeatableWriter:
        """Make a writer of Arrow tables that stores each row once, however often the write is repeated.

        The store identifies a row by `producer_id`, `epoch` and the row's number. `producer_id` has 1 to 64 bytes of
        text. Two concurrent writes must not share a producer id, and a write to two topics needs two ids. `epoch` is 0
        or more; after a write with a greater epoch, the store refuses smaller epochs (fencing).

        A repeat must use the same arguments. `queues`: by default the topic's current queues. The default is only
        correct if no queues are added before the repeat; see `write_queues`. `first_queue`: the index of the queue for
        the first rows without a key. `now_ms`: the reference time for deliver times, in ms since 1970; without it, no
        deliver time may be more than a day ahead.

        `settings` are the fields of ProducerSettings; a setting that a repeatable write would ignore raises
        InvalidArgumentError. Waits up to `send_timeout_s` for unreachable brokers, and raises ServiceNotAvailableError
        after that time. Raises ClientStateError if a greater epoch has written, and
        TopicNotExistError if the topic does not exist.
        """
        from raymq.client.producer.repeatable.stored import StoredSequences
        from raymq.client.producer.repeatable.writer import RepeatableWriter, check_identity
        from raymq.client.producer.senders.encoder import ProducerIdentity

        self._check_open()
        check_identity(producer_id, epoch)
        identity = ProducerIdentity(producer_id, epoch)
        # If the write is repeated, rows that the store has already accepted are not sent again. So the first attempt
        # must wait until its rows are safe on disk.
        own = check_repeatable(settings)

        def producer() -> Producer:
            return Producer(
                "default",
                routes=self.routes,
                storage=self.storages.get,
                born_host=self._born_host,
                settings=ProducerSettings(**own),
                identity=identity,
                names=self.names,
            )

        return RepeatableWriter(
            topic,
            self.write_queues(topic) if queues is None else queues,
            stored=StoredSequences(topic, identity, self.routes, self.storages, self.names),
            routes=NamespacedRoutes(self.routes, self.names),
            producer=producer,
            first_queue=first_queue,
            now_ms=now_ms,
        )

    def pull_consumer(self, group: str, **options: Unpack[PullOptions]) -> PullConsumer:
        """Make a consumer in this process. The program reads its messages with `poll`.

        The options are the fields of raymq.client.consumer.pull.settings.PullSettings, and also `consume_from` and
        `consume_timestamp_ms`, which choose the start offset in queues in which the group has committed nothing.
        """
        from raymq.client.consumer.pull.consumer import PullConsumer

        return PullConsumer(self._pull_engine(group, options))

    @direct  # `direct` lets the method run in the caller's thread, because it needs the caller's running event loop
    def async_pull_consumer(self, group: str, **options: Unpack[PullOptions]) -> AsyncPullConsumer:
        """Make a pull consumer for the running event loop: ``async with client.async_pull_consumer("g") as c:``. Takes
        the options of `pull_consumer`."""
        from raymq.client.consumer.pull.async_consumer import AsyncPullConsumer

        engine = aside(self._pull_engine, group, options)
        with closed_on_error(engine.close, "the consumer"):
            return AsyncPullConsumer(engine)

    def _pull_engine(self, group: str, options: PullOptions) -> PullEngine:
        from raymq.client.consumer.pull.engine import PullEngine
        from raymq.client.consumer.pull.settings import PullSettings

        self._check_open()
        settings = PullSettings.of(self.names.wrap(group), **options)
        engine = PullEngine(
            settings,
            routes=self.routes,
            storages=self.storages,
            rebalance=self.rebalance,
            commits=self._commits,
            node_id=self.node_id,
            names=self.names,
            announce=self.heartbeats.set_consumer,
            on_close=self._forget,
            trace=None if self._trace is None else DeliveryTrace(self.names.wrap(group), self._trace),
            spans=self._spans,
        )
        return self._track(engine)

    def simple_consumer(self, group: str, **options: Unpack[SimpleOptions]) -> SimpleConsumer:
        """Make a simple consumer in this process. The consumer leases messages for a limited time, and acknowledges
        each message separately.

        The options are `ordered` and `auto_renew` (raymq.client.consumer.simple.settings.SimpleSettings),
        `consume_from` and `consume_timestamp_ms`.
        """
        from raymq.client.consumer.simple.consumer import SimpleConsumer

        return SimpleConsumer(self._simple_engine(group, options))

    @direct
    def async_simple_consumer(self, group: str, **options: Unpack[SimpleOptions]) -> AsyncSimpleConsumer:
        """Make a simple consumer for the running event loop. Takes the options of `simple_consumer`."""
        from raymq.client.consumer.simple.async_consumer import AsyncSimpleConsumer

        engine = aside(self._simple_engine, group, options)
        with closed_on_error(engine.close, "the consumer"):
            return AsyncSimpleConsumer(engine)

    def _simple_engine(self, group: str, options: SimpleOptions, *, gives_up: bool = True) -> SimpleEngine:
        from raymq.client.consumer.simple.engine import SimpleEngine
        from raymq.client.consumer.simple.settings import SimpleSettings

        self._check_open()
        engine = SimpleEngine(
            SimpleSettings.of(self.names.wrap(group), **options),
            routes=self.routes,
            storages=self.storages,
            names=self.names,
            announce=self.heartbeats.set_consumer,
            on_close=self._forget,
            gives_up=gives_up,
        )
        return self._track(engine)

    @bounded(consume_timestamp_ms=POINT_IN_TIME_MS)
    def push_consumer(
        self,
        group: str,
        *,
        consume_from: ConsumeFromWhere = ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET,
        consume_timestamp_ms: int | None = None,
        **options: Unpack[PushOptions],
    ) -> PushConsumer:
        """Make a consumer that runs in the cluster and calls a listener. Subscribe it, give it a listener, then start
        it.

        `consume_from` chooses the start offset in queues in which the group has committed nothing.
        `consume_timestamp_ms` (by default 30 minutes ago) is used with CONSUME_FROM_TIMESTAMP. The `options` are
        settings (raymq.client.consumer.push.settings), such as ``orderly=True`` (the messages of a queue one after
        another), ``threads=4``, ``message_model=MessageModel.BROADCASTING``. With ``consume_mode="share"`` any number
        of instances share the messages of any number of queues.
        """
        from raymq.client.consumer.push.consumer import PushConsumer
        from raymq.client.consumer.share.feed import ShareFeed
        from raymq.client.request.replier import ListenerReplier, listener_trace
        from raymq.client.request.request_threads import RequestThreads

        self._check_open()
        if consume_timestamp_ms is None:
            consume_timestamp_ms = time.time_ns() // 1_000_000 - CONSUME_TIMESTAMP_AGO_MS
        return PushConsumer(
            group,
            names=self.names,
            routes=self.routes,
            start=StartOffsetQuery(consume_from, consume_timestamp_ms),
            options=options,
            track=self._track,
            on_close=self._forget,
            make_replier=ListenerReplier,
            make_trace=None
            if self._trace is None
            else partial(listener_trace, self.names.wrap(group), self._trace.topic),
            make_shared=ShareFeed,
            make_requests=RequestThreads,
            may_print=connected_by_raymq(),
        )

    def close(self) -> None:
        """Close producers and consumers (a producer flushes), then the connection. Idempotent. A callback of a send's
        future must not wait. If `close` is called in such a callback, it returns at once, and another thread closes the
        client."""
        if in_sender():
            # If no thread can be started, the interpreter is exiting. In this case the client's exit handler closes the
            # client.
            start_daemon(self.close, name="client-close")
            return
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
            opened = list(self._open.values())
        try:
            self._close_all(opened)
        finally:
            self._ended.set()
            atexit.unregister(self._close_at_exit)

    def _close_at_exit(self) -> None:
        """Close the client at process exit. If the caller of `close` was interrupted, another thread continues `close`.
        This method waits for that thread, because the exit would stop it."""
        self.close()
        if os.getpid() == self._pid:
            self._ended.wait(CLOSE_AT_EXIT_S)

    def _close_all(self, opened: Sequence[Any]) -> None:
        failures: list[Exception] = []
        for item in opened:
            try:
                item.close()
            # keep the error until all other objects of the client are closed, and raise it then
            except Exception as error:
                failures.append(error)
        if self._requests is not None:
            self._requests.close()
        if self._trace is not None:
            self._trace.close()
        self.rebalance.close()
        self._commits.close()
        self.heartbeats.close()
        self.storages.close()
        close_broker_clients()
        self._release()
        if self._identity is not None:
            identity.give_back(self._identity)
        if failures:
            raise failures[0]

    def __reduce__(self) -> NoReturn:
        raise TypeError("a raymq client cannot be pickled: call raymq.connect() in the process that uses the client")

    def _requests_of_all(self) -> ClientRequests:
        """Return the request service that all producers of this client share. The first call makes it."""
        from raymq.client.request.requests import ClientRequests

        with self._lock:
            if self._requests is None:
                self._requests = ClientRequests(self.routes, self.storages, self.heartbeats, self._born_host[0])
            return self._requests

    def _check_open(self) -> None:
        if self._closed:
            raise ClientStateError("this client is closed; call raymq.connect() again")

    def _track(self, item: T) -> T:
        """Register an object that `close` must close. If the client was closed while the object was being made, closes
        the object and raises ClientStateError."""
        with self._lock:
            if not self._closed:
                self._open[id(item)] = item
                return item
        item.close()
        raise ClientStateError("this client was closed during the call; call raymq.connect() again")

    def _forget(self, item: Any) -> None:
        self.heartbeats.remove(item)
        with self._lock:
            self._open.pop(id(item), None)
