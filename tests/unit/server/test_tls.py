"""HTTPS: served by the router's own server, with certificates that are replaced while it runs."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from router.section import SettingsError
from router.server.settings import TlsSettings
from router.server.tls import TlsError, load_pair
from router.settings import load_settings
from tests.unit.certificates import Authority, Files
from tests.unit.own_router import QARR, OwnRouter, own_router
from tests.unit.router_stack import events
from tests.waiting import until

pytestmark = pytest.mark.anyio


def settings_of(files: Files, **more: Any) -> TlsSettings:
    return TlsSettings(certificate=files.certificate, key=files.key, **more)


def variables(files: Files, authority: Authority) -> dict[str, str]:
    return {
        "QARR_TLS__CERTIFICATE": str(files.certificate),
        "QARR_TLS__KEY": str(files.key),
        "QARR_TLS__CA": str(authority.ca),
    }


def shown_name(
    port: int, authority: Authority, version: ssl.TLSVersion | None = None
) -> str:
    """Return the name in the certificate that a router shows, over one version of TLS if it is given."""
    context = ssl.create_default_context(cafile=authority.ca)
    if version is not None:
        context.minimum_version = version
        context.maximum_version = version
    with (
        socket.create_connection(("127.0.0.1", port), timeout=20) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        certificate: Any = connection.getpeercert()
        return str(certificate["subject"][0][0][1])


@asynccontextmanager
async def secured(
    tmp_path: Path, authority: Authority, files: Files, **more: str
) -> AsyncIterator[OwnRouter]:
    async with own_router(
        tmp_path, ca=authority.ca, **variables(files, authority), **more
    ) as router:
        yield router


async def test_clients_are_served_over_tls(tmp_path: Path) -> None:
    """Answers and streams reach httpx and OpenAI's client over TLS."""
    authority = Authority(tmp_path)
    files = authority.issue("first")
    async with secured(tmp_path, authority, files) as router:
        assert (await router.generate(max_tokens=4)).status_code == httpx.codes.OK
        text = (await router.generate(stream=True)).text
        assert events(text)[-1][0] == "done"
        trust = ssl.create_default_context(cafile=authority.ca)
        async with AsyncOpenAI(
            base_url=f"{router.url}/v1",
            api_key="unused",
            http_client=httpx.AsyncClient(verify=trust, trust_env=False),
        ) as client:
            messages: Any = [{"role": "user", "content": "hi"}]
            stream = await client.chat.completions.create(
                model="auto", messages=messages, stream=True
            )
            pieces = [piece async for piece in stream]
            assert pieces[-1].choices[0].finish_reason
        metrics = (await router.client.get(f"{router.url}/metrics")).text
        (expires,) = re.findall(
            r"^qarr_tls_expires_timestamp_seconds (\S+)$", metrics, re.MULTILINE
        )
        assert float(expires) == pytest.approx(load_pair(settings_of(files)).expires)
        command = await router.qarr("tiers", "--url", router.url)
        assert command.returncode == 0, command.stderr
        assert "https://127.0.0.1" in router.errors.read_text()


