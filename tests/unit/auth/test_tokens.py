"""JWTs in the place of keys: real signatures, and an issuer on loopback that rotates its keys, hangs and dies."""

from __future__ import annotations

import asyncio
import json
import re
import time
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest

import router.auth.tokens as module
from router.api.problems import describe
from router.auth.access import KeyStore, open_access
from router.auth.api_keys import (
    Caller,
    IssuerUnreachableError,
    KeysError,
    Quota,
    UnauthorizedError,
    UnknownSignerError,
    add_key,
    set_team,
)
from router.auth.settings import JwtSettings
from router.auth.tokens import TokenVerifier
from router.section import SettingsError
from router.settings import load_settings
from tests.fakes.engine import serving
from tests.imports import ROOT
from tests.unit.auth.issuers import AUDIENCE, ISSUER, MAKERS, Issuer
from tests.unit.own_router import connection, own_router
from tests.waiting import until
from tiers.spec import TierName

pytestmark = pytest.mark.anyio


def settings_of(jwks: object, **more: Any) -> JwtSettings:
    return JwtSettings(issuer=ISSUER, audience=AUDIENCE, jwks=str(jwks), **more)


def published(tmp_path: Path, issuer: Issuer) -> Path:
    file = tmp_path / "jwks.json"
    file.write_text(issuer.jwks)
    return file


@pytest.mark.parametrize("algorithm", MAKERS)
async def test_a_token_has_the_rights_of_its_claims(
    tmp_path: Path, algorithm: str
) -> None:
    """Its subject and its rights make the same caller as a key with these rights."""
    issuer = Issuer(algorithm)
    tokens = TokenVerifier(settings_of(published(tmp_path, issuer)))
    assert tokens.find(issuer.sign()) == Caller("jwt:alice", "alice")
    rights = {
        "tiers": ["fast"],
        "max_priority": "batch",
        "requests_per_minute": 3,
        "admin": True,
        "over": "refuse",
    }
    caller = tokens.find(issuer.sign(sub="b@x.example", qarr=rights))
    assert caller == Caller(
        "jwt:b@x.example",
        "b@x.example",
        tiers=frozenset({TierName.FAST}),
        over="refuse",
        max_priority="batch",
        quota=Quota(3),
        admin=True,
    )
    assert tokens.holds(caller)
    assert tokens.find(issuer.sign(qarr={"overflow": True})).overflow
    assert len(tokens.find(issuer.sign(sub="x" * 500)).key_id) <= 64


async def test_no_two_subjects_are_one_caller(tmp_path: Path) -> None:
    issuer = Issuer()
    tokens = TokenVerifier(settings_of(published(tmp_path, issuer)))
    subjects = [
        "a b",
        "ä",
        "x" * 57,
        "x" * 58,
        "a",
        "A",
        "jwt:a",
        " a",
        "a ",
        "a|b",
        "sha256:a",
    ]
    ids = [tokens.find(issuer.sign(sub=subject)).key_id for subject in subjects]
    # Subjects that look like ids, or like the ends of ids, are no other caller's.
    for key_id in list(ids):
        for subject in (key_id.removeprefix("jwt:"), key_id.rpartition(":")[2]):
            subjects.append(subject)
            ids.append(tokens.find(issuer.sign(sub=subject)).key_id)
    assert len({*ids}) == len({*subjects})
    assert max(map(len, ids)) <= 64


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ({"exp": 1000}, "has expired"),
        ({"nbf": 1e10}, "not valid yet"),
        ({"aud": "other"}, "another audience"),
        ({"iss": "https://other.example"}, "another issuer"),
        ({"exp": None}, "lacks the claim exp"),
        ({"sub": None}, "lacks the claim sub"),
        ({"sub": ""}, "claim sub is no text"),
        ({"qarr": "all"}, "no object of rights"),
        ({"qarr": {"id": "me"}}, "no object of rights"),
        ({"qarr": {"requests_per_minute": 0}}, "claim qarr: .*requests_per_minute"),
        ({"qarr": {"everything": True}}, "claim qarr: .*everything"),
        ({"qarr": {"admin": "true"}}, "claim qarr: .*admin"),
        ({"qarr": {"requests_per_minute": "9"}}, "claim qarr: .*requests_per_minute"),
        ({"qarr": {"team": "red"}}, "there is no team 'red'"),
    ],
)
async def test_a_refusal_says_why_without_the_token(
    tmp_path: Path, claims: dict[str, Any], message: str
) -> None:
    """Each fault of a token has its text, which does not hold the token."""
    issuer = Issuer()
    token = issuer.sign(**claims)
    with pytest.raises(UnauthorizedError, match=message) as refused:
        TokenVerifier(settings_of(published(tmp_path, issuer))).find(token)
    assert token not in str(refused.value)


