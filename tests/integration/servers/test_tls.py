"""Test of a whole cluster with Ray's TLS and with the certificates of docs/security.md.

The test runs in a separate process, because Ray reads its TLS setting only when it is imported.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.clusters.cluster import sandbox
from tests.support.clusters.page_example import DOCS

PAGE = (DOCS / "security.md").read_text()
LONGEST_S = 300

PROGRAM = """
import os

import raymq
from raymq.remoting.actor_ref import ActorRef
from raymq.remoting.lane.client import Lane

with raymq.connect(embedded=True) as client:
    client.admin.create_topic("orders")
    with client.producer("shop") as producer:
        print(producer.send(raymq.Message("orders", b"tea")).status.name)
    for server in ("storage-broker-a-0", "broker-a"):
        address = ActorRef(server).call("describe", timeout_s=60.0).lane
        Lane(address, remote=True, timeout_s=60.0).close()
        os.environ["RAY_USE_TLS"] = "0"
        try:
            Lane(address, remote=True, timeout_s=60.0)
        except ConnectionRefusedError as error:
            print(server, address.tls, str(error).partition(": ")[2])
        os.environ["RAY_USE_TLS"] = "1"
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command makes the certificates")
def test_a_cluster_with_the_certificates_of_the_page() -> None:
    [block] = re.findall(r"^    mkdir -p -m 700 .*?^    cp ca\.pem[^\n]*\n", PAGE, re.M | re.S)
    variables = re.findall(r"^    export (RAY_\w+)=(\S+)$", PAGE, re.M)
    with sandbox("broker_groups: 1\n") as box:
        make = re.sub(r"^    ", "", block, flags=re.M)
        subprocess.run(["bash", "-ec", make], check=True, capture_output=True, timeout=LONGEST_S)
        files = Path(box.home, ".raymq/tls")
        assert {path.name: path.stat().st_mode & 0o777 for path in files.iterdir()} == dict.fromkeys(
            ("ca.pem", "node.key", "node.pem"), 0o600
        )
        environment = {name: value.replace("~", str(box.home)) for name, value in variables}
        assert len(environment) == 4
        told = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            check=False,
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            env={**os.environ, "PYTHONPATH": str(DOCS.parent), **environment},
        )
    assert told.stdout.splitlines() == [
        "SEND_OK",
        "storage-broker-a-0 True the server uses TLS, but RAY_USE_TLS is off in this process",
        "broker-a True the server uses TLS, but RAY_USE_TLS is off in this process",
    ], told.stderr[-2000:]
