"""The versions of Spark that ``format("raymq")`` needs, and a check of the installed version. The module does not need
Spark."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Final

from raymq.common.errors import ClientStateError, MissingExtraError

BATCH_SPARK: Final = (4, 1)
"""The first version of Spark with filter push-down for data sources in Python."""
STREAM_SPARK: Final = (4, 2)
"""The first version of Spark in which a stream in Python gets the start and the limit of a batch. Without them, options
such as max_offsets_per_trigger would have no effect."""


def check_spark4(needed: tuple[int, int], user: str, installed: str | None = None) -> None:
    """Check that the installed Spark is not older than `needed`. `user`: the subject of the error. `installed`: the
    version; by default the version of pyspark.

    Raises MissingExtraError if pyspark is not installed, and ClientStateError if it is too old.
    """
    wanted = ".".join(map(str, needed))
    install = f"pip install 'pyspark>={wanted}'"
    if installed is None:
        if find_spec("pyspark") is None:
            raise MissingExtraError(f"{user} needs Spark {wanted} or newer, but pyspark is not installed: {install}")
        import pyspark

        installed = pyspark.__version__
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < needed:
        remedy = f"{install} (in an environment without RayDP 1.6)"
        if not installed.startswith("4."):
            remedy += ", or use read_topic and stream_topic, which run on Spark 3.5"
        raise ClientStateError(f"{user} needs Spark {wanted} or newer, but Spark {installed} is installed: {remedy}")
