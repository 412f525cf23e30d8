"""Tests of the section `gateway` of raymq.yaml."""

from __future__ import annotations

from typing import Any

import pytest

from raymq.common.config.cluster import ClusterSettings, load_settings
from raymq.common.config.gateway import GatewayOptions, parse_address
from raymq.common.errors import ConfigError

TLS = {"tls_cert": "/etc/mq/chain.pem", "tls_key": "/etc/mq/key.pem"}


def test_by_default_the_gateway_is_off_and_only_its_own_machine_can_connect() -> None:
    options = ClusterSettings().gateway
    assert (options.enable, options.nodes, options.host, options.port) == (False, "head", "127.0.0.1", 8081)
    assert (options.advertised, options.http_port) == (None, 0)


@pytest.mark.parametrize(
    "values",
    [
        {"host": "0.0.0.0", **TLS},
        {"host": "0.0.0.0", "insecure": True},
        {"host": "::1"},
        {"host": "localhost"},
        {"host": "127.8.0.1"},
        {"tls_cert": "~/chain.pem", "tls_key": "~/key.pem"},
        {"http_port": 8082, "webhook_hosts": ["hooks.example.org", "10.0.0.0/8"], "webhook_secret": "/etc/mq/hook"},
    ],
)
def test_safe_settings_are_accepted(values: dict[str, Any]) -> None:
    assert load_settings(None, gateway=values).gateway == GatewayOptions(**values)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"host": "0.0.0.0"}, "everybody could read their messages"),
        ({"host": "mq.example.org"}, "insecure"),
        ({"tls_cert": "/etc/mq/chain.pem"}, "set together"),
        ({"tls_cert": "chain.pem", "tls_key": "key.pem"}, "absolute path"),
        ({"port": 0}, "greater than or equal to 1"),
        ({"port": 65_536}, "less than or equal to 65535"),
        ({"http_port": -1}, "greater than or equal to 0"),
        ({"http_port": 65_536}, "less than or equal to 65535"),
        ({"http_port": 8081}, "both 8081"),
        ({"processes": 65}, "less than or equal to 64"),
        ({"processes": True}, "must be a number"),
        ({"nodes": "workers"}, "'head' or 'all'"),
        ({"advertise": "mq.example.org"}, "HOST:PORT"),
        ({"webhook_hosts": ["hooks.example.org"]}, "webhook_hosts needs http_port"),
        ({"http_port": 8082, "webhook_hosts": ["https://hooks.example.org"]}, "is no host"),
        ({"http_port": 8082, "webhook_hosts": ["10.0.0.7/8"]}, "is no host"),
        ({"http_port": 8082, "webhook_hosts": ["a"] * 1001}, "at most 1000"),
        ({"http_port": 8082, "webhook_secret": "/etc/mq/hook"}, "no effect without webhook_hosts"),
        ({"http_port": 8082, "webhook_hosts": ["a.org"], "webhook_secret": "hook"}, "absolute path"),
        ({"advertise": "mq.example.org:0"}, "HOST:PORT"),
        ({"advertise": "https://mq.example.org:443"}, "HOST:PORT"),
        ({"advertise": "2001:db8::7:8081"}, "HOST:PORT"),
    ],
)
def test_wrong_settings_are_refused(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        load_settings(None, gateway=values)
    assert "gateway" in str(caught.value)


def test_an_advertised_address_has_a_host_and_a_port() -> None:
    assert GatewayOptions(advertise="mq.example.org:443").advertised == ("mq.example.org", 443)
    assert parse_address("[2001:db8::7]:8081") == ("2001:db8::7", 8081)