async def test_only_the_issuers_signature_counts(tmp_path: Path) -> None:
    """Tokens without a signature, signed with a secret, by another key, or by one that is not published are refused."""
    issuer = Issuer()
    impostor = Issuer()
    tokens = TokenVerifier(settings_of(published(tmp_path, issuer)))
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "eve", "exp": time.time() + 300}
    known = {"kid": issuer.kid}
    with pytest.raises(UnauthorizedError, match="signature is not valid"):
        tokens.find(impostor.sign())
    with pytest.raises(UnauthorizedError, match="algorithm is not allowed"):
        tokens.find(jwt.encode(claims, "s" * 32, "HS256", headers=known))
    with pytest.raises(UnauthorizedError, match="algorithm is not allowed"):
        tokens.find(jwt.encode(claims, None, "none", headers=known))  # type: ignore[arg-type]
    with pytest.raises(UnknownSignerError, match="not published"):
        tokens.find(jwt.encode(claims, "s" * 32, "HS256", headers={"kid": "secret"}))
    with pytest.raises(UnauthorizedError, match="not a valid JWT"):
        tokens.find(jwt.encode(claims, MAKERS["RS256"][0](), "RS256", headers=known))
    for nonsense in ("a.b.c", "..", "[" * 4000 + ".a.b"):
        with pytest.raises(UnauthorizedError, match="not a valid JWT"):
            tokens.find(nonsense)


async def test_checked_tokens_are_remembered_until_the_keys_change(
    tmp_path: Path,
) -> None:
    """A token is checked once; when its key is published no longer, it is refused at once."""
    issuer = Issuer()
    file = published(tmp_path, issuer)
    tokens = TokenVerifier(settings_of(file))
    token = issuer.sign()
    assert tokens.find(token) is tokens.find(token)
    issuer.rotate("second")
    file.write_text(issuer.jwks + " ")
    await tokens.renew()
    with pytest.raises(UnknownSignerError):
        tokens.find(token)
    assert tokens.find(issuer.sign()).name == "alice"
    file.write_text("nothing")
    await tokens.renew()
    assert tokens.find(issuer.sign()).name == "alice"


def test_settings_are_checked(tmp_path: Path) -> None:
    """Only asymmetric algorithms, a whole issuer, and addresses that nobody can listen in on are allowed."""
    valid = {
        "issuer": ISSUER,
        "audience": AUDIENCE,
        "jwks": "https://issuer.example/jwks",
    }
    load_settings(None, {"jwt": valid})
    for wrong, message in (
        ({"jwks": ""}, "given together"),
        ({"jwks": "http://issuer.example/jwks"}, "https"),
        ({"algorithms": ["HS256"]}, "algorithms"),
        ({"algorithms": ["none"]}, "algorithms"),
        ({"algorithms": []}, "algorithms"),
    ):
        with pytest.raises(SettingsError, match=message):
            load_settings(None, {"jwt": {**valid, **wrong}})
    with pytest.raises(KeysError, match=r"jwt\.jwks: .*No such file"):
        TokenVerifier(settings_of(tmp_path / "none"))
    (tmp_path / "empty").touch()
    with pytest.raises(KeysError, match="is not a JWKS"):
        TokenVerifier(settings_of(tmp_path / "empty"))


async def test_the_documented_settings_and_claims_are_valid(tmp_path: Path) -> None:
    """The examples in docs/security.md are valid settings, and claims that make a caller."""
    text = (ROOT / "docs/security.md").read_text("utf-8").partition("\n## HTTPS")[2]
    tls_settings, jwt_settings = (
        tomllib.loads(block)
        for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    )
    (claims,) = (
        json.loads(block) for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    )
    settings = load_settings(None, {**tls_settings, **jwt_settings})
    issuer = Issuer()
    tokens = TokenVerifier(
        settings.jwt.model_copy(update={"jwks": str(published(tmp_path, issuer))})
    )
    caller = tokens.find(issuer.sign(**{**claims, "exp": time.time() + 300}))
    assert caller.key_id == "jwt:alice"
    assert caller.max_priority == "standard"
    assert caller.quota == Quota(60)
    assert caller.tiers == {TierName.FAST, TierName.BALANCED}


