"""Collects facts about gateways: how this machine reaches them, when certificates end, and whether a port is free.

The doctor asks each gateway for the route of a topic, as RocketMQ's clients do first. It writes this one request by
hand: the messages of the protocol belong to the gateway, which the tools do not import.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterable
from typing import Any, Final

import grpc

from raymq.common.config.gateway import GatewayOptions, parse_address
from raymq.common.config.values import is_loopback
from raymq.common.names import is_internal_topic
from raymq.common.protocol.status import ClusterStatus, GatewayReport
from raymq.tools.doctor.facts import GatewayFacts

GATEWAY_ANSWER_S: Final = 5.0
QUERY_ROUTE: Final = "/apache.rocketmq.v2.MessagingService/QueryRoute"
OK: Final = 20_000
"""RocketMQ's status code of success."""
UNAUTHORIZED: Final = 40_100
"""RocketMQ's status code for a caller without a user. A gateway with access control answers the doctor so."""
_METADATA: Final = (("x-mq-client-id", "raymq-doctor"),)
_EVERY_ADDRESS: Final = ("0.0.0.0", "::")


def collect_gateways(status: ClusterStatus, here: str) -> tuple[GatewayFacts, ...]:
    """Ask each gateway that serves for the route of a topic. `here`: the address of this process's node. A gateway that
    only programs of another node can reach is not asked."""
    topics = sorted(topic for broker in status.brokers for topic in broker.topics if not is_internal_topic(topic))
    topic = topics[0] if topics else ""
    return tuple(_asked(one, topic, here) for one in status.gateways if not one.error)


def gateway_port_error(options: GatewayOptions, gateways: Iterable[GatewayReport] = ()) -> str:
    """Return the reason why a gateway could not listen on this machine; empty if it could, or if it need not: gateways
    run already, or `raymq up` starts none."""
    if not options.enable or any(gateways):
        return ""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    for port in (options.port, options.http_port):
        try:
            with socket.create_server((options.host, port), family=family):
                continue
        except OSError as error:
            return f"{options.host}:{port}: {os.strerror(error.errno) if error.errno else error}"
    return ""


def _asked(report: GatewayReport, topic: str, here: str) -> GatewayFacts:
    host, port = parse_address(report.listens)
    if is_loopback(host) and report.node != here:
        return GatewayFacts(report.actor, report.listens, asked=False, webhook_error=report.webhook_error)
    place = (report.node if host in _EVERY_ADDRESS else host, port)
    certificate: dict[str, Any] = {}
    try:
        chain = _chain(place) if report.tls else ""
        certificate = _certificate(place, chain) if chain else {}
        code = _route_code(place, topic, chain, certificate) if topic else OK
        error = "" if code in (OK, UNAUTHORIZED) else f"the route of topic {topic} has the status {code}"
    except grpc.RpcError as failure:
        error = f"no route within {GATEWAY_ANSWER_S:g} s: {failure.code().name}"
    except OSError as failure:
        error = f"no connection: {failure.strerror or failure}"
    ends_s = ssl.cert_time_to_seconds(certificate["notAfter"]) if certificate else None
    address = f"{place[0]}:{port}"
    return GatewayFacts(
        report.actor, address, error=error, certificate_ends_s=ends_s, webhook_error=report.webhook_error
    )


def _chain(place: tuple[str, int]) -> str:
    """Return the certificate with which a server answers, in PEM."""
    return ssl.get_server_certificate(place, timeout=GATEWAY_ANSWER_S)


def _certificate(place: tuple[str, int], pem: str) -> dict[str, Any]:
    """Return the fields of the certificate of a server. Python shows them only of a certificate that it trusts, so this
    function trusts `pem`. Raises OSError for a certificate that has expired."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=pem)
    with (
        socket.create_connection(place, GATEWAY_ANSWER_S) as plain,
        context.wrap_socket(plain) as encrypted,
    ):
        return dict(encrypted.getpeercert() or {})


def _route_code(place: tuple[str, int], topic: str, chain: str, certificate: dict[str, Any]) -> int:
    target = f"[{place[0]}]:{place[1]}" if ":" in place[0] else f"{place[0]}:{place[1]}"
    if chain:
        # the doctor trusts the gateway that it reaches, whatever the name in the certificate
        options = [("grpc.ssl_target_name_override", _name(certificate))]
        channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(chain.encode()), options)
    else:
        channel = grpc.insecure_channel(target)
    with channel:
        answer: bytes = channel.unary_unary(QUERY_ROUTE)(
            route_request(topic), metadata=_METADATA, timeout=GATEWAY_ANSWER_S
        )
    return status_code(answer)


def _name(certificate: dict[str, Any]) -> str:
    """Return a name that a certificate is for."""
    names = [value for kind, value in certificate.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]
    common = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return str([*names, *common, "localhost"][0]).replace("*", "raymq")


def route_request(topic: str) -> bytes:
    """Return the bytes of a QueryRouteRequest: its field 1, the topic, is a Resource with the name as field 2."""
    resource = _field(2, topic.encode())
    return _field(1, resource)


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes((low | 0x80,)) + _varint(rest) if rest else bytes((low,))


def status_code(answer: bytes) -> int:
    """Return the code in an answer, whose field 1 is a Status with the code as field 1; 0 if the answer has no code."""
    if answer[:1] != b"\x0a" or answer[2:3] != b"\x08":
        return 0
    code = 0
    for index, byte in enumerate(answer[3:8]):
        code |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            break
    return code
