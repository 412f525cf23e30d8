"""Client addresses: the address patterns of ACL 1.0, and the address sources of policy entries.

A pattern (spec/features.md §7.2) is a list of single patterns, separated by commas without spaces. A single pattern is
``*`` for every address, one exact address, ``a.b.c.{1,2}``, or an IPv4 address with wildcards. Its fourth part, or its
third and fourth parts, may be ``*`` or ``low-high``. A policy's source is an exact address or a CIDR (spec/features.md
§8). Two rules of RocketMQ are kept, because existing files rely on them. After a range or ``*`` in the third part, the
fourth part is ignored. A blank pattern matches no address.
"""

from __future__ import annotations

import re
from ipaddress import ip_address, ip_network
from typing import Final

from raymq.common.errors import InvalidArgumentError

_EVERYBODY: Final = frozenset(("*", "*.*.*.*", "*:*:*:*:*:*:*:*"))
_PART: Final = r"\d{1,3}"
_CHOICE: Final = re.compile(rf"({_PART}\.{_PART}\.{_PART}\.)\{{({_PART}(?:,{_PART})*)\}}")
_RANGES: Final = re.compile(rf"({_PART}\.{_PART})\.({_PART}|\*|{_PART}-{_PART})\.({_PART}|\*|{_PART}-{_PART})")
_LIST_MAX: Final = 1000


def check_pattern(pattern: str) -> str:
    """Return `pattern` if it is a valid address pattern of ACL 1.0. Raises InvalidArgumentError, with the reason, if
    not."""
    for one in _split(pattern):
        _check_one(one)
    return pattern


def pattern_matches(pattern: str, address: str) -> bool:
    """True if `address` matches the address pattern `pattern`, which `check_pattern` has accepted.

    An unknown address ("") matches no pattern except ``*``.
    """
    return any(_matches_one(one, address) for one in _split(pattern))


def check_source(source: str) -> str:
    """Return `source`, an IP address or a CIDR, in canonical spelling. Raises InvalidArgumentError if it is neither an
    IP address nor a CIDR."""
    try:
        return str(ip_network(source)) if "/" in source else str(ip_address(source))
    except ValueError as error:
        raise InvalidArgumentError(
            f"a source must be an address or a CIDR such as 10.0.0.0/8, not {source!r}: {error}"
        ) from None


def source_matches(source: str, address: str) -> bool:
    """True if `address` equals the address `source`, or lies in the address range `source` (in CIDR notation). False if
    `address` is unknown or not an IP address."""
    try:
        at = ip_address(address)
    except ValueError:
        return False
    mapped = getattr(at, "ipv4_mapped", None)  # An IPv6 socket reports IPv4 peers as mapped addresses; compare as IPv4.
    return (mapped or at) in ip_network(source)


def _split(pattern: str) -> list[str]:
    """Split a list of address patterns into single patterns. A comma within braces does not separate two
    patterns."""
    if not pattern.strip():
        return []
    parts = re.split(r",(?![^{]*\})", pattern)
    if len(parts) > _LIST_MAX:
        raise InvalidArgumentError(f"the list has {len(parts)} addresses; at most {_LIST_MAX} are allowed")
    return parts


def _check_one(one: str) -> None:
    if one in _EVERYBODY:
        return
    if (choice := _CHOICE.fullmatch(one)) is not None:
        numbers = re.findall(r"\d+", one)
        _check_numbers(one, numbers)
        assert choice[2]
        return
    if (ranges := _RANGES.fullmatch(one)) is not None and not re.fullmatch(r"[\d.]+", one):
        _check_numbers(one, re.findall(r"\d+", one))
        for part in ranges[2], ranges[3]:
            low, dash, high = part.partition("-")
            if dash and int(low) > int(high):
                raise InvalidArgumentError(f"the address pattern {one!r} has a range whose end is below its start")
        return
    try:
        ip_address(one)
    except ValueError:
        raise InvalidArgumentError(
            f"{one!r} is not an address pattern: write *, an exact address, 10.0.0.{{1,3}}, 10.0.0.*, 10.0.0.1-9 "
            "or 10.0.1-3.*; separate several patterns by commas without spaces"
        ) from None


def _check_numbers(one: str, numbers: list[str]) -> None:
    if any(int(number) > 255 for number in numbers):
        raise InvalidArgumentError(f"the address pattern {one!r} has a part above 255")


def _matches_one(one: str, address: str) -> bool:
    if one in _EVERYBODY:
        return True
    if (choice := _CHOICE.fullmatch(one)) is not None:
        return address.startswith(choice[1]) and address[len(choice[1]) :] in choice[2].split(",")
    ranges = _RANGES.fullmatch(one)
    if ranges is None or re.fullmatch(r"[\d.]+", one):
        return address == one
    parts = address.split(".")
    if len(parts) != 4 or not all(part.isdecimal() for part in parts) or ".".join(parts[:2]) != ranges[1]:
        return False
    if not _part_matches(ranges[2], parts[2]):
        return False
    # As in RocketMQ: if the third part of an address pattern is a range or a star, the fourth part is ignored (golden
    # fact 136 of spec/features.md).
    return not ranges[2].isdecimal() or _part_matches(ranges[3], parts[3])


def _part_matches(pattern: str, part: str) -> bool:
    if pattern == "*":
        return True
    low, _, high = pattern.partition("-")
    return int(low) <= int(part) <= int(high or low)