async def test_keys_serve_beside_tokens(tmp_path: Path) -> None:
    """With an issuer requests need a key or a token, also without a key file; each is known by itself."""
    issuer = Issuer()
    keys = tmp_path / "keys.json"
    settings = load_settings(
        None,
        {
            "auth": {"keys_file": keys},
            "jwt": {
                "issuer": ISSUER,
                "audience": AUDIENCE,
                "jwks": str(published(tmp_path, issuer)),
            },
        },
    )
    access = open_access(settings)
    assert access.required
    caller = access.find(issuer.sign())
    assert access.holds(caller)
    key, _ = add_key(keys, "me")
    set_team(keys, "shop", engine_seconds_per_month=5)
    access = open_access(settings)
    rights = {"team": "shop", "money_per_day": 2, "over_budget": "cheapest"}
    member = access.find(issuer.sign(qarr=rights))
    own_account, team_account = member.accounts
    assert own_account.id == "key:jwt:alice"
    assert [limit.name for limit in own_account.limits] == ["money_per_day"]
    assert team_account.id == "team:shop"
    assert [limit.name for limit in team_account.limits] == ["engine_seconds_per_month"]
    assert member.team == "shop"
    assert member.over_budget == "cheapest"
    assert access.holds(member) is True
    set_team(keys, "shop")
    access.use(open_access(settings))
    assert [
        account.id for account in access.find(issuer.sign(qarr=rights)).accounts
    ] == ["key:jwt:alice"]
    assert KeyStore(keys).find(key).name == "me"
    assert open_access(settings).find(key).name == "me"


class Clock:
    """A clock that a test sets."""

    at = 1000.0

    def __call__(self) -> float:
        return self.at


@asynccontextmanager
async def issuing() -> AsyncIterator[tuple[Issuer, str]]:
    issuer = Issuer()
    async with serving(issuer.app) as url:
        try:
            yield issuer, f"{url}/jwks"
        finally:
            issuer.answers.set()


