"""``qarr health``, as containers ask it; under TLS it is tested with the server's."""

from __future__ import annotations

import pytest

from tests.unit.cli.stub_router import qarr, stub_router


@pytest.mark.parametrize(
    ("args", "path"), [((), "GET /healthz"), (("--ready",), "GET /readyz")]
)
@pytest.mark.parametrize("status", [200, 503])
def test_the_exit_status_is_the_routers_health(
    args: tuple[str, ...], path: str, status: int
) -> None:
    """The settings say where the router is; no proxy of the environment is asked; without an answer it is 1 too."""
    proxies = dict.fromkeys(
        ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"), "http://127.0.0.1:9"
    )
    with stub_router(**{path: (status, {"status": "said"})}) as router:
        port = {"QARR_SERVER__PORT": router.url.rpartition(":")[2]}
        result = qarr("health", *args, **port, **proxies)
        assert result.exit_code == int(status != 200)
        assert router.asked == [path]
        assert router.keys == [None]
        assert '{"status": "said"}' in result.output
    result = qarr("health", *args, **port)
    assert result.exit_code == 1
    assert "no answer (ConnectError" in result.stderr
