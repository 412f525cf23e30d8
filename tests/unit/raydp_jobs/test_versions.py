"""Tests that the private parts of RayDP and Spark have one module each, and that other versions are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

import raydp_jobs
from raydp_jobs import raydp_internals, session
from raydp_jobs.raydp_internals import check_raydp
from raydp_jobs.stream import spark_internals, spark_source
from raydp_jobs.stream.spark_internals import check_spark
from raymq.common.errors import ClientStateError

# Ignore PySpark's deprecation warning about distutils.
pytestmark = pytest.mark.filterwarnings("ignore:distutils Version classes:DeprecationWarning")

ROOT = Path(raydp_jobs.__file__).parent


@pytest.mark.parametrize("check", [check_raydp, check_spark])
def test_the_installed_versions_are_accepted(check: Callable[..., None]) -> None:
    check()


@pytest.mark.parametrize(
    ("check", "accepted", "refused", "pinned"),
    [
        (check_raydp, ["1.6.5", "1.6.6.dev1"], ["1.5.0", "1.7.0b2", "2.0", "16.5"], "raydp==1.6.5"),
        (check_spark, ["3.5.7", "3.5.0"], ["3.4.4", "4.0.1", "35.7"], "pyspark==3.5.7"),
    ],
)
def test_another_version_is_refused_with_the_version_to_install(
    check: Callable[[str], None], accepted: list[str], refused: list[str], pinned: str
) -> None:
    for version in accepted:
        check(version)
    for version in refused:
        with pytest.raises(ClientStateError, match=re.escape(version)) as caught:
            check(version)
        assert pinned in str(caught.value)


def test_a_session_checks_raydp_before_it_starts_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raydp_internals, "version", lambda package: "1.7.0")
    monkeypatch.setattr(ray, "is_initialized", lambda: pytest.fail("the session looks at Ray first"))
    with pytest.raises(ClientStateError, match=r"RayDP 1\.7\.0 is installed"):
        session._check_process(ray_data=False)


def test_a_stream_checks_spark_before_it_uses_the_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_internals.pyspark, "__version__", "4.0.1")
    with pytest.raises(ClientStateError, match=r"Spark 4\.0\.1 is installed"):
        spark_source.stream_frame(None, None, None, None, "orders")  # type: ignore[arg-type]  # nothing is used


@pytest.mark.parametrize(
    ("module", "private"),
    [
        ("raydp_internals.py", r"^\s*(?:import raydp\b(?!_)|from raydp[ .])|RayDPSparkMaster|_global_spark_context"),
        (
            "stream/spark_internals.py",
            r"execution\.streaming|connector\.read\.streaming|internalCreateDataFrame|resolvedCheckpointRoot",
        ),
    ],
)
def test_private_parts_are_used_in_one_module(module: str, private: str) -> None:
    users = {
        str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if re.search(private, path.read_text(), re.MULTILINE)
    }
    assert users == {module}
