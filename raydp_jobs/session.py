"""Opens and closes a Spark session on the Ray cluster to which this process is connected.

    checks      arguments, this process, the size of the cluster; nothing is started yet
    places      a placement group of CPUs and memory beside the storage actors (raydp_jobs.executor_places)
    nodes       Java and Python on the executors' nodes (raydp_jobs.executor_places)
    RayDP       four kinds of Java processes: the driver's JVM (a child of this process), an application master and its
                gateway, and one executor per `executors`

Nothing remains after the session. When it ends or its start fails, the Java processes end, the placement group is
removed, and this process's environment variables are restored.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, cast

import ray
from pyspark.sql import SparkSession

from raydp_jobs import SPARK_COUNT, START_TIMEOUT_VARIABLE
from raydp_jobs.executor_places import (
    check_fits,
    check_nodes,
    executor_size,
    memory_mib,
    nodes_of,
    reserved,
    storage_nodes,
)
from raydp_jobs.raydp_internals import (
    APP_MASTER,
    check_raydp,
    has_session,
    master_name,
    start_session,
    stop_session,
)
from raydp_jobs.spark_internals import (
    CONNECTION_ERRORS,
    JVM_LOGGERS,
    JVM_TEXT_ERRORS,
    check_spark,
    count_executors,
    driver_gateway,
    end_driver_jvm,
    forget_context,
    has_context,
    process_of,
)
from raymq.client.cluster.java import java_environment, require_java
from raymq.common.errors import ClientStateError, InvalidArgumentError, RequestTimeoutError, ServiceNotAvailableError
from raymq.common.numbers import LONGEST_TIME_S, NumberRange, bounded, checked, shown
from raymq.remoting.actor_ref import find_actor

START_TIMEOUT_S: Final = 120.0
_START_TIMEOUT: Final = NumberRange(0.001, LONGEST_TIME_S)

_LOG4J_FILE: Final = Path(__file__).with_name("log4j2.properties")
_STOP_TIMEOUT_S: Final = 10.0
_SETTLE_S: Final = 1.0
_WATCH_S: Final = 2.0
_POLL_S: Final = 0.05
_MASTER_RESOURCE: Final = "spark.ray.raydp_spark_master.actor.resource."
_A_BIT: Final = 0.001

# Java packages that Spark needs open: Spark's own list for Java 17 (JavaModuleOptions), plus java.math and java.text.
# Without the last two, Ray's Java serializer kills RayDP's application master at the first ray.data.from_spark.
_OPENED: Final = (
    *(
        "java.lang",
        "java.lang.invoke",
        "java.lang.reflect",
        "java.io",
        "java.net",
        "java.nio",
        "java.math",
        "java.text",
    ),
    *("java.util", "java.util.concurrent", "java.util.concurrent.atomic", "jdk.internal.ref"),
    *("sun.nio.ch", "sun.nio.cs", "sun.security.action", "sun.util.calendar"),
)
# Options of each JVM. The -XX options halve its start time but make its code slower. For short jobs the faster start
# matters more.
_JAVA_OPTIONS: Final = " ".join(
    [
        *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED),
        "--add-opens=java.security.jgss/sun.security.krb5=ALL-UNNAMED",
        "-Djdk.reflect.useDirectMethodHandle=false",
        *("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"),
    ]
)
# Java properties of the driver and of RayDP's gateway that name directories. Without ray.logging.dir, RayDP's agent
# leaves a log file below /tmp/ray.
_DIRECTORY_PROPERTIES: Final = ("java.io.tmpdir", "ray.logging.dir")
_EXECUTOR_OPTIONS: Final = "spark.executor.extraJavaOptions"
_JAVA_OPTION_KEYS: Final = (
    "spark.driver.extraJavaOptions",
    _EXECUTOR_OPTIONS,
    "spark.ray.raydp_app_master.extraJavaOptions",
)


@checked
@contextmanager
@bounded(executors=SPARK_COUNT, executor_cores=SPARK_COUNT, start_timeout_s=_START_TIMEOUT)
def spark_session(
    app_name: str,
    *,
    executors: int = 1,
    executor_cores: int = 1,
    executor_memory: str = "1g",
    configs: Mapping[str, str] | None = None,
    ray_data: bool = False,
    beside_storage: bool = True,
    start_timeout_s: float | None = None,
) -> Iterator[SparkSession]:
    """Open a Spark session for the duration of a `with` block. A process may open several sessions, one after another.

    `app_name` gets a random suffix, because RayDP needs a new name for each session. `executors` × `executor_cores`
    CPUs and `executors` × `executor_memory` (each executor's heap) are reserved in the Ray cluster before anything
    starts. With `beside_storage` the executors run on the nodes of the broker groups' masters, where reads need no
    network. Executors that do not fit on these nodes get other nodes, with a warning. `configs` are Spark settings and
    override raymq's settings; Java options are appended. `ray_data`: connect the driver's JVM to Ray, which
    `ray.data.from_spark` needs. The connection takes a second, Ray prints two lines on stderr, and a Ray cluster can
    have one such session at a time. `start_timeout_s` limits each step of the start; its
    default is RAYMQ_SPARK_START_TIMEOUT_S in the environment, or 120.

    These errors are raised before anything is started. ClientStateError: this process is not connected to Ray or
    already has a Spark session, or a node has no Java or no raymq. ClusterNotFoundError: `beside_storage` is set and no
    raymq runs. InvalidArgumentError: the cluster is too small for the executors. Later, ServiceNotAvailableError is
    raised if other programs use the CPUs or the memory, and RequestTimeoutError if Spark does not start in time.

    At the end of the block, and if the start fails, the session is stopped, its processes end, and nothing stays
    reserved. If a process of the session dies, Spark's errors become a ClientStateError that names the process. The
    session and its DataFrames raise ClientStateError after the block.
    """

    timeout_s = default_start_timeout_s() if start_timeout_s is None else start_timeout_s
    mib = memory_mib(executor_memory)
    _check_process(ray_data)
    size = executor_size(executor_cores, mib, configs or {})
    check_fits(executors, size)
    name = f"{app_name}-{uuid.uuid4().hex[:8]}"
    wanted = storage_nodes() if beside_storage else frozenset()
    with ExitStack() as held:
        group = held.enter_context(reserved(executors, size, wanted, timeout_s))
        variables = _variables()
        here = ray.get_runtime_context().get_node_id()
        check_nodes({here, *nodes_of(group)}, variables["PYSPARK_PYTHON"], _session_directory())
        held.enter_context(_environment(variables))
        held.enter_context(_interrupts_as_before())
        held.enter_context(_quiet())
        temporary = held.enter_context(TemporaryDirectory(prefix="raymq-spark-", ignore_cleanup_errors=True))
        held.callback(_end, name)
        held.enter_context(_readable_errors())
        with _deadline(name, timeout_s):
            final = spark_configs(configs or {}, temporary=temporary)
            spark = start_session(name, executors, executor_cores, mib, group, final, ray_data=ray_data)
            _await_executors(spark, executors)
        with _explained(name, driver_gateway()), _watched(name, driver_gateway()):
            yield spark


def default_start_timeout_s() -> float:
    """Return the default of `start_timeout_s`: the value of the environment variable START_TIMEOUT_VARIABLE if it is
    set, otherwise START_TIMEOUT_S. Raises InvalidArgumentError if the variable's value is not a number of seconds."""
    text = os.environ.get(START_TIMEOUT_VARIABLE)
    if not text:
        return START_TIMEOUT_S
    try:
        value = float(text)
    except ValueError:
        # NaN is outside every range, so a text that is no number gets the same error as a number out of range.
        value = float("nan")
    if not _START_TIMEOUT.has(value):
        raise InvalidArgumentError(
            f"{START_TIMEOUT_VARIABLE} must be a number of seconds, {_START_TIMEOUT}, not {shown(text)}"
        )
    return value


def spark_configs(configs: Mapping[str, str], *, temporary: str | None = None) -> dict[str, str]:
    """Return the Spark configuration of a session. The user's `configs` override the settings that RayDP on Java 17
    needs, and the settings that reduce log output.

    `temporary`: a directory on this node for the files of the driver and of RayDP's master. The master also runs on
    this node. It reserves no CPU, because the executors may need all CPUs. The configuration contains no address: RayDP
    binds the driver to the node's IP address in Ray, which is 127.0.0.1 if Ray runs on loopback.
    """
    defaults = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log4j.config.file.name": str(_LOG4J_FILE),
    }
    if temporary is not None:
        defaults[f"{_MASTER_RESOURCE}CPU"] = "0"
        defaults[f"{_MASTER_RESOURCE}node:{ray.util.get_node_ip_address()}"] = str(_A_BIT)
    result = {**defaults, **{key: str(value) for key, value in configs.items()}}
    for key in _JAVA_OPTION_KEYS:
        directories = dict.fromkeys(_DIRECTORY_PROPERTIES, temporary) if temporary is not None else {}
        if temporary is not None and key == _EXECUTOR_OPTIONS:
            directories = {_DIRECTORY_PROPERTIES[0]: _session_directory()}
        places = [f"-D{name}={directory}" for name, directory in directories.items()]
        result[key] = " ".join([_JAVA_OPTIONS, *places, result.get(key, "")]).strip()
    return result


