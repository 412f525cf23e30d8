"""Tests of the IP address patterns of ACL 1.0, and of the source addresses in policies."""

from __future__ import annotations

import pytest

from raymq.common.errors import InvalidArgumentError
from raymq.remoting.access.addresses import check_pattern, check_source, pattern_matches, source_matches


@pytest.mark.parametrize(
    ("pattern", "address", "expected"),
    [
        pytest.param("", "10.0.0.1", False, id="golden-130-blank"),
        pytest.param("*", "10.0.0.1", True, id="golden-130-star"),
        pytest.param("*.*.*.*", "10.0.0.1", True, id="golden-130-stars"),
        pytest.param("10.0.0.{1,3}", "10.0.0.3", True, id="golden-131-yes"),
        pytest.param("10.0.0.{1,3}", "10.0.0.2", False, id="golden-131-no"),
        pytest.param("10.0.0.1-5", "10.0.0.5", True, id="golden-132-yes"),
        pytest.param("10.0.0.1-5", "10.0.0.6", False, id="golden-132-no"),
        pytest.param("10.0.0.1-5", "10.0.1.3", False, id="golden-132-other-net"),
        pytest.param("10.0.0.*", "10.0.0.77", True, id="golden-133"),
        pytest.param("10.0.*.*", "10.0.9.9", True, id="golden-134"),
        pytest.param("10.0.1-3.*", "10.0.2.9", True, id="golden-135-yes"),
        pytest.param("10.0.1-3.*", "10.0.4.9", False, id="golden-135-no"),
        pytest.param("10.0.1-3.*", "10.1.2.9", False, id="golden-135-other-net"),
        pytest.param("192.168.1-5.10-20", "192.168.3.15", True, id="golden-135-two-ranges"),
        pytest.param("10.0.*.1", "10.0.2.7", True, id="golden-136"),
        pytest.param("10.0.0.1,10.0.0.9", "10.0.0.9", True, id="list"),
        pytest.param("10.0.0.{1,3},10.0.1.*", "10.0.1.8", True, id="list-with-braces"),
        pytest.param("10.0.0.1", "10.0.0.10", False, id="exact"),
        pytest.param("::1", "::1", True, id="ipv6"),
        pytest.param("10.0.0.*", "", False, id="unknown"),
    ],
)
def test_a_pattern_matches(pattern, address, expected):
    assert pattern_matches(check_pattern(pattern), address) is expected


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param("10.0.*", id="golden-134-three-parts"),
        pytest.param("10.0.0.5-1", id="golden-137-backwards"),
        pytest.param("10.0.0.0/24", id="golden-137-cidr"),
        pytest.param("10.0.0.1, 10.0.0.2", id="golden-137-space"),
        pytest.param("10.0.0.{1-3}", id="golden-137-range-in-braces"),
        pytest.param("abc", id="golden-137-text"),
        pytest.param("10.0.0.256", id="too-large"),
        pytest.param("10.0.0.1-300", id="too-large-range"),
    ],
)
def test_a_pattern_is_refused(pattern):
    with pytest.raises(InvalidArgumentError, match="pattern"):
        check_pattern(pattern)


@pytest.mark.parametrize(
    ("source", "address", "expected"),
    [
        ("10.0.0.0/8", "10.9.8.7", True),
        ("10.0.0.0/8", "::ffff:10.9.8.7", True),
        ("10.0.0.0/8", "11.0.0.1", False),
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "", False),
        ("fd00::/8", "10.0.0.1", False),
    ],
)
def test_a_source_matches(source, address, expected):
    assert source_matches(check_source(source), address) is expected


@pytest.mark.parametrize("source", ["10.0.0.1/8", "host", "", "10.0.0.*"])
def test_a_source_is_refused(source):
    with pytest.raises(InvalidArgumentError, match="source"):
        check_source(source)
