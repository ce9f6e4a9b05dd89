"""A client of a running router, for the commands that show it or operate on it."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from router.cli.common import ConfigOption, err, http_url, plain
from router.section import SettingsError
from router.server.settings import TlsSettings
from router.settings import Settings, load_settings
from tiers.errors import OperationError, TrustError
from tiers.trust import client_context, tls_fault

TIMEOUT_S = 30.0
KEY_NEEDED = "the router needs a key: give one with --key or in the variable QARR_KEY"
NOT_FOUND = {"detail": "Not Found"}  # as vLLM's server has it; a router names the path
END_OF_FIRST = "-----END CERTIFICATE-----"
UrlOption = Annotated[
    str,
    typer.Option(
        help="The running router; by default the one of the settings.",
        envvar="QARR_URL",
    ),
]
KeyOption = Annotated[
    str,
    typer.Option(
        help="A key for the router; operations need one made with --admin.",
        envvar="QARR_KEY",
    ),
]


class RouterApiClient:
    """A client of the running router, which is looked for with the first request."""

    def __init__(
        self, url: UrlOption = "", key: KeyOption = "", config: ConfigOption = None
    ) -> None:
        self.url, self._key, self._config = url, key, config

    @cached_property
    def http(self) -> httpx.Client:
        self.url, verify = find_router(self.url, self._config)
        headers = authorization(self._key)
        return httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=TIMEOUT_S,
            trust_env=False,
            verify=verify,
        )

    def ask(
        self,
        path: str,
        method: str = "GET",
        body: dict[str, Any] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> dict[str, Any]:
        """Return the JSON object with which the router answers, or raise ``OperationError``."""
        try:
            response = self.http.request(method, path, json=body, timeout=timeout_s)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self.no_answer(error) from error
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise OperationError(why_unauthorized(response))
        try:
            answer: dict[str, Any] = response.json()
        except ValueError as error:
            raise OperationError(self._no_router(path, response)) from error
        if response.status_code == httpx.codes.NOT_FOUND and answer == NOT_FOUND:
            raise OperationError(self._no_router(path, response))
        if response.is_error:
            wrong = [
                f"{e['field']}: {e['problem']} (allowed: {e['allowed']})"
                for e in answer.get("errors", ())
            ]
            raise OperationError("; ".join(wrong) or str(answer.get("detail", answer)))
        return answer

    def _no_router(self, path: str, response: httpx.Response) -> str:
        otherwise = (
            f"{self.url}{path} answered HTTP {response.status_code}: is this a router?"
        )
        return why_no_router(self.url, self.http.get, otherwise)

    def no_answer(self, error: Exception) -> OperationError:
        why = tls_fault(error) or str(error) or "no reason given"
        return OperationError(
            f"no router answers at {self.url} ({why}): 'make up' starts one, --url names another"
        )


def engine_version(get: Callable[[str], httpx.Response | None]) -> str | None:
    """Return the version of the vLLM engine that answers; None: what answers is none, or does not say so."""
    with suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
        answer = get("/version")
        if answer is not None and answer.is_success:
            return str(answer.json()["version"])
    return None


def why_no_router(
    url: str, get: Callable[[str], httpx.Response | None], otherwise: str
) -> str:
    """Say that an engine answers at an address where a router is meant; ``otherwise``, if none does."""
    version = engine_version(get)
    if version is None:
        return otherwise
    return f"{url} is an engine (vLLM {version}), not a router: give the router's address with --url or QARR_URL"


def find_router(
    url: str, config: Path | None = None
) -> tuple[str, ssl.SSLContext | bool]:
    """Return a running router's URL, by default that of the settings, and its trusted certificates; print the URL.

    ``SettingsError``: the settings are not valid, or name no port.
    """
    named = url.rstrip("/")
    if named.startswith("http:"):
        verify: ssl.SSLContext | bool = True
    else:
        settings = load_settings(config)
        if not named and not settings.server.port:
            raise SettingsError(
                "server.port is 0, any free port: name the running router with --url or QARR_URL"
            )
        verify, named = trusted(settings, named), named or own_url(settings)
    err.print(plain(f"router {named}"))
    return named, verify


def own_url(settings: Settings, port: int | None = None) -> str:
    """Return where this machine reaches the router of the settings, or a router like it on another port."""
    host, scheme = (
        settings.server.host,
        "http" if settings.tls.certificate is None else "https",
    )
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return http_url(host, settings.server.port if port is None else port, scheme)


def unverified(settings: Settings) -> ssl.SSLContext:
    """Return what accepts any certificate of a router: only for questions without a key, to which anybody gets answers."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    load_own(context, settings.tls)
    return context


def trusted(settings: Settings, url: str = "") -> ssl.SSLContext | bool:
    """Return which certificates a router may show: of the settings' own router (no ``url``) only ``tls.certificate``.

    It need not name the address. Other routers' are of the system's authorities, or of those of ``tls.ca``;
    ``SettingsError``: a file of authorities cannot be used.
    """
    tls = settings.tls
    if (url or own_url(settings)).startswith("http:"):
        return True
    if not url:
        with suppress(OSError, ValueError):  # this user may not read it
            return _only_own(tls)
    try:
        return client_context(tls.ca)
    except TrustError as error:
        raise SettingsError(str(error)) from None


def _only_own(tls: TlsSettings) -> ssl.SSLContext:
    assert tls.certificate is not None
    own, end, _ = tls.certificate.read_text("ascii").partition(END_OF_FIRST)
    context = ssl.create_default_context(cadata=own + end)
    # the settings may name another certificate than the one that is still in use
    if tls.ca is not None:
        context.load_verify_locations(tls.ca)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False
    load_own(context, tls)
    return context


def load_own(context: ssl.SSLContext, tls: TlsSettings) -> None:
    """Show the router's own certificate to it, if this user may read its key: ``tls.client_ca`` may want one."""
    if tls.certificate is not None:
        with suppress(OSError):
            context.load_cert_chain(tls.certificate, tls.key)


def is_alone(context: typer.Context) -> bool:
    """Tell whether a command has no subcommand; ``typer.BadParameter``: an option before one would not reach it."""
    for name in context.params if context.invoked_subcommand is not None else ():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(
                f"give --{name} after '{context.invoked_subcommand}', which would not get it here"
            )
    return context.invoked_subcommand is None


def why_unauthorized(response: httpx.Response) -> str:
    """Return what is wrong with the key that was sent, in the router's words, or that one is needed; reads the answer."""
    if "authorization" not in response.request.headers:
        return KEY_NEEDED
    try:
        why = json.loads(response.read())["detail"]
    except (ValueError, KeyError, TypeError):
        why = "the key is not valid here"
    return f"{why}: give another with --key or in QARR_KEY; 'qarr keys list' has those in force"


def authorization(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}