# Checks and preparations before a Spark session starts


def _check_process(ray_data: bool) -> None:
    """Raise an error if the start of a Spark session would fail or hang. Causes: this process is not connected to Ray,
    it has another Spark session, or it has a JVM that cannot be restarted."""
    check_spark()
    check_raydp()
    if not ray.is_initialized():
        raise ClientStateError(
            "this process is not connected to Ray; call raymq.connect() first, and keep the client open during "
            "the session"
        )
    require_java()
    if has_session():
        raise ClientStateError(
            "this process already has an open spark_session; only one may be open at a time: end it first"
        )
    if has_context():
        raise ClientStateError(
            "this process has a Spark session that was not created by spark_session: call its stop() first"
        )
    gateway = driver_gateway()
    if gateway is not None:
        if process_of(gateway) is None:
            raise ClientStateError(
                "this process uses another program's Java process (PYSPARK_GATEWAY_PORT); unset this variable"
            )
        # This process still has the JVM of a stopped Spark session. End the JVM, because it lacks RayDP's classes.
        end_driver_jvm(gateway, _STOP_TIMEOUT_S)
    if ray_data and _actor(APP_MASTER) is not None:
        raise ServiceNotAvailableError(
            "this Ray cluster already runs a Spark session with ray_data=True; only one may run at a time: end it first"
        )


