"""Tests of TLS certificates of lanes (direct socket connections): certificates that are replaced under load, and wrong
certificates. The tests use real sockets and a real store, but no Ray."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest

from raymq.common.errors import ServiceNotAvailableError
from raymq.remoting import lane_pool, storage_client
from raymq.remoting.lane import address as lane_address
from raymq.remoting.lane.address import RateLimitedLog, TlsContext, TlsFiles, client_tls
from raymq.remoting.lane.client import Lane
from raymq.remoting.lane.handshake import TlsRefusedError
from raymq.remoting.storage_client import StorageClient
from tests.support.clients.fakes import WAIT_S, FakeActor, description
from tests.support.clients.lanes import ECHO, StorageDouble, echo_server, make_certificates
from tests.support.history.waiting import eventually
from tests.support.stores.stores import bodies_of, make_batch, open_store

SENDERS = 3


@pytest.fixture(autouse=True)
def openssl(monkeypatch):
    """Skip the test if openssl is not installed. Clear the TLS context cache, and the rate limit of log lines about
    refused certificates."""
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command that makes the certificates is not installed")
    client_tls.cache_clear()
    monkeypatch.setattr(lane_address.rate_limited_log, "_told_s", {})


@pytest.fixture
def certificates(tmp_path):
    """Return a function that creates a certificate authority, and a certificate that the authority has signed, in a new
    folder."""
    numbers = count()

    def make() -> TlsFiles:
        folder = tmp_path / f"authority-{next(numbers)}"
        folder.mkdir()
        return make_certificates(folder)

    return make


@pytest.fixture
def use(monkeypatch):
    """Return a function that sets the certificate files of this process's clients."""

    def use(files: TlsFiles) -> None:
        monkeypatch.setenv("RAY_USE_TLS", "1")
        monkeypatch.setenv("RAY_TLS_SERVER_CERT", files.certificate)
        monkeypatch.setenv("RAY_TLS_SERVER_KEY", files.key)
        monkeypatch.setenv("RAY_TLS_CA_CERT", files.authority)

    return use


def copy_to(folder: Path, files: TlsFiles) -> TlsFiles:
    folder.mkdir()
    return TlsFiles(*(shutil.copy(path, folder) for path in (files.certificate, files.key, files.authority)))


def exchange(path: str, text: str) -> None:
    """Replace a file atomically, as certificate managers do."""
    Path(f"{path}.new").write_text(text)
    os.replace(f"{path}.new", path)


def echoed(server, **options) -> bytes:
    with closing(Lane(server.address, remote=True, timeout_s=WAIT_S, **options)) as lane:
        return bytes(lane.call(ECHO, (b"hello",), WAIT_S).payload)


def test_certificates_are_exchanged_under_load_and_no_send_fails(monkeypatch, tmp_path, certificates, use):
    first, second = certificates(), certificates()
    live = copy_to(tmp_path / "live", first)
    use(live)
    actor = StorageDouble(open_store(tmp_path / "store"), host="127.0.0.1", tls=live)
    fake = FakeActor({"describe": lambda: description(actor.lanes.address, node_id="elsewhere", root="/not-here")})
    monkeypatch.setattr(storage_client, "ActorRef", lambda name: fake)
    sent: list[list[bytes]] = [[] for _ in range(SENDERS)]
    errors: list[BaseException] = []
    stopping = threading.Event()

    def send(mine: list[bytes], queue_id: int) -> None:
        while not stopping.is_set() and not errors:
            # Create a new client for each batch, so that each batch opens a connection and makes a TLS handshake.
            client = StorageClient("storage-a-0", "here")
            body = b"%d" % len(mine)
            try:
                client.append([make_batch([body], queue_id=queue_id)], WAIT_S)
                mine.append(body)
            except Exception as error:
                errors.append(error)
            finally:
                client.close()

    def goes_on(what: str) -> None:
        before = [len(mine) for mine in sent]
        eventually(
            lambda: errors or all(len(mine) > had + 2 for mine, had in zip(sent, before, strict=True)),
            f"{what}: every sender goes on",
        )

    threads = [threading.Thread(target=send, args=(mine, number)) for number, mine in enumerate(sent)]
    for thread in threads:
        thread.start()
    try:
        goes_on("the first certificate")
        for old, new in ((first, second), (second, first)):
            both = Path(old.authority).read_text() + Path(new.authority).read_text()
            exchange(live.authority, both)
            goes_on("both authorities")
            exchange(live.certificate, Path(new.certificate).read_text())
            goes_on("a certificate whose key is not there yet")
            exchange(live.key, Path(new.key).read_text())
            goes_on("the new certificate")
            exchange(live.authority, Path(new.authority).read_text())
            goes_on("the new authority alone")
    finally:
        stopping.set()
        for thread in threads:
            thread.join(WAIT_S)
    try:
        assert not errors
        for number, mine in enumerate(sent):
            assert bodies_of(actor.store, queue_id=number) == mine
    finally:
        actor.close()


def test_a_new_connection_gets_the_new_certificate(tmp_path, certificates, use):
    first, second = certificates(), certificates()
    live = copy_to(tmp_path / "live", first)
    use(first)
    with (
        closing(echo_server(None, host="127.0.0.1", tls=live)) as server,
        closing(Lane(server.address, remote=True, timeout_s=WAIT_S)) as old,
    ):
        exchange(live.certificate, Path(second.certificate).read_text())
        exchange(live.key, Path(second.key).read_text())
        exchange(live.authority, Path(second.authority).read_text())
        with pytest.raises(TlsRefusedError, match="not accepted by this node"):
            echoed(server)
        use(second)
        assert echoed(server) == b"hello"
        assert bytes(old.call(ECHO, (b"still",), WAIT_S).payload) == b"still"


