"""A client of a running router, for the commands that show it or operate on it."""

from __future__ import annotations

import ssl
from typing import Annotated, Any

import httpx
import typer

from tiers.errors import OperationError

URL = "http://127.0.0.1:8080"
TIMEOUT_S = 30.0
KEY_NEEDED = "the router needs a key: give one with --key or in the variable QARR_KEY"
UrlOption = Annotated[str, typer.Option(help="The running router.")]
KeyOption = Annotated[
    str, typer.Option(help="A key for the router; operations need one made with --admin.", envvar="QARR_KEY")
]


class NotFound(OperationError):
    """The router answers HTTP 404."""


class RouterApiClient:
    """A client of the running router."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url.rstrip("/")
        self._client = httpx.Client(headers=authorization(key), timeout=TIMEOUT_S, trust_env=False, verify=trusted(url))

    def ask(
        self, path: str, method: str = "GET", body: dict[str, Any] | None = None, timeout_s: float = TIMEOUT_S
    ) -> dict[str, Any]:
        """Return the JSON object with which the router answers a request.

        Raises:
            OperationError: The router does not answer, or refuses.
            NotFound: It answers HTTP 404.
        """
        try:
            response = self._client.request(method, self.url + path, json=body, timeout=timeout_s)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise OperationError(no_answer(self.url, error)) from error
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise OperationError(KEY_NEEDED)
        try:
            answer: dict[str, Any] = response.json()
        except ValueError as error:
            raise OperationError(f"{self.url}{path} answered HTTP {response.status_code}: is this a router?") from error
        if response.is_error:
            kind = NotFound if response.status_code == httpx.codes.NOT_FOUND else OperationError
            raise kind(_said(answer))
        return answer


def _said(answer: dict[str, Any]) -> str:
    """Return the text of an error: the fields that are wrong and what they may be, else its detail."""
    wrong = [f"{e['field']}: {e['problem']} (allowed: {e['allowed']})" for e in answer.get("errors", ())]
    return "; ".join(wrong) or str(answer.get("detail", answer))


def trusted(url: str) -> ssl.SSLContext | bool:
    """Return by which authorities a router's certificate is trusted: those of ``tls.ca``, else the system's.

    Raises:
        SettingsError: The settings are not valid, or the file cannot be used.
    """
    if not url.startswith("https:"):
        return True
    from router.settings import SettingsError, load_settings  # noqa: PLC0415  takes a while, and few need it

    ca = load_settings().tls.ca
    try:
        return ssl.create_default_context(cafile=ca) if ca is not None else True
    except (OSError, ValueError) as error:
        raise SettingsError(f"tls.ca: {ca} cannot be used ({error}); a PEM file of authorities is allowed") from None


def authorization(key: str) -> dict[str, str]:
    """Return the headers that carry a key; none for an empty key."""
    return {"authorization": f"Bearer {key}"} if key else {}


def no_answer(url: str, error: Exception) -> str:
    """Return an error text that says that no router answers, and what to do."""
    return f"no router answers at {url} ({type(error).__name__}): 'make up' starts one, --url names another"
