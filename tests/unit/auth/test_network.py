"""Which addresses need no key."""

from __future__ import annotations

import pytest

from router.auth.network import is_loopback


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.255.255.254", "::1"])
def test_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host",
    ["", "0.0.0.0", "::", "10.0.0.1", "128.0.0.1", "::2", "LOCALHOST.example", "127.0.0.1.example", "127.1", "[::1]"],
)
def test_other_machines_and_what_only_looks_like_this_one(host: str) -> None:
    """Every interface counts as open to others; names are not resolved, since an answer may change."""
    assert not is_loopback(host)
