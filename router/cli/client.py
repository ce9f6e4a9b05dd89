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

from router.cli.common import err, http_url, plain
from router.section import SettingsError
from router.server.settings import TlsSettings
from router.settings import Settings, load_settings
from tiers.errors import OperationError, TrustError
from tiers.trust import client_context, tls_fault

TIMEOUT_S = 30.0
KEY_NEEDED = "the router needs a key: give one with --key or in the variable QARR_KEY"
# The answer of vLLM's server for an unknown path; a router's answer names the path.
NOT_FOUND = {"detail": "Not Found"}
END_OF_CERTIFICATE = "-----END CERTIFICATE-----"
# Addresses that stand for every address of this machine, and where it reaches itself.
LOOPBACK_OF_ANY_HOST = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}
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
        self, url: str = "", key: str = "", config_path: Path | None = None
    ) -> None:
        self.url = url
        self._key = key
        self._config = config_path

    @cached_property
    def http(self) -> httpx.Client:
        self.url, verify = find_router(self.url, self._config)
        return httpx.Client(
            base_url=self.url,
            headers=authorization(self._key),
            timeout=TIMEOUT_S,
            trust_env=False,
            verify=verify,
        )

    def ask(
        self,
        path: str,
        method: str = "GET",
        body: dict[str, Any] | None = None,
        *,
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
            answer = response.json()
        except ValueError as error:
            raise OperationError(self._why_no_router(path, response)) from error
        if not isinstance(answer, dict):
            raise OperationError(self._why_no_router(path, response))
        if response.status_code == httpx.codes.NOT_FOUND and answer == NOT_FOUND:
            raise OperationError(self._why_no_router(path, response))
        if response.is_error:
            raise OperationError(_refusal_text(answer))
        return answer

    def _why_no_router(self, path: str, response: httpx.Response) -> str:
        unless_engine = (
            f"{self.url}{path} answered HTTP {response.status_code}: is this a router?"
        )
        return why_no_router(self.url, self.http.get, unless_engine=unless_engine)

    def no_answer(self, error: Exception) -> OperationError:
        """Return the error for a router that cannot be reached."""
        why = tls_fault(error) or str(error) or "no reason given"
        return OperationError(
            f"no router answers at {self.url} ({why}): 'make up' starts one, --url names another"
        )


def _refusal_text(answer: dict[str, Any]) -> str:
    """Return why a router refuses a request: what is wrong with each field, or the answer's detail."""
    wrong_fields = [
        f"{field['field']}: {field['problem']} (allowed: {field['allowed']})"
        for field in answer.get("errors", ())
    ]
    if wrong_fields:
        return "; ".join(wrong_fields)
    return str(answer.get("detail", answer))


def engine_version(get: Callable[[str], httpx.Response | None]) -> str | None:
    """Return the version of the vLLM engine that answers; None: no engine answers, or it does not tell its version."""
    with suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
        answer = get("/version")
        if answer is not None and answer.is_success:
            return str(answer.json()["version"])
    return None


def why_no_router(
    url: str, get: Callable[[str], httpx.Response | None], *, unless_engine: str
) -> str:
    """Return that an engine answers where a router is expected, or another text if no engine does."""
    version = engine_version(get)
    if version is None:
        return unless_engine
    return f"{url} is an engine (vLLM {version}), not a router: give the router's address with --url or QARR_URL"


def find_router(
    url: str, config_path: Path | None = None
) -> tuple[str, ssl.SSLContext | bool]:
    """Return a running router's URL, by default that of the settings, and its trusted certificates; print the URL.

    Raises:
        SettingsError: The settings are not valid, or name no port.
    """
    router_url = url.rstrip("/")
    if router_url.startswith("http:"):
        verify: ssl.SSLContext | bool = True
    else:
        settings = load_settings(config_path)
        if not router_url and not settings.server.port:
            raise SettingsError(
                "server.port is 0, any free port: name the running router with --url or QARR_URL"
            )
        verify = trusted(settings, router_url)
        router_url = router_url or own_url(settings)
    err.print(plain(f"router {router_url}"))
    return router_url, verify


def own_url(settings: Settings, port: int | None = None) -> str:
    """Return where this machine reaches the router of the settings, or a router like it on another port."""
    listening_host = settings.server.host
    host = LOOPBACK_OF_ANY_HOST.get(listening_host, listening_host)
    if port is None:
        port = settings.server.port
    scheme = "http" if settings.tls.certificate is None else "https"
    return http_url(host, port, scheme)


def unverified(settings: Settings) -> ssl.SSLContext:
    """Return a context that accepts any certificate of a router.

    It is only for requests without a key, which the router answers to everybody.
    """
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    load_own(context, settings.tls)
    return context


def trusted(settings: Settings, url: str = "") -> ssl.SSLContext | bool:
    """Return which certificates a router may show.

    The settings' own router (no ``url``) may show ``tls.certificate`` only, which need not name the address. The certificate
    of another router has to be signed by an authority of the system or of ``tls.ca``.

    Raises:
        SettingsError: A file of authorities cannot be used.
    """
    tls = settings.tls
    if (url or own_url(settings)).startswith("http:"):
        return True
    if not url:
        # This user may lack the right to read the certificate.
        with suppress(OSError, ValueError):
            return _only_own(tls)
    try:
        return client_context(tls.ca)
    except TrustError as error:
        raise SettingsError(str(error)) from None


def _only_own(tls: TlsSettings) -> ssl.SSLContext:
    """Return a context that accepts the settings' own certificate only."""
    assert tls.certificate is not None
    text, end_mark, _ = tls.certificate.read_text("ascii").partition(END_OF_CERTIFICATE)
    context = ssl.create_default_context(cadata=text + end_mark)
    # The running router may still use an older certificate than the one that the settings name.
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
    """Tell whether a command has no subcommand.

    Raises:
        typer.BadParameter: An option stands before the subcommand, which would not get it there.
    """
    if context.invoked_subcommand is None:
        return True
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(
                f"give --{name} after '{context.invoked_subcommand}', which would not get it here"
            )
    return False


def why_unauthorized(response: httpx.Response) -> str:
    """Return the router's words about the key that was sent, or that a key is needed. The answer is read for it."""
    if "authorization" not in response.request.headers:
        return KEY_NEEDED
    try:
        why = json.loads(response.read())["detail"]
    except (ValueError, KeyError, TypeError):
        why = "the key is not valid here"
    return f"{why}: give another with --key or in QARR_KEY; 'qarr keys list' has those in force"


def authorization(key: str) -> dict[str, str]:
    """Return the headers that show a key, if there is one."""
    if not key:
        return {}
    return {"authorization": f"Bearer {key}"}
