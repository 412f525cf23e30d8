"""Tests of the console's third-party files: each equals the published file, and the table of files, the folder and
NOTICE agree."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
VENDOR = ROOT / "raymq/tools/console/static/vendor"
ROW = re.compile(r"^\| `([^`]+)` \| (\S+) (\S+) \| `[^`]+` \| (\S+), `([^`]+)` \| `([0-9a-f]{64})` \|$", re.MULTILINE)


def rows() -> list[tuple[str, str, str, str, str, str]]:
    """Return each row of the table of third-party files: file, package, version, licence, licence file and
    hash."""
    return ROW.findall((VENDOR / "README.md").read_text())


def test_every_file_has_its_row_and_every_row_its_file():
    licences = {row[4] for row in rows()}
    assert len(licences) == 2
    assert {row[0] for row in rows()} | licences | {"README.md"} == {path.name for path in VENDOR.iterdir()}


def test_every_file_has_the_hash_of_its_row():
    hashes = {row[0]: hashlib.sha256((VENDOR / row[0]).read_bytes()).hexdigest() for row in rows()}
    assert {row[0]: row[5] for row in rows()} == hashes


def test_the_notice_names_every_package_its_version_and_its_licence():
    notice = (ROOT / "NOTICE").read_text().lower()
    for _, package, version, _, licence, _ in rows():
        assert f"{package.removesuffix('.org')} {version}" in notice
        assert licence.lower() in notice


def test_no_file_names_a_source_map():
    """No third-party file names a source map. Otherwise a browser's developer tools would request the map, which does
    not exist."""
    assert [row[0] for row in rows() if b"sourceMappingURL" in (VENDOR / row[0]).read_bytes()] == []
