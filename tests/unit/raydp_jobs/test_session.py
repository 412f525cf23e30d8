"""The Spark configuration of a session. Nothing is started here."""

from __future__ import annotations

import pytest

from raydp_jobs.session import spark_configs, spark_session
from raymq.errors import ClientStateError, InvalidArgumentError


def test_java_options_of_the_user_are_added_to_those_that_java_17_needs() -> None:
    configs = spark_configs({"spark.executor.extraJavaOptions": "-Dmine=1"})
    assert configs["spark.executor.extraJavaOptions"].endswith(" -Dmine=1")
    for role in ("spark.driver", "spark.executor", "spark.ray.raydp_app_master"):
        assert "--add-opens=java.base/java.math=ALL-UNNAMED" in configs[f"{role}.extraJavaOptions"]


def test_other_settings_of_the_user_win_and_the_mapping_given_is_left_alone() -> None:
    given = {"spark.ui.enabled": "true", "spark.sql.shuffle.partitions": "4"}
    configs = spark_configs(given)
    assert configs.items() >= given.items()
    assert given == {"spark.ui.enabled": "true", "spark.sql.shuffle.partitions": "4"}


@pytest.mark.parametrize("sizes", [{"executors": 0}, {"executor_cores": 0}])
def test_an_empty_session_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(InvalidArgumentError), spark_session("nothing", **sizes):  # type: ignore[arg-type]
        pytest.fail("unreachable")


def test_a_session_without_a_connection_to_ray_is_refused_before_raydp_starts_a_ray_of_its_own() -> None:
    with pytest.raises(ClientStateError, match=r"raymq\.connect"), spark_session("nothing"):
        pytest.fail("unreachable")
