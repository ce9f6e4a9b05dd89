"""``qarr reload``: have the running router read its settings again."""

from __future__ import annotations

import typer

from router.cli.client import RouterApiClient  # noqa: TC001  typer reads it
from router.cli.common import with_options


@with_options
def reload(router: RouterApiClient) -> None:
    """Apply changed settings to the running router, without a restart: all of them, or none.

    It reads the file and variables that it was started with. SIGHUP does the same.
    """
    changed = router.ask("/admin/reload", "POST")["changed"]
    for change in changed:
        typer.echo(f"{change['setting']}: {change['before']} -> {change['after']}")
    typer.echo(f"settings reloaded: {len(changed)} changed")
