"""Tests of the hosts that web hooks may call."""

from __future__ import annotations

import pytest

from raymq.common.config.webhook_hosts import URL_CHARACTERS_MAX, WebhookHosts
from raymq.common.errors import InvalidArgumentError, NoPermissionError

HOSTS = WebhookHosts.parse(
    ["hooks.example.org", "*.example.com", "http://jobs", "10.0.0.0/8", "http://127.0.0.1", "[2001:db8::7]"]
)


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.example.org",
        "https://HOOKS.example.org:8443/a/b?token=x%20y",
        "https://a.b.example.com/",
        "http://jobs:8080/",
        "https://jobs/",
        "https://10.1.2.3/",
        "http://127.0.0.1:9/",
        "https://[2001:db8::7]:443/a",
    ],
)
def test_named_hosts_may_be_called(url: str) -> None:
    HOSTS.check(url)


@pytest.mark.parametrize(
    "url",
    [
        "https://example.org/",
        "https://hooks.example.org.evil.org/",
        "https://example.com/",
        "https://xexample.com/",
        "https://127.0.0.2/",
        "https://169.254.169.254/latest",
        "https://[::1]/",
        "https://0x7f/",
        "http://hooks.example.org/",
        "http://10.1.2.3/",
    ],
)
def test_other_hosts_are_refused_and_the_error_names_the_setting(url: str) -> None:
    with pytest.raises(NoPermissionError, match=r"gateway\.webhook_hosts"):
        HOSTS.check(url)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "hooks.example.org",
        "//hooks.example.org/",
        "ftp://hooks.example.org/",
        "https://user@hooks.example.org/",
        "https://hooks.example.org@evil.org/",
        "https://hooks.example.org\\@evil.org/",
        "https://hooks.example.org/#a",
        "https://hooks.example.org/a b",
        "https://hooks.example.org/\r\nhost: evil",
        "https://hooks.example.org/ü",
        "https://hooks.example.org:0/",
        "https://hooks.example.org:65536/",
        "https://hooks..example.org/",
        "https://127.1/",
        "https://0x7f.1/",
        "https://2130706433/",
        "https://[fe80::1%25eth0]/",
        "https://[127.0.0.1]x/",
        "https://hooks.example.org/" + "a" * URL_CHARACTERS_MAX,
    ],
)
def test_what_is_no_url_of_a_web_hook_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="must be a URL"):
        HOSTS.check(url)


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "2606:2800:220:1::1", "10.255.0.1", "127.0.0.1", "::ffff:10.0.0.1"]
)
def test_public_and_named_addresses_may_be_reached(address: str) -> None:
    assert HOSTS.allows_address(address)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.2", "169.254.169.254", "192.168.0.1", "172.16.0.1", "100.64.0.1", "0.0.0.0", "224.0.0.1"),
        *("::1", "fe80::1", "fd00::1", "::", "ff0e::1", "::ffff:127.0.0.2", "::ffff:169.254.169.254"),
        *("64:ff9b::7f00:2", "2002:7f00:2::1", "255.255.255.255", "not an address", ""),
    ],
)
def test_special_addresses_must_be_named_as_addresses(address: str) -> None:
    assert not HOSTS.allows_address(address)


@pytest.mark.parametrize(
    "entry", ["", "https://a.org", "a.org/path", "a.org:443", "*", "*.", "a b", "127.1", "10.0.0.7/8"]
)
def test_an_entry_that_is_no_host_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="is no host"):
        WebhookHosts.parse([entry])


def test_without_entries_nothing_may_be_called() -> None:
    with pytest.raises(NoPermissionError):
        WebhookHosts().check("https://hooks.example.org/")
