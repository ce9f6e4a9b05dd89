"""``qarr adapters``: the LoRA adapters of the running fleet; load more of them into its engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.table import Table

from router.cli.client import KeyOption, RouterApiClient, UrlOption, is_alone
from router.cli.common import ConfigOption, print_table, tiers_option
from tiers.errors import OperationError
from tiers.spec import TierName

LOAD_S = 300.0
adapters_app = typer.Typer(
    help="Show the LoRA adapters of the running fleet; load and unload them."
)
NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="Name that requests give as their model.")
]
PathArgument = Annotated[
    str,
    typer.Argument(
        metavar="FOLDER", help="Folder in PEFT's format, on the engines' machine."
    ),
]
ONLY_TIER = "Load it into this tier's engines only (repeat for more)."
TierOption = Annotated[list[TierName] | None, tiers_option(ONLY_TIER)]


@adapters_app.callback(invoke_without_command=True)
def adapters_list(
    context: typer.Context,
    url: UrlOption = "",
    key: KeyOption = "",
    config: ConfigOption = None,
) -> None:
    """Show the LoRA adapters of the running fleet; load and unload them."""
    if is_alone(context):
        router = RouterApiClient(url, key, config)
        _print_adapters(router.ask("/tiers")["tiers"])


@adapters_app.command("load")
def adapters_load(
    name: NameArgument,
    folder: PathArgument,
    tier: TierOption = None,
    url: UrlOption = "",
    key: KeyOption = "",
    config: ConfigOption = None,
) -> None:
    """Load an adapter into running engines. They need `lora.at_run_time`, and load it again after each restart.

    A restart of `qarr up` forgets it: name it in `lora.adapters` to keep it.
    """
    body: dict[str, Any] = {"name": name, "path": folder}
    if tier:
        body["tiers"] = list(tier)
    router = RouterApiClient(url, key, config)
    _report(router.ask("/admin/adapters", "POST", body, timeout_s=LOAD_S))


@adapters_app.command("unload")
def adapters_unload(
    name: NameArgument,
    url: UrlOption = "",
    key: KeyOption = "",
    config: ConfigOption = None,
) -> None:
    """Unload an adapter from all engines that have it. Requests for it are refused from then on."""
    router = RouterApiClient(url, key, config)
    _report(router.ask(f"/admin/adapters/{name}", "DELETE", timeout_s=LOAD_S))


def _report(answer: dict[str, Any]) -> None:
    """Print what each engine did; raise ``OperationError`` if one of them did not do it."""
    for result in answer["replicas"]:
        typer.echo(f"{result['replica']}: {result['detail']}")
    failed_replicas = [
        result["replica"] for result in answer["replicas"] if not result["done"]
    ]
    if failed_replicas:
        raise OperationError(
            f"{answer['adapter']}: not done at {', '.join(failed_replicas)}; a tier offers what all its engines have"
        )


def _print_adapters(tiers: Sequence[dict[str, Any]]) -> None:
    tiers_by_adapter: dict[str, list[str]] = {}
    for tier in tiers:
        for adapter in set(tier["adapters"]):
            tiers_by_adapter.setdefault(adapter, []).append(tier["tier"])
    if not tiers_by_adapter:
        typer.echo(
            "no tier offers an adapter: 'qarr adapters load' loads one, lora.adapters names those of every start"
        )
        return
    table = Table("adapter", "tiers", box=None)
    for adapter in sorted(tiers_by_adapter):
        table.add_row(adapter, ", ".join(tiers_by_adapter[adapter]))
    print_table(table, 200)
