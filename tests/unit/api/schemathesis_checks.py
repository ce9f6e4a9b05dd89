"""What schemathesis checks here besides its own: loaded by it, as ``SCHEMATHESIS_HOOKS`` says."""

from __future__ import annotations

import schemathesis
from schemathesis import Case, CheckContext, HookContext, Response


@schemathesis.hook
def filter_case(_ctx: HookContext, case: Case) -> bool:
    """Leave out headers that nobody knows, which HTTP has ignored."""
    return "x-schemathesis-unknown-property" not in (case.headers or {})


@schemathesis.check
def not_a_fault(_ctx: CheckContext, response: Response, _case: Case) -> None:
    """No answer is a server's fault; bounds that a request makes mandatory and nothing meets are refused with 503."""
    refused = response.status_code == 503 and "quality_loss is" in response.text
    assert response.status_code < 500 or refused, response.text