async def test_rotated_keys_are_fetched_when_a_token_names_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An unknown key is fetched, but not for every token; while the issuer hangs or fails the last keys stay in force."""
    clock = Clock()
    async with issuing() as (issuer, url):
        tokens = TokenVerifier(settings_of(url), clock)
        token = issuer.sign()
        with pytest.raises(UnknownSignerError, match="cannot be read now"):
            tokens.find(token)
        await tokens.renew()
        assert tokens.find(token).name == "alice"
        issuer.rotate("second")
        await asyncio.gather(*(tokens.renew() for _ in range(20)))
        # Within MIN_REFETCH_INTERVAL_S there is one fetch, however many tokens come.
        assert issuer.fetches == 1
        clock.at += module.MIN_REFETCH_INTERVAL_S
        await asyncio.gather(*(tokens.renew() for _ in range(20)))
        assert issuer.fetches == 2
        assert tokens.find(issuer.sign()).name == "alice"
        issuer.answers.clear()
        clock.at += module.MIN_REFETCH_INTERVAL_S
        monkeypatch.setattr(module, "FETCH_S", 0.2)
        await tokens.renew()
        assert tokens.find(issuer.sign()).name == "alice"
        monkeypatch.undo()
        await tokens.aclose()


async def test_keys_do_not_stay_in_force_for_ever() -> None:
    """When the issuer has been away for longer than ``MAX_KEY_AGE_S``, its tokens are refused, remembered ones too."""
    clock = Clock()
    async with issuing() as (issuer, url):
        tokens = TokenVerifier(settings_of(url), clock)
        await tokens.renew()
        token = issuer.sign()
        issuer.status = 500
        clock.at += module.MAX_KEY_AGE_S
        tokens.look()
        await tokens.renew()
        assert tokens.find(token).name == "alice"
        clock.at += 1
        with pytest.raises(UnknownSignerError, match="cannot be read now"):
            tokens.find(token)
        issuer.status = 200
        clock.at += module.MIN_REFETCH_INTERVAL_S
        await tokens.renew()
        assert tokens.find(token).name == "alice"


async def test_a_router_serves_callers_with_tokens(tmp_path: Path) -> None:
    """A token lets its caller in, after a rotation too, and its rights count: tiers, quota, operations; logs name it."""
    async with issuing() as (issuer, url):
        environment = {
            "QARR_JWT__ISSUER": ISSUER,
            "QARR_JWT__AUDIENCE": AUDIENCE,
            "QARR_JWT__JWKS": url,
            "QARR_AUTH__KEYS_FILE": str(tmp_path / "none.json"),
            "QARR_TELEMETRY__REQUEST_LINES": "stderr",
        }
        async with own_router(tmp_path, **environment) as router:

            async def ask(
                token: str, path: str = "/generate", **body: Any
            ) -> httpx.Response:
                async with connection(authorization=f"Bearer {token}") as client:
                    return await client.post(
                        f"{router.url}{path}",
                        json={"prompt": "hi", "max_tokens": 4, **body},
                    )

            answer = await ask(issuer.sign(qarr={"tiers": ["balanced"]}))
            assert answer.status_code == httpx.codes.OK
            assert answer.headers["x-qarr-tier"] == "balanced"
            refused = await ask(issuer.sign(exp=1000))
            assert refused.status_code == httpx.codes.UNAUTHORIZED
            assert "has expired" in refused.json()["detail"]
            limited = issuer.sign(sub="bob", qarr={"requests_per_minute": 1})
            assert [(await ask(limited)).status_code for _ in range(2)] == [200, 429]
            assert (
                await ask(issuer.sign(), "/admin/reload")
            ).status_code == httpx.codes.FORBIDDEN
            assert (
                await ask(issuer.sign(qarr={"admin": True}), "/admin/reload")
            ).status_code == httpx.codes.OK
            await until(lambda: "jwt:bob" in router.errors.read_text())
            async with connection() as client:
                assert (
                    await client.get(f"{router.url}/tiers")
                ).status_code == httpx.codes.UNAUTHORIZED


async def test_while_the_issuer_is_away_tokens_are_asked_for_again(
    tmp_path: Path,
) -> None:
    """The answer is a 503, which SDKs try again, also for a token of a key that the issuer has published meanwhile."""
    clock = Clock()
    async with issuing() as (issuer, url):
        issuer.status = 500
        tokens = TokenVerifier(settings_of(url), clock)
        access = KeyStore(tmp_path / "none.json", tokens)
        for in_force in (False, True):
            await tokens.renew()
            with pytest.raises(IssuerUnreachableError) as away:
                access.find(issuer.sign())
            problem = describe(away.value)
            assert problem.status == 503
            assert problem.retry_after_s == 10
            assert access.ready == in_force
            assert access.notes == [
                "the keys of the tokens' issuer (jwt.jwks) cannot be read"
            ]
            issuer.status = 200
            clock.at += module.MIN_REFETCH_INTERVAL_S
            await tokens.renew()
            assert access.find(issuer.sign()).name == "alice"
            assert access.notes == []
            assert access.ready is True
            issuer.status = 500
            issuer.rotate("next")
            clock.at += module.MIN_REFETCH_INTERVAL_S


async def test_an_issuer_is_taken_over_by_a_reload(tmp_path: Path) -> None:
    """A router without keys asks for tokens once a reload has named an issuer; a reload whose keys cannot be read fails."""
    issuer = Issuer()
    file = tmp_path / "settings.toml"
    text = f'[jwt]\nissuer = "{ISSUER}"\naudience = "{AUDIENCE}"\njwks = "{{}}"\n'
    file.write_text("")
    keys = str(tmp_path / "none.json")
    async with own_router(
        tmp_path, QARR_CONFIG=str(file), QARR_AUTH__KEYS_FILE=keys
    ) as router:
        file.write_text(text.format(tmp_path / "none"))
        assert "jwt.jwks" in (await router.qarr("reload")).stderr
        assert (await router.generate()).status_code == httpx.codes.OK
        file.write_text(text.format(published(tmp_path, issuer)))
        assert (await router.qarr("reload")).returncode == 0
        assert (await router.generate()).status_code == httpx.codes.UNAUTHORIZED
        async with connection(authorization=f"Bearer {issuer.sign()}") as client:
            answer = await client.get(f"{router.url}/tiers")
            assert answer.status_code == httpx.codes.OK
