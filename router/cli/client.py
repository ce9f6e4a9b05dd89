"""A client of a running router, for the commands that look at it or operate on it."""

from __future__ import annotations

from typing import Annotated, Any

import httpx
import typer

from tiers.errors import OperationError

URL = "http://127.0.0.1:8080"
TIMEOUT_S = 30.0
UrlOption = Annotated[str, typer.Option(help="The running router.")]
KeyOption = Annotated[
    str, typer.Option(help="A key for the router; operations need one made with --admin.", envvar="QARR_KEY")
]


class NotKept(OperationError):
    """The router has no such thing (HTTP 404)."""


class RouterApiClient:
    """A client of the running router.

    Raises everywhere:
        OperationError: It does not answer, or refuses.
        NotKept: It has no such thing.
    """

    def __init__(self, url: str, key: str, timeout_s: float = TIMEOUT_S) -> None:
        self.url = url.rstrip("/")
        self.headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(base_url=self.url, headers=self.headers, timeout=timeout_s, trust_env=False)

    def get(self, path: str) -> dict[str, Any]:
        """Return what the router answers."""
        return self.ask("GET", path)

    def ask(self, method: str, path: str) -> dict[str, Any]:
        """Return what the router answers to a request without a body."""
        try:
            response = self._client.request(method, path)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise OperationError(no_answer(self.url, error)) from error
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise OperationError(KEY_NEEDED)
        try:
            answer: dict[str, Any] = response.json()
        except ValueError as error:
            raise OperationError(f"{self.url}{path} answered HTTP {response.status_code}: is this a router?") from error
        if response.is_error:
            kind = NotKept if response.status_code == httpx.codes.NOT_FOUND else OperationError
            raise kind(str(answer.get("detail", answer)))
        return answer


KEY_NEEDED = "the router needs a key: give one with --key or in the variable QARR_KEY"


def no_answer(url: str, error: Exception) -> str:
    """Say that no router answers, and what to do."""
    return f"no router answers at {url} ({type(error).__name__}): 'make up' starts one, --url names another"