def _variables() -> dict[str, str]:
    variables = java_environment()
    for key in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        variables[key] = os.environ.get(key, sys.executable)
    variables["SPARK_LOCAL_IP"] = ray.util.get_node_ip_address()
    return variables


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


@contextmanager
def _interrupts_as_before() -> Iterator[None]:
    """Restore the present ctrl-C handler at the end of the `with` block. PySpark installs a handler of its own, which
    requests the JVM to cancel jobs, even if the JVM has ended."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress two warnings that every `ray.data.from_spark` causes. RayDP uses outdated interfaces of PySpark
    and Ray."""

    def keep(record: logging.LogRecord) -> bool:
        return "argument ``parallelism`` is deprecated" not in record.getMessage()

    reader, filters = logging.getLogger("ray.data.read_api"), cast(list[Any], warnings.filters)
    reader.addFilter(keep)
    before = filters[:]
    warnings.filterwarnings("ignore", "DataFrame.sql_ctx is an internal property", UserWarning)
    ours = [item for item in filters if item not in before]
    try:
        yield
    finally:
        reader.removeFilter(keep)
        for item in ours:
            if item in filters:
                filters.remove(item)


# Functions that start a Spark session


@contextmanager
def _deadline(name: str, timeout_s: float) -> Iterator[None]:
    """Limit how long a session may take to start. RayDP and Spark wait forever for a process that does not start. At
    the deadline, this function kills their processes. It then hides the errors that Py4J logs about them."""
    late = threading.Event()
    root = logging.getLogger()
    # Py4J logs to the root logger. If the root logger had no handler, the first logged error would install a handler
    # for the whole Python process.
    handler = logging.NullHandler()

    def keep(record: logging.LogRecord) -> bool:
        return not late.is_set()

    def give_up() -> None:
        late.set()
        root.addHandler(handler)
        try:
            _kill(name)
        except Exception as error:  # Catch every error: unless the JVM is killed, the session's start waits forever.
            logging.getLogger(__name__).info("killing RayDP's master %s failed: %s", name, error)
        gateway = driver_gateway()
        if gateway is not None:
            gateway.proc.kill()

    loggers = [root, *map(logging.getLogger, JVM_LOGGERS)]
    for logger in loggers:
        logger.addFilter(keep)
    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception:
        if late.is_set():
            # Omit the original error: it only says, in 40 lines of Java and Python tracebacks, that the processes were
            # killed.
            raise RequestTimeoutError(
                f"starting Spark (look into the logs of Ray's session: {_logs()}; start_timeout_s, or the environment "
                f"variable {START_TIMEOUT_VARIABLE}, gives it more time)",
                timeout_s,
            ) from None
        raise
    finally:
        timer.cancel()
        for logger in loggers:
            logger.removeFilter(keep)
        root.removeHandler(handler)


def _await_executors(spark: SparkSession, executors: int) -> None:
    """Wait until all of Spark's executors are registered. The caller limits the wait by the deadline of the session's
    start."""
    if spark.conf.get("spark.dynamicAllocation.enabled", "false") == "true":
        return  # do not wait: with dynamic allocation, Spark requests executors only when a job runs
    while count_executors(spark) < executors:
        time.sleep(_POLL_S)


