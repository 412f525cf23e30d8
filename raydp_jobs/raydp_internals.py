"""The private parts of RayDP that a Spark session needs, and a check of RayDP's version.

No other module imports RayDP. RayDP's public functions start and stop a session. raymq also needs the following private
parts, which another version of RayDP may change:

    raydp.context._global_spark_context           to know if this process has a session
    raydp.spark.ray_cluster.RayDPSparkMaster      the class of the master actor, which `start_session` replaces
    RAYDP_SPARK_MASTER_SUFFIX, RAY_APP_MASTER     the names of the session's actors

`check_raydp` runs before the first of them is used.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import ray
from pyspark.sql import SparkSession

from raydp_jobs.spark_internals import driver_gateway
from raymq.common.errors import ClientStateError

CHECKED_RAYDPS: Final = {"1.6.5": "3.5", "1.7.0b20260911.dev0": "4.2"}
"""The versions of RayDP with which this module was checked, and the first two numbers of the Spark beside each. Other
versions with the same first two numbers are accepted."""
APP_MASTER: Final = "RAY_APP_MASTER"
"""The name of the Java actor that is RayDP's application master, in the Ray namespace of the session."""


def check_raydp(installed: str | None = None, spark: str | None = None) -> None:
    """Raise ClientStateError unless the installed RayDP has a version with which this module was checked, beside the
    Spark of that check. `installed` and `spark`: the versions; by default the versions of the installed packages."""
    found = version("raydp") if installed is None else installed
    found_spark = version("pyspark") if spark is None else spark
    right = [
        (raydp, pyspark) for raydp, pyspark in CHECKED_RAYDPS.items() if found.split(".")[:2] == raydp.split(".")[:2]
    ]
    if any(found_spark.split(".")[:2] == pyspark.split(".") for _, pyspark in right):
        return
    checked = " and ".join(f"RayDP {raydp} on Spark {pyspark}" for raydp, pyspark in CHECKED_RAYDPS.items())
    packages = " or ".join(
        f"'raydp=={raydp}' 'pyspark=={pyspark}.*'" for raydp, pyspark in right or CHECKED_RAYDPS.items()
    )
    raise ClientStateError(
        f"RayDP {found} is installed with Spark {found_spark}, and this raymq was checked with {checked}, whose "
        f"private parts it uses: pip install {packages}"
    )


def has_session() -> bool:
    """Return True if RayDP has a Spark session in this process."""
    import raydp

    return raydp.context._global_spark_context is not None


def master_name(name: str) -> str:
    """Return the name of the master actor of the session `name`."""
    from raydp.spark.ray_cluster_master import RAYDP_SPARK_MASTER_SUFFIX

    return f"{name}{RAYDP_SPARK_MASTER_SUFFIX}"


def start_session(
    name: str, executors: int, cores: int, memory_mib: int, group: Any, configs: dict[str, str], *, ray_data: bool
) -> SparkSession:
    """Start a session of RayDP whose executors are in the bundles of the placement group `group`. `memory_mib`: the
    heap of each executor in MiB. Without `ray_data` the session's Java actors have a Ray namespace of their own."""
    import raydp

    with _our_master(None if ray_data else name):
        spark: SparkSession = raydp.init_spark(
            name,
            executors,
            cores,
            f"{memory_mib}m",
            fault_tolerant_mode=ray_data,
            placement_group=group,
            placement_group_bundle_indexes=list(range(executors)),
            configs=configs,
        )
    _remove_unpacked(driver_gateway().proc.pid)
    return spark


def stop_session() -> None:
    """Stop this process's RayDP session, if it has one. The session's master actor ends later."""
    import raydp

    raydp.stop_spark()


@contextmanager
def _our_master(namespace: str | None) -> Iterator[None]:
    """Replace the class of RayDP's master for the duration of the `with` block, to change two points of its start.

    First, the master's Java actors are created in `namespace`, the session's own Ray namespace. Their names are fixed,
    so in this process's namespace they would collide with other programs' sessions. `namespace` None leaves them in
    this process's namespace, because `ray.data.from_spark` looks for them there. Second, the JNI library that RayDP's
    gateway unpacks into a separate directory is deleted.
    """
    from raydp.spark import ray_cluster

    actor_class = ray_cluster.RayDPSparkMaster
    base = actor_class.__ray_metadata__.modified_class.__ray_actor_class__

    def generate(self: Any) -> str:
        options = json.loads(base._generate_ray_configs(self))
        return json.dumps(options if namespace is None else {**options, "ray.job.namespace": namespace})

    def start_up(self: Any, popen_kwargs: Any = None) -> None:
        base.start_up(self, popen_kwargs)
        _remove_unpacked(self._gateway.proc.pid)

    body = {"_generate_ray_configs": generate, "start_up": start_up}
    ray_cluster.RayDPSparkMaster = ray.remote(type(base.__name__, (base,), body))
    try:
        yield
    finally:
        ray_cluster.RayDPSparkMaster = actor_class


def _remove_unpacked(pid: int) -> None:
    """Delete Ray's JNI library (40 MB) from the disk. A JVM unpacks the library when it joins Ray as a driver, and
    never deletes it. The JVM `pid` has mapped the library into memory, and so does not need the file."""
    try:
        mapped = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        # /proc/PID/maps cannot be read if the JVM has ended, or if this system is not Linux. The JVM's directory of
        # libraries is then unknown, so nothing is deleted.
        return
    for directory in set(re.findall(r"(/\S+/ray/\d{13})/libcore_worker_library_java\.so", mapped)):
        shutil.rmtree(directory, ignore_errors=True)
