"""Which authorities are trusted: the system's or those that OpenSSL's variables name, and those of a setting."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.unit.certificates import Authority
from tests.waiting import within
from tiers.errors import TrustError
from tiers.trust import client_context, tls_fault

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def rehashed(tmp_path: Path, authority: Authority) -> Path:
    """Return a folder with the authority, as ``openssl rehash`` makes it."""
    folder = tmp_path / "hashed"
    folder.mkdir()
    (folder / "ca.pem").write_bytes(authority.ca.read_bytes())
    subprocess.run(["openssl", "rehash", str(folder)], check=True, timeout=30)
    return folder


async def shake_hands(
    tmp_path: Path, authority: Authority, context: ssl.SSLContext
) -> None:
    """Connect to a server that shows a certificate of the authority."""
    files = authority.issue("server")
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(files.certificate, files.key)

    async def answer(
        _reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=served) as server:
        port = server.sockets[0].getsockname()[1]
        opened = asyncio.open_connection(
            "127.0.0.1", port, ssl=context, server_hostname="localhost"
        )
        _, writer = await within(opened, "the handshake")
        writer.close()


@pytest.mark.parametrize("way", ["SSL_CERT_FILE", "SSL_CERT_DIR", "tls.ca"])
async def test_a_private_authority_is_trusted_once_it_is_named(
    way: str, tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By each of the ways, and not before; the error says what to do."""
    with pytest.raises(ssl.SSLCertVerificationError) as raised:
        await shake_hands(tmp_path, authority, client_context())
    fault = tls_fault(raised.value)
    assert fault is not None
    assert (
        "name the authority that signed its certificate in tls.ca or SSL_CERT_FILE"
        in fault
    )
    if way != "tls.ca":
        named = (
            authority.ca if way == "SSL_CERT_FILE" else rehashed(tmp_path, authority)
        )
        monkeypatch.setenv(way, str(named))
    await shake_hands(
        tmp_path, authority, client_context(authority.ca if way == "tls.ca" else None)
    )


def subjects(context: ssl.SSLContext) -> int:
    return int(context.cert_store_stats()["x509_ca"])


def test_a_file_of_a_variable_takes_the_systems_place_and_the_settings_is_added(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So one private authority does not shut out those of public servers, unless that is asked for."""
    system = subjects(client_context())
    assert subjects(client_context(authority.ca)) == system + 1
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
    assert subjects(client_context()) == 1


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose files and unit files pass on what is not set as an empty text."""
    system = subjects(client_context())
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.setenv(name, "")
    assert subjects(client_context()) == system


def test_an_intermediate_authority_alone_can_be_named(authority: Authority) -> None:
    """As with curl; and names in certificates are checked."""
    context = client_context(authority.ca)
    assert context.verify_flags & ssl.VERIFY_X509_PARTIAL_CHAIN
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.check_hostname is True


@pytest.mark.parametrize(
    ("name", "content", "wrong"),
    [
        (
            "SSL_CERT_FILE",
            None,
            "SSL_CERT_FILE: .*nothing cannot be used .*No such file",
        ),
        (
            "SSL_CERT_FILE",
            "no certificate",
            "SSL_CERT_FILE: .*nothing cannot be used .*no certificate in PEM form",
        ),
        ("SSL_CERT_DIR", "no folder", "SSL_CERT_DIR: .*nothing is not a folder"),
        ("tls.ca", None, "tls.ca: .*nothing cannot be used .*No such file"),
        ("tls.ca", "", "tls.ca: .*nothing cannot be used .*no certificate in PEM form"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    name: str, content: Any, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the variable or the setting that names it."""
    path = tmp_path / "nothing"
    if content is not None:
        path.write_text(content)
    if name != "tls.ca":
        monkeypatch.setenv(name, str(path))
    with pytest.raises(TrustError, match=wrong):
        client_context(path if name == "tls.ca" else None)


def test_what_is_no_fault_of_tls_is_not_told_as_one() -> None:
    """A refused connection stays what it is."""
    error = OSError("no connection")
    error.__cause__ = ConnectionRefusedError()
    assert tls_fault(error) is None