# Ending a session


@contextmanager
def _readable_errors() -> Iterator[None]:
    """Keep the texts of errors that the session's `with` block raises. A Spark error requests its text from the JVM
    each time the text is read, which fails after the JVM has ended."""
    try:
        yield
    except Exception as error:
        one: BaseException | None = error
        while one is not None:
            if isinstance(one, JVM_TEXT_ERRORS):
                _keep_text(one)
            one = one.__cause__ or one.__context__
        raise


def _keep_text(error: Any) -> None:
    try:
        text = str(error)
    except Exception:  # The JVM has already ended, so the error cannot read its text from the JVM.
        text = str(getattr(error, "desc", None) or getattr(error, "errmsg", ""))
    kind = type(error)
    body = {"__str__": lambda self: text, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    error.__class__ = type(kind.__name__, (kind,), body)


@contextmanager
def _watched(name: str, gateway: Any) -> Iterator[None]:
    """Watch RayDP's application master during the `with` block. Kill the driver's JVM if the application master dies,
    because otherwise Spark would wait for executors forever."""
    stopping = threading.Event()

    def watch() -> None:
        while not stopping.wait(_WATCH_S):
            try:
                gone = ray.is_initialized() and _actor(master_name(name)) is None
            except ServiceNotAvailableError:
                continue  # Ray does not answer now, so check the application master again after the next pause
            if gone:
                gateway.proc.kill()
                return

    thread = threading.Thread(target=watch, name="spark-session-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join(_STOP_TIMEOUT_S)


@contextmanager
def _explained(name: str, gateway: Any) -> Iterator[None]:
    """If a process of the Spark session is dead, convert the error of the `with` block into an error that names the
    dead process."""
    try:
        yield
    except CONNECTION_ERRORS as error:
        reason = _why_dead(name, gateway)
        if reason:
            raise ClientStateError(f"the Spark session {name} has ended: {reason}") from error
        raise


def _why_dead(name: str, gateway: Any) -> str:
    """Return a text that names the first dead process of a Spark session, and why it ended; empty if all processes are
    alive."""
    if not ray.is_initialized():
        return "this process is no longer connected to Ray; keep the client of raymq.connect() open during the session"
    if _actor(master_name(name)) is None:
        return f"the session's application master has ended, with its node or by a kill; see Ray's logs: {_logs()}"
    try:
        # Wait briefly for the driver's JVM, because its connections close a moment before it ends.
        code = gateway.proc.wait(_SETTLE_S)
    except subprocess.TimeoutExpired:
        return ""
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    return f"the driver's Java process {how}. The kernel kills processes when the machine is out of memory"


def _end(name: str) -> None:
    """End the Spark session: the session itself, its RayDP actors, and the driver's JVM. Parts that do not exist are
    skipped. Each step runs, even if an earlier step failed."""
    gateway = driver_gateway()
    failures = []
    steps: list[Callable[[], None]] = [stop_session, lambda: _await_end_of(name)]
    if gateway is not None:
        steps.append(lambda: end_driver_jvm(gateway, _STOP_TIMEOUT_S))
    for step in steps:
        try:
            step()
        except Exception as error:  # Catch every error, because the other steps of the session's end must still run.
            failures.append(error)
    forget_context()
    for failure in failures:
        logging.getLogger(__name__).info("ending the Spark session failed: %s", failure)


def _await_end_of(name: str) -> None:
    """Wait until RayDP's master has ended. The master ends last, after the executors, and `stop_spark` does not wait
    for it."""
    if not ray.is_initialized():
        return
    deadline_s = time.monotonic() + _STOP_TIMEOUT_S
    while _actor(master_name(name)) is not None:
        if time.monotonic() > deadline_s:
            _kill(name)
            return
        time.sleep(_POLL_S)


def _kill(name: str) -> None:
    """Kill RayDP's master. The master's gateway then ends, and Ray ends the executors that the gateway started."""
    master = _actor(master_name(name))
    if master is not None:
        ray.kill(master)


def _actor(name: str) -> Any:
    """Return the Ray actor named `name` of this process's namespace; None if no such actor exists. Raises
    ServiceNotAvailableError if Ray does not answer."""
    return find_actor(name, namespace=None)


def _session_directory() -> str:
    """Return the directory of the Ray session. Its path is the same on all nodes."""
    return str(ray._private.worker._global_node.get_session_dir_path())


def _logs() -> str:
    return f"{_session_directory()}/logs" if ray.is_initialized() else "this process is not connected to Ray"
