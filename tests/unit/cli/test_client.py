"""The client of a running router: what it sends, and what each failure says."""

from __future__ import annotations

import pytest

from router.cli.client import KEY_NEEDED, NotFound, RouterApiClient, authorization
from tests.unit.cli.stub_router import stub_router
from tiers.errors import OperationError


def test_it_sends_the_key_and_returns_the_object() -> None:
    """A slash at the end of the URL does not count; the method is GET unless another is given."""
    with stub_router(**{"GET /tiers": (200, {"model": "m"}), "POST /admin/x": (202, {"id": "1"})}) as router:
        client = RouterApiClient(f"{router.url}/", "secret")
        assert client.ask("/tiers") == {"model": "m"}
        assert client.ask("/admin/x", "POST") == {"id": "1"}
    assert router.asked == ["GET /tiers", "POST /admin/x"]
    assert router.keys == ["Bearer secret", "Bearer secret"]


def test_without_a_key_no_header_is_sent() -> None:
    assert authorization("") == {}
    with stub_router(**{"GET /": (200, {})}) as router:
        RouterApiClient(router.url, "").ask("/")
    assert router.keys == [None]


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        ((401, {"detail": "no"}), OperationError, KEY_NEEDED),
        ((401, b"<html>"), OperationError, KEY_NEEDED),
        ((404, {"detail": "no such replica"}), NotFound, "no such replica"),
        ((409, {"detail": "it is busy"}), OperationError, "it is busy"),
        ((503, {"error": "odd"}), OperationError, "{'error': 'odd'}"),
        ((200, b"<html>"), OperationError, "answered HTTP 200: is this a router?"),
        ((502, b""), OperationError, "answered HTTP 502: is this a router?"),
    ],
)
def test_refusals_say_why(answer: tuple[int, object], kind: type[OperationError], said: str) -> None:
    """The router's own detail if there is one; only 404 is a ``NotFound``."""
    with stub_router(**{"GET /x": answer}) as router, pytest.raises(OperationError) as caught:
        RouterApiClient(router.url, "").ask("/x")
    assert type(caught.value) is kind
    assert said in str(caught.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "ftp://h", "http://", "http://h:port"])
def test_no_answer_names_the_address(url: str) -> None:
    """Whatever is wrong with the address, it is named with what to do."""
    with pytest.raises(OperationError, match="'make up' starts one") as caught:
        RouterApiClient(url, "").ask("/tiers")
    assert url.rstrip("/") in str(caught.value)
