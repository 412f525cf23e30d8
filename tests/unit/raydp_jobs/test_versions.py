"""Tests that the private parts of RayDP and Spark have one module each, and that other versions are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

import raydp_jobs
from raydp_jobs import raydp_internals, session, spark_internals
from raydp_jobs.raydp_internals import check_raydp
from raydp_jobs.spark_internals import check_spark
from raydp_jobs.stream import spark_source
from raymq.common.errors import ClientStateError

# Ignore PySpark's deprecation warning about distutils.
pytestmark = pytest.mark.filterwarnings("ignore:distutils Version classes:DeprecationWarning")

ROOT = Path(raydp_jobs.__file__).parent


@pytest.mark.parametrize("check", [check_raydp, check_spark])
def test_the_installed_versions_are_accepted(check: Callable[..., None]) -> None:
    check()


@pytest.mark.parametrize("version", ["3.5.7", "3.5.0", "4.2.1", "4.2.0"])
def test_checked_versions_of_spark_are_accepted(version: str) -> None:
    check_spark(version)


@pytest.mark.parametrize("version", ["3.4.4", "4.0.1", "4.1.0", "4.20.0", "4.3.0", "35.7", "5"])
def test_another_spark_is_refused_with_the_versions_to_install(version: str) -> None:
    with pytest.raises(ClientStateError) as caught:
        check_spark(version)
    assert str(caught.value) == (
        f"Spark {version} is installed, and this raymq was checked with Spark 3.5.7 and 4.2.1, whose private parts it "
        "uses: pip install 'pyspark==3.5.7' or 'pyspark==4.2.1'"
    )


@pytest.mark.parametrize(
    ("raydp", "spark"),
    [("1.6.5", "3.5.7"), ("1.6.6.dev1", "3.5.0"), ("1.7.0b20260911.dev0", "4.2.1"), ("1.7.1", "4.2")],
)
def test_checked_versions_of_raydp_are_accepted_beside_their_spark(raydp: str, spark: str) -> None:
    check_raydp(raydp, spark)


@pytest.mark.parametrize(
    ("raydp", "spark", "remedy"),
    [
        ("1.6.5", "4.2.1", "pip install 'raydp==1.6.5' 'pyspark==3.5.*'"),
        ("1.7.0b20260911.dev0", "3.5.7", "pip install 'raydp==1.7.0b20260911.dev0' 'pyspark==4.2.*'"),
        ("1.7.0b20260911.dev0", "4.1.0", "pip install 'raydp==1.7.0b20260911.dev0' 'pyspark==4.2.*'"),
        *(
            (
                raydp,
                "3.5.7",
                "pip install 'raydp==1.6.5' 'pyspark==3.5.*' or 'raydp==1.7.0b20260911.dev0' 'pyspark==4.2.*'",
            )
            for raydp in ("1.5.0", "1.8.0", "2.0", "16.5")
        ),
    ],
)
def test_another_raydp_is_refused_with_the_versions_to_install(raydp: str, spark: str, remedy: str) -> None:
    with pytest.raises(ClientStateError) as caught:
        check_raydp(raydp, spark)
    assert str(caught.value) == (
        f"RayDP {raydp} is installed with Spark {spark}, and this raymq was checked with RayDP 1.6.5 on Spark 3.5 and "
        f"RayDP 1.7.0b20260911.dev0 on Spark 4.2, whose private parts it uses: {remedy}"
    )


def test_a_session_checks_raydp_before_it_starts_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raydp_internals, "version", {"raydp": "1.8.0", "pyspark": "3.5.7"}.get)
    monkeypatch.setattr(ray, "is_initialized", lambda: pytest.fail("the session looks at Ray first"))
    with pytest.raises(ClientStateError, match=r"RayDP 1\.8\.0 is installed"):
        session._check_process(ray_data=False)


def test_a_stream_checks_spark_before_it_uses_the_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_internals.pyspark, "__version__", "4.0.1")
    with pytest.raises(ClientStateError, match=r"Spark 4\.0\.1 is installed"):
        spark_source.stream_frame(None, None, None, None, "orders")  # type: ignore[arg-type]  # nothing is used


RAYDP_PRIVATE = r"^\s*(?:import raydp\b(?!_)|from raydp[ .])|RayDPSparkMaster|_global_spark_context"
SPARK_PRIVATE = (
    r"^\s*(?:import|from) py4j|\._(?:jvm|jdf|jc|jsc|jconf|jspark\w*|jwrite|jreader|sc)\b|(?<!self)\._gateway\b"
    r"|_active_spark_context|_instantiatedSession|SparkContext\._|SparkSession\._|pyspark\.(?:java_gateway|rdd|util|worker|serializers|core)"
    r"|pyspark\.sql\.(?:pandas|classic|utils)|errors\.exceptions|execution\.streaming|connector\.read\.streaming"
    r"|internalCreateDataFrame|resolvedCheckpointRoot|org\.apache\.spark"
)
"""What PySpark's documentation does not have: Py4J, objects of the JVM, Java classes, and underscored names."""


@pytest.mark.parametrize(
    ("module", "private"), [("raydp_internals.py", RAYDP_PRIVATE), ("spark_internals.py", SPARK_PRIVATE)]
)
def test_private_parts_are_used_in_one_module(module: str, private: str) -> None:
    files = [*ROOT.rglob("*.py"), *(ROOT.parent / "raymq").rglob("*.py"), *(ROOT.parent / "examples").rglob("*.py")]
    users = {
        str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
        for path in files
        if re.search(private, path.read_text(), re.MULTILINE)
    }
    assert users == {module}
