"""A Spark session on the Ray cluster this process is connected to, made and ended as a whole.

RayDP starts four Java processes: the driver's JVM (a child of this process), an application master and its gateway, and
one executor per `executors`. Nothing here survives the session: on exit all four are ended and the process's
environment is as it was.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import ray
import raydp
from pyspark import SparkContext
from pyspark.sql import SparkSession
from raydp.spark.ray_cluster_master import RAYDP_SPARK_MASTER_SUFFIX

from raymq.cluster.java import java_environment
from raymq.errors import ClientStateError, InvalidArgumentError

_LOG4J_FILE: Final = Path(__file__).with_name("log4j2.properties")
_STOP_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.05

# Spark's own list for Java 17 (JavaModuleOptions), and java.math and java.text, without which Ray's Java serializer
# kills RayDP's application master at the first ray.data.from_spark.
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
# The second half starts each JVM in half the time, which short jobs feel more than the last optimisation they lose.
_JAVA_OPTIONS: Final = " ".join(
    [
        *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED),
        "--add-opens=java.security.jgss/sun.security.krb5=ALL-UNNAMED",
        "-Djdk.reflect.useDirectMethodHandle=false",
        f"-Djava.io.tmpdir={tempfile.gettempdir()}",
        *("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"),
    ]
)
_JAVA_OPTION_KEYS: Final = (
    "spark.driver.extraJavaOptions",
    "spark.executor.extraJavaOptions",
    "spark.ray.raydp_app_master.extraJavaOptions",
)


@contextmanager
def spark_session(
    app_name: str,
    *,
    executors: int = 1,
    executor_cores: int = 1,
    executor_memory: str = "1g",
    configs: Mapping[str, str] | None = None,
    ray_data: bool = False,
) -> Iterator[SparkSession]:
    """A Spark session for the length of a `with` block. One at a time per process.

    `app_name` gets a random end, because RayDP wants a fresh name for each session. `executors` × `executor_cores` CPUs
    are taken from the Ray cluster, `executor_memory` is each executor's heap. `configs` are Spark's own and win over
    what is set here; Java options are added to. `ray_data`: let the driver's JVM join Ray, which `ray.data.from_spark`
    needs; it costs a second, and Ray prints two lines on stderr.

    Before anything is started: ClientStateError without a connection to Ray, or with a Spark session in this process;
    InvalidArgumentError for more CPUs than the cluster has. However the block ends, the session is stopped and its
    processes are ended.
    """
    _check(executors, executor_cores)
    name = f"{app_name}-{uuid.uuid4().hex[:8]}"
    jvm_was_there = SparkContext._gateway is not None
    with _environment(_variables()):
        try:
            yield raydp.init_spark(
                name,
                executors,
                executor_cores,
                executor_memory,
                fault_tolerant_mode=ray_data,
                configs=spark_configs(configs or {}),
            )
        finally:
            raydp.stop_spark()
            _await_end_of(name + RAYDP_SPARK_MASTER_SUFFIX)
            if not jvm_was_there:
                _end_driver_jvm()


def spark_configs(configs: Mapping[str, str]) -> dict[str, str]:
    """The Spark configuration of a session: the user's, over what RayDP on Java 17 needs and what keeps it quiet.

    The address is not here: RayDP binds the driver to the node's IP address as Ray knows it, which is 127.0.0.1 where
    Ray runs on loopback.
    """
    defaults = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log4j.config.file.name": str(_LOG4J_FILE),
    }
    result = {**defaults, **{key: str(value) for key, value in configs.items()}}
    for key in _JAVA_OPTION_KEYS:
        result[key] = f"{_JAVA_OPTIONS} {result.get(key, '')}".strip()
    return result


def _check(executors: int, executor_cores: int) -> None:
    if executors < 1 or executor_cores < 1:
        raise InvalidArgumentError(f"executors={executors} and executor_cores={executor_cores} must be at least 1")
    if not ray.is_initialized():
        raise ClientStateError("no connection to Ray; call raymq.connect() first and keep it open over the session")
    if SparkContext._active_spark_context is not None:
        raise ClientStateError("a Spark session runs in this process already; stop it first")
    cpus = int(ray.cluster_resources().get("CPU", 0))
    if executors * executor_cores > cpus:
        raise InvalidArgumentError(
            f"{executors} executor(s) with {executor_cores} core(s) need {executors * executor_cores} CPUs and the Ray "
            f"cluster has {cpus}; Spark would wait for ever. Ask for fewer, or add nodes"
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


def _await_end_of(actor_name: str) -> None:
    """Wait until RayDP's master is gone; it goes last, after the executors, and `stop_spark` does not wait for it."""
    deadline_s = time.monotonic() + _STOP_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            ray.get_actor(actor_name)
        except ValueError:
            return
        time.sleep(_POLL_S)


def _end_driver_jvm() -> None:
    """End the JVM that PySpark keeps for the life of the process, and let it start another for the next session."""
    gateway = SparkContext._gateway
    if gateway is None:
        return
    SparkContext._gateway = None
    SparkContext._jvm = None
    process = gateway.proc
    gateway.shutdown()
    process.stdin.close()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
