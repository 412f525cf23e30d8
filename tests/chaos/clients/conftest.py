"""The official clients that the tests of one module share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.gateway.official import InstallError, or_skip
from tests.support.gateway.official_client import OfficialClient, official_client


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], OfficialClient]]:
    """Return a function that returns the client of a language. It starts the client at the first call."""
    running: dict[str, OfficialClient] = {}
    home: Path = tmp_path_factory.mktemp("official")
    with ExitStack() as stack:

        def client(language: str) -> OfficialClient:
            if language not in running:
                try:
                    running[language] = stack.enter_context(official_client(language, home / language))
                except InstallError as error:
                    or_skip(error)
            return running[language]

        yield client
