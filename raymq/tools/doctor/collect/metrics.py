"""Looks at what Prometheus would see: the nodes' metrics ports, and the rules of a Prometheus that is named."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from raymq.tools.doctor.facts import MetricsPort, PrometheusFacts

HTTP_TIMEOUT_S: Final = 5.0
METRICS_MAX_BYTES: Final = 64 << 20
PORTS_AT_ONCE: Final = 8
_UP: Final = re.compile(r'^ray_raymq_up\{[^}]*\bname="([^"]+)"', re.MULTILINE)


def look_at_ports(nodes: Iterable[Mapping[str, Any]]) -> list[MetricsPort]:
    """The metrics ports of Ray's nodes, as `ray.nodes()` names them."""
    wanted = [(node["NodeManagerAddress"], int(node["MetricsExportPort"])) for node in nodes if node["Alive"]]
    with ThreadPoolExecutor(PORTS_AT_ONCE) as pool:
        return list(pool.map(lambda place: look_at_port(*place), wanted))


def look_at_port(ip: str, port: int) -> MetricsPort:
    """A node's metrics, as its agent has them now."""
    try:
        text = _read(f"http://{ip}:{port}/metrics").decode(errors="replace")
    except (OSError, ValueError) as error:
        return MetricsPort(ip, port, str(error))
    return MetricsPort(ip, port, servers=servers_that_are_up(text))


def servers_that_are_up(text: str) -> frozenset[str]:
    """The servers with a `raymq_up` in a text of Prometheus's format."""
    return frozenset(_UP.findall(text))


def look_at_prometheus(url: str) -> PrometheusFacts:
    """The alert rules that a Prometheus has loaded."""
    try:
        answer = json.loads(_read(f"{url.rstrip('/')}/api/v1/rules"))
        groups = answer["data"]["groups"]
        return PrometheusFacts(url, rules=frozenset(rule["name"] for group in groups for rule in group["rules"]))
    except HTTPError as error:
        return PrometheusFacts(url, f"the request for its rules failed: {error}")
    except URLError as error:
        return PrometheusFacts(url, f"it does not answer: {getattr(error.reason, 'strerror', None) or error.reason}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return PrometheusFacts(url, str(error))


def _read(url: str) -> bytes:
    if not url.startswith(("http://", "https://")):
        raise ValueError("its URL does not begin with http:// or https://")
    with urlopen(url, timeout=HTTP_TIMEOUT_S) as answer:
        body: bytes = answer.read(METRICS_MAX_BYTES)
        return body
