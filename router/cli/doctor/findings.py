"""What the checks of ``qarr doctor`` are about, and what they find."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import httpx

from router.cli.client import authorization, own_url, trusted
from router.settings import Settings

TIMEOUT_S = 3.0


class Health(StrEnum):
    """How a check ends."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Attributes:
        check: Name of the check; empty: the name in ``CHECKS``.
        text: What was found, for people.
        remedy: What to do next; empty if nothing is to be done.
        group: Where the finding is listed; ``CHECKS`` supplies it.
    """

    health: Health
    text: str
    remedy: str = ""
    check: str = ""
    group: str = ""


def ok(text: str, check: str = "") -> Finding:
    """Return a finding that needs nothing to be done."""
    return Finding(Health.OK, text, check=check)


def warning(text: str, remedy: str, check: str = "") -> Finding:
    """Return a finding that may need something to be done."""
    return Finding(Health.WARNING, text, remedy=remedy, check=check)


def problem(text: str, remedy: str, check: str = "") -> Finding:
    """Return a finding that keeps something from working."""
    return Finding(Health.PROBLEM, text, remedy=remedy, check=check)


@dataclass(frozen=True, slots=True)
class CheckContext:
    """What is checked.

    Attributes:
        url: Where a running router is; empty: where the settings say.
        key: For that router.
    """

    settings: Settings
    url: str
    key: str

    @property
    def router_url(self) -> str:
        """Return the address of the router that is checked."""
        return self.url or own_url(self.settings)

    def ask_router(self, path: str) -> httpx.Response | None:
        """Return what the running router answers; None: there is no answer."""
        url = self.router_url + path
        verify = trusted(self.settings, self.url)
        try:
            return httpx.get(
                url,
                headers=authorization(self.key),
                timeout=TIMEOUT_S,
                trust_env=False,
                verify=verify,
            )
        except (httpx.HTTPError, httpx.InvalidURL):
            return None