def lines(caplog, word: str) -> list[str]:
    found = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    return [line for line in found if word in line]


def test_a_client_with_a_wrong_certificate_is_refused_with_one_line_at_both_ends(tmp_path, certificates, use, caplog):
    ours, others = certificates(), certificates()
    # The client trusts the authority that signed the server's certificate. But another authority, which the server does
    # not trust, signed the client's certificate.
    use(TlsFiles(others.certificate, others.key, ours.authority))
    with closing(echo_server(None, host="127.0.0.1", tls=ours)) as server:
        for _ in range(3):
            with pytest.raises(TlsRefusedError, match="refuses this node's certificate") as caught:
                echoed(server)
            assert others.certificate in str(caught.value)
            assert "\n" not in str(caught.value)
        [line] = eventually(lambda: lines(caplog, "is refused"), "the server says so")
        assert ours.authority in line
        assert "127.0.0.1" in line
        assert "\n" not in line
        use(ours)
        assert echoed(server) == b"hello"
    assert len(lines(caplog, "is refused")) == 1
    assert not [one for one in caplog.records if one.exc_info]


def test_a_server_with_a_wrong_certificate_is_refused_with_one_line_at_both_ends(certificates, use, caplog):
    ours, others = certificates(), certificates()
    use(ours)
    with closing(echo_server(None, host="127.0.0.1", tls=others)) as server:
        for _ in range(3):
            with pytest.raises(TlsRefusedError, match="not accepted by this node") as caught:
                echoed(server)
            assert ours.authority in str(caught.value)
        [line] = eventually(lambda: lines(caplog, "refuses the certificate"), "the server says so")
        assert others.certificate in line


def test_an_end_without_tls_gets_a_clear_error(certificates, use, caplog):
    files = certificates()
    use(files)
    with closing(echo_server(None, host="127.0.0.1", tls=files)) as server:
        plain = type(server.address)(server.address.name, server.address.secret, "127.0.0.1", server.address.port)
        with pytest.raises((OSError, EOFError)):
            Lane(plain, remote=True, timeout_s=1.0)
        assert echoed(server) == b"hello"
    with closing(echo_server(None, host="127.0.0.1")) as server:
        asked = type(server.address)(server.address.name, server.address.secret, "127.0.0.1", server.address.port, True)
        with pytest.raises(TlsRefusedError, match="does not use TLS"):
            Lane(asked, remote=True, timeout_s=WAIT_S)


def test_a_client_that_a_server_refuses_gets_an_error_and_one_warning_until_its_certificate_fits(
    monkeypatch, tmp_path, certificates, use, caplog
):
    ours, others = certificates(), certificates()
    use(TlsFiles(others.certificate, others.key, ours.authority))
    with closing(StorageDouble(open_store(tmp_path / "store"), host="127.0.0.1", tls=ours)) as actor:
        fake = FakeActor({"describe": lambda: description(actor.lanes.address, node_id="elsewhere", root="/no")})
        monkeypatch.setattr(storage_client, "ActorRef", lambda name: fake)
        monkeypatch.setattr(lane_pool, "OPEN_PATIENCE_S", 0.2)
        with closing(StorageClient("storage-a-0", "here")) as client:
            for _ in range(3):
                with pytest.raises(ServiceNotAvailableError, match="refuses this node's certificate"):
                    client.append([make_batch([b"refused"])], WAIT_S)
            use(ours)
            client.append([make_batch([b"taken"])], WAIT_S)
        assert bodies_of(actor.store) == [b"taken"]
    assert len(lines(caplog, "cannot open a lane to storage-a-0")) == 1


def test_mismatched_certificate_files_leave_the_earlier_files_in_use(tmp_path, certificates, caplog):
    first, second = certificates(), certificates()
    live = copy_to(tmp_path / "live", first)
    context = TlsContext(live, TlsFiles.server_context)
    before = context.current()
    assert context.current() is before
    exchange(live.certificate, Path(second.certificate).read_text())
    assert context.current() is before
    assert context.current() is before
    assert len(lines(caplog, "do not match each other")) == 1
    exchange(live.key, "no key at all")
    assert context.current() is before
    os.remove(live.key)
    assert context.current() is before
    exchange(live.key, Path(second.key).read_text())
    assert context.current() is not before
    # A program may also overwrite the certificate file in place, instead of replacing it by another file. The changed
    # size or modification time shows this.
    now = context.current()
    Path(live.authority).write_text(Path(first.authority).read_text() + Path(second.authority).read_text())
    assert context.current() is not now


def test_files_that_are_wrong_from_the_start_are_an_error(tmp_path, certificates):
    files = certificates()
    with pytest.raises(OSError, match="No such file"):
        TlsContext(TlsFiles(str(tmp_path / "none.pem"), files.key, files.authority), TlsFiles.server_context)
    with pytest.raises(OSError, match=r"(?i)mismatch"):
        TlsContext(TlsFiles(certificates().certificate, files.key, files.authority), TlsFiles.client_context)


def test_log_lines_about_refusals_are_rate_limited_and_bounded_in_number(caplog):
    now_s = [0.0]
    told = RateLimitedLog(lambda: now_s[0])
    for number in range(lane_address.SAME_LINES_MAX + 10):
        for _ in range(2):
            told.warn((f"peer {number}",), f"peer {number} is refused")
    assert len(lines(caplog, "is refused")) == lane_address.SAME_LINES_MAX
    now_s[0] = lane_address.SAME_LINE_PAUSE_S + 1
    told.warn(("another",), "another is refused")
    told.warn(("peer 1",), "peer 1 is refused")
    assert len(lines(caplog, "is refused")) == lane_address.SAME_LINES_MAX + 2
