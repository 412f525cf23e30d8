"""Tests of `register_raymq` without Spark 4: a missing or an old Spark is refused by one clear error."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

import raydp_jobs
from raydp_jobs.data_source import registration, versions
from raydp_jobs.data_source.versions import BATCH_SPARK, STREAM_SPARK, check_spark4
from raymq.common.errors import ClientStateError, MissingExtraError

# Ignore PySpark's deprecation warning about distutils.
pytestmark = pytest.mark.filterwarnings("ignore:distutils Version classes:DeprecationWarning")

UNUSED: Any = SimpleNamespace()


@pytest.mark.parametrize(
    ("needed", "accepted", "refused"),
    [
        (BATCH_SPARK, ["4.1.0", "4.1.4", "4.2.1", "4.10.0", "5.0.0.dev1"], ["4.0.5", "3.5.7", "3.10", "garbage"]),
        (STREAM_SPARK, ["4.2.0", "4.3.0", "4.10.0", "5.0"], ["4.1.4", "4.0.5", "3.5.7"]),
    ],
)
def test_an_old_spark_is_refused_with_the_version_to_install(
    needed: tuple[int, int], accepted: list[str], refused: list[str]
) -> None:
    for version in accepted:
        check_spark4(needed, "this test", version)
    for version in refused:
        with pytest.raises(ClientStateError, match=re.escape(f"but Spark {version} is installed")) as caught:
            check_spark4(needed, "this test", version)
        assert f"pip install 'pyspark>={needed[0]}.{needed[1]}'" in str(caught.value)


def test_the_spark_of_raydp_is_refused_before_the_session_is_used() -> None:
    with pytest.raises(ClientStateError, match=r"or use read_topic and stream_topic"):
        raydp_jobs.register_raymq(UNUSED, client=UNUSED)


def test_a_missing_pyspark_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pyspark is not installed: pip install 'pyspark>=4\.1'"):
        raydp_jobs.register_raymq(UNUSED, client=UNUSED)


def test_a_session_of_spark_connect_is_refused_before_the_cluster_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "check_spark4", lambda needed, user: None)
    with pytest.raises(ClientStateError, match=r"a session of Spark Connect: create it with .* without \.remote"):
        raydp_jobs.register_raymq(UNUSED, client=UNUSED)


def test_raydp_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(extra: str, user: str) -> None:
        raise MissingExtraError(user)

    monkeypatch.setattr(raydp_jobs, "require_extra", refuse)
    assert raydp_jobs.register_raymq is registration.register_raymq
    with pytest.raises(MissingExtraError):
        _ = raydp_jobs.read_topic
