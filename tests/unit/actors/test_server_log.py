"""Tests of the lines in the logs of raymq's servers."""

from __future__ import annotations

import io
import logging
import re

from actors.actor_class import actor_class
from actors.server_log import ServerFormatter, configure

LINE = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d %s %s %s: %s\n"


def test_each_line_has_its_time_level_actor_and_logger() -> None:
    root = logging.Logger("root")
    configure("Storage", root)
    [handler] = root.handlers
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(io.StringIO())
    root.error("the disk of %s failed", "/data")
    try:
        raise OSError("no disk")
    except OSError:
        root.warning("100%% of it", exc_info=True)
    lines = handler.stream.getvalue().splitlines(keepends=True)
    assert re.fullmatch(LINE % ("ERROR", "Storage", "root", "the disk of /data failed"), lines[0])
    assert re.fullmatch(LINE % ("WARNING", "Storage", "root", "100%% of it"), lines[1])
    assert lines[-1] == "OSError: no disk\n"


def test_a_name_with_percent_signs_is_a_name() -> None:
    record = logging.LogRecord("raymq", logging.INFO, "", 1, "text", (), None)
    assert " INFO pull-%s raymq: text" in ServerFormatter("pull-%s").format(record)


def test_a_process_with_handlers_of_its_own_keeps_them() -> None:
    root = logging.Logger("root")
    own = logging.NullHandler()
    root.addHandler(own)
    configure("Storage", root)
    assert root.handlers == [own]


def test_the_stand_in_of_every_server_configures_its_process(monkeypatch) -> None:
    named: list[str] = []
    monkeypatch.setattr("actors.server_log.configure", named.append)
    actor_class(Quiet)()
    assert named == ["Quiet"]


class Quiet:
    """A server class without any methods of its own."""