async def test_only_tls_is_spoken(tmp_path: Path) -> None:
    """A plain HTTP request and an old version of TLS end with a closed connection, and the router goes on."""
    authority = Authority(tmp_path)
    async with secured(tmp_path, authority, authority.issue("first")) as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(b"GET /readyz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 20)
        assert not answer.startswith(b"HTTP/")
        writer.close()
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            name = await asyncio.to_thread(
                shown_name, router.port, authority, version=version
            )
            assert name == "first", version
        assert "Traceback" not in router.errors.read_text()


async def test_a_certificate_is_replaced_under_load(tmp_path: Path) -> None:
    """New connections get the new certificate without a restart; no request fails, and a bad pair changes nothing."""
    authority = Authority(tmp_path)
    shown = authority.issue("shown")
    second = authority.issue("second")
    trust = ssl.create_default_context(cafile=authority.ca)
    ended = asyncio.Event()
    statuses: list[int] = []

    async with secured(tmp_path, authority, shown) as router:

        async def load() -> None:
            while not ended.is_set():
                async with httpx.AsyncClient(
                    verify=trust, trust_env=False, timeout=20
                ) as client:
                    answer = await client.post(
                        f"{router.url}/generate", json={"prompt": "hi", "stream": True}
                    )
                    statuses.append(answer.status_code)
                    assert events(answer.text)[-1][0] == "done"

        loads = [asyncio.create_task(load()) for _ in range(3)]
        second.key.replace(shown.key)
        second.certificate.replace(shown.certificate)
        await until(
            lambda: router.errors.read_text().count("certificate loaded again") == 1
        )
        assert await asyncio.to_thread(shown_name, router.port, authority) == "second"
        shown.key.write_text("no key")
        await until(lambda: "tls.key" in router.errors.read_text())
        assert "stays in use" in router.errors.read_text()
        reload = await router.qarr("reload")
        assert "tls.key" in reload.stderr
        assert await asyncio.to_thread(shown_name, router.port, authority) == "second"
        ended.set()
        await asyncio.gather(*loads)
        assert set(statuses) == {httpx.codes.OK}


async def test_a_reload_takes_another_pair(tmp_path: Path) -> None:
    """Other files in the settings are shown after a reload; switching TLS off needs a restart."""
    authority = Authority(tmp_path)
    first = authority.issue("first")
    second = authority.issue("second")
    file = tmp_path / "settings.toml"
    text = f'[tls]\ncertificate = "{{0}}"\nkey = "{{1}}"\nca = "{authority.ca}"\n'
    file.write_text(text.format(first.certificate, first.key))
    async with own_router(tmp_path, ca=authority.ca, QARR_CONFIG=str(file)) as router:
        file.write_text(text.format(second.certificate, second.key))
        assert (await router.qarr("reload")).returncode == 0
        assert await asyncio.to_thread(shown_name, router.port, authority) == "second"
        file.write_text(f'[tls]\nca = "{authority.ca}"\n')
        reload = await router.qarr("reload", "--url", router.url)
        assert "between HTTP and HTTPS" in reload.stderr


async def test_clients_need_a_certificate_if_the_settings_say_so(
    tmp_path: Path,
) -> None:
    """With ``tls.client_ca`` only clients with a certificate of that authority are served.

    Commands show the router's own certificate, and trust it alone, whatever address it names.
    """
    authority = Authority(tmp_path)
    served = authority.issue("served", address="192.0.2.1")
    mine = authority.issue("mine")
    known = ssl.create_default_context(cafile=authority.ca)
    known.check_hostname = False
    known.load_cert_chain(mine.certificate, mine.key)
    unknown = ssl.create_default_context(cafile=authority.ca)
    more = {**variables(served, authority), "QARR_TLS__CLIENT_CA": str(authority.ca)}
    async with own_router(tmp_path, ca=known, **more) as router:
        assert await router.status() == httpx.codes.OK
        async with httpx.AsyncClient(
            verify=unknown, trust_env=False, timeout=20
        ) as client:
            with pytest.raises(httpx.TransportError):
                await client.get(f"{router.url}/readyz")
        del router.env["QARR_TLS__CA"]
        for command in (("tiers",), ("health", "--ready")):
            process = await router.qarr(*command)
            assert process.returncode == 0, process.stderr
        router.env |= {
            "QARR_TLS__CERTIFICATE": str(mine.certificate),
            "QARR_TLS__KEY": str(mine.key),
        }
        assert "no router answers" in (await router.qarr("tiers")).stderr


def test_faults_name_the_setting(tmp_path: Path) -> None:
    """Files that are missing, of another kind, expired, or do not belong together are refused, with the setting's name."""
    authority = Authority(tmp_path)
    first = authority.issue("first")
    second = authority.issue("second")
    old = authority.issue("old", timedelta(days=-1))
    nothing = tmp_path / "nothing"
    for tls_settings, message in (
        (
            TlsSettings(certificate=nothing, key=first.key),
            r"tls\.certificate: .*No such file",
        ),
        (
            TlsSettings(certificate=first.key, key=first.key),
            r"tls\.certificate: .*no certificate",
        ),
        (
            TlsSettings(certificate=first.certificate, key=nothing),
            r"tls\.key: .*No such file",
        ),
        (
            TlsSettings(certificate=first.certificate, key=second.key),
            r"tls\.key: .*does not belong",
        ),
        (settings_of(old), r"tls\.certificate: .*has expired"),
        (settings_of(first, client_ca=first.key), r"tls\.client_ca: .*PEM"),
    ):
        with pytest.raises(TlsError, match=message):
            load_pair(tls_settings)
    with pytest.raises(SettingsError, match="given together"):
        load_settings(None, {"tls": {"key": first.key}})


async def test_a_router_hands_over_its_socket_under_tls(tmp_path: Path) -> None:
    """A router with another certificate takes over; requests are answered all the time."""
    authority = Authority(tmp_path)
    first = authority.issue("first")
    second = authority.issue("second")
    trust = ssl.create_default_context(cafile=authority.ca)
    ended = asyncio.Event()

    async with secured(tmp_path, authority, first) as router:

        async def ask() -> int:
            answered = 0
            while not ended.is_set():
                async with httpx.AsyncClient(
                    verify=trust, trust_env=False, timeout=20
                ) as client:
                    answer = await client.post(
                        f"{router.url}/generate", json={"prompt": "hi"}
                    )
                    assert answer.status_code == httpx.codes.OK
                    answered += 1
            return answered

        asking = asyncio.create_task(ask())
        command = [QARR, "serve", "--takeover", "--port", str(router.port)]
        for option, url in zip(("--fast", "--balanced"), router.engines, strict=False):
            command += [option, url]
        with router.errors.open("ab") as errors:
            successor = subprocess.Popen(
                command,
                stderr=errors,
                env={**router.env, **variables(second, authority)},
            )
        try:
            assert await asyncio.to_thread(router.process.wait, 60) == 0
            assert (
                await asyncio.to_thread(shown_name, router.port, authority) == "second"
            )
            ended.set()
            assert await asking
        finally:
            successor.kill()
            successor.wait(60)
