"""Engines, overflow, issuer and router whose certificates a company's own authority has signed."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import httpx
import pytest

from router.upstream.transport import EngineTransport
from tests.fakes.engine import Behaviour, FakeEngine, serving
from tests.unit.auth.issuers import AUDIENCE, ISSUER, Issuer
from tests.unit.certificates import Authority
from tests.unit.own_router import OwnRouter, connection, own_router
from tests.waiting import until, within
from tiers.spec import STANDARD_TIERS

pytestmark = pytest.mark.anyio
WAYS = ("SSL_CERT_FILE", "SSL_CERT_DIR", "QARR_TLS__CA")


def named(way: str, tmp_path: Path, authority: Authority) -> dict[str, str]:
    """Return the variables that name an authority, the others being empty."""
    if way != "SSL_CERT_DIR":
        return {**dict.fromkeys(WAYS[:2], ""), way: str(authority.ca)}
    folder = tmp_path / "authorities"
    folder.mkdir()
    (folder / "ca.pem").write_bytes(authority.ca.read_bytes())
    subprocess.run(["openssl", "rehash", str(folder)], check=True, timeout=30)
    return {"SSL_CERT_FILE": "", way: str(folder)}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("way", WAYS)
async def test_servers_of_a_private_authority_are_trusted(
    way: str, tmp_path: Path
) -> None:
    """Engines, issuer, overflow, and the router by its commands, each way of naming the authority."""
    authority = Authority(tmp_path)
    issuer = Issuer()
    outside = Behaviour()
    shown = authority.issue("server")
    engines = [Behaviour() for _ in STANDARD_TIERS]
    async with (
        serving(issuer.app, **shown.served) as issuer_url,
        serving(FakeEngine(outside).app, **shown.served) as overflow_url,
    ):
        variables = {
            "QARR_TLS__CERTIFICATE": str(shown.certificate),
            "QARR_TLS__KEY": str(shown.key),
            "QARR_JWT__ISSUER": ISSUER,
            "QARR_JWT__AUDIENCE": AUDIENCE,
            "QARR_JWT__JWKS": f"{issuer_url}/jwks",
            "QARR_AUTH__KEYS_FILE": str(tmp_path / "none.json"),
            "QARR_OVERFLOW__URL": f"{overflow_url}/v1",
            "QARR_OVERFLOW__MODEL": "outside",
            "QARR_ADMISSION__MAX_WAITING": "0",
            **{
                f"QARR_TIERS__{tier.upper()}__MAX_IN_FLIGHT": "1"
                for tier in STANDARD_TIERS
            },
            **named(way, tmp_path, authority),
        }
        async with own_router(
            tmp_path, engines, ca=authority.ca, shown_by_engines=shown, **variables
        ) as router:
            token = issuer.sign(qarr={"overflow": True, "admin": True})
            for engine in engines:
                engine.stall_after = 1
            async with asyncio.TaskGroup() as streams:
                held = [streams.create_task(ask(router, token)) for _ in engines]
                await until(lambda: all(engine.running for engine in engines))
                answer = await within(ask(router, token), "the overflow's answer")
                assert answer.status_code == httpx.codes.OK, answer.text
                assert "x-qarr-overflow" in answer.headers
                for task in held:
                    task.cancel()
            done = await router.qarr("tiers", "--url", router.url, "--key", token)
            assert done.returncode == 0, done.stderr


async def ask(router: OwnRouter, token: str) -> httpx.Response:
    return await router.client.post(
        f"{router.url}/generate",
        json={"prompt": "hi"},
        headers={"authorization": f"Bearer {token}"},
    )


async def test_an_engine_of_an_unknown_authority_says_what_to_do(
    tmp_path: Path,
) -> None:
    """In the replica's detail, which operators see."""
    authority = Authority(tmp_path)
    shown = authority.issue("server")
    async with serving(FakeEngine(Behaviour()).app, **shown.served) as url:
        transport = EngineTransport()
        try:
            with pytest.raises(
                httpx.ConnectError,
                match=r"name the authority .* in tls\.ca or SSL_CERT_FILE",
            ):
                await transport.handle_async_request(
                    httpx.Request("GET", f"{url}/health")
                )
        finally:
            await transport.aclose()


async def test_a_file_of_authorities_that_cannot_be_used_stops_the_start(
    tmp_path: Path,
) -> None:
    """The message names the setting, the file and what is allowed."""
    async with connection():
        with pytest.raises(
            AssertionError,
            match=r"tls\.ca: .*none\.pem cannot be used .*a PEM file of authorities is",
        ):
            async with own_router(tmp_path, QARR_TLS__CA=str(tmp_path / "none.pem")):
                pass
