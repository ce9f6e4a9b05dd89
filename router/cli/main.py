"""The ``qarr`` command. What a command does not need is not imported: serving loads ten times as much as a help text."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any, NamedTuple

import typer

from router.cli.common import fail


class LazyCommand(NamedTuple):
    """Where a command is defined, and where it is listed.

    Attributes:
        module: In this package.
        attribute: A function of that module, or an application that has commands of its own.
        panel: Part of the help.
    """

    module: str
    attribute: str
    panel: str


COMMANDS: dict[str, LazyCommand] = {
    "up": LazyCommand("serve", "up", panel="Serve"),
    "serve": LazyCommand("serve", "serve", panel="Serve"),
    "demo": LazyCommand("demo", "demo", panel="Serve"),
    "router": LazyCommand(
        "serve", "serve", panel="Serve"
    ),  # its name in other projects
    "model": LazyCommand("model", "model_app", panel="Serve"),
    "plan": LazyCommand("plan", "plan", panel="Measure"),
    "classify": LazyCommand("classify", "classify", panel="Measure"),
    "profile": LazyCommand("profile", "profile_app", panel="Measure"),
    "verify": LazyCommand("verify", "verify", panel="Measure"),
    "reload": LazyCommand("show_settings", "reload", panel="Operate"),
    "tiers": LazyCommand("tiers", "tiers_app", panel="Operate"),
    "adapters": LazyCommand("adapters", "adapters_app", panel="Operate"),
    "keys": LazyCommand("keys", "keys_app", panel="Operate"),
    "top": LazyCommand("top", "top", panel="Look"),
    "logs": LazyCommand("logs", "logs", panel="Look"),
    "doctor": LazyCommand("doctor.command", "doctor", panel="Look"),
    "health": LazyCommand("health", "health", panel="Look"),
    "settings": LazyCommand("show_settings", "show_settings", panel="Look"),
}
HIDDEN = {"router"}
# The help lists these, and a mistyped name is compared with them.
SHOWN = [name for name in COMMANDS if name not in HIDDEN]
# Modules and names of the errors that end a command with their text.
EXPECTED_ERRORS = (
    ("router.section", "SettingsError"),
    ("tiers.errors", "TierError"),
    ("classifier", "TokenizerError"),
    ("router.deployment.listening", "ListenError"),
    ("router.deployment.run", "StartError"),
    ("router.auth.api_keys", "KeysError"),
    ("router.redis_link", "RedisSetupError"),
    ("router.server.tls", "TlsError"),
    ("router.policy.profiles", "ProfileError"),
    ("router.server.handover", "TakeoverError"),
    ("builtins", "PermissionError"),  # its text names the path
)


def main() -> None:
    """Run the command. An expected error ends it with the error's text and status 2, not with a traceback."""
    if os.getpid() == 1:
        # A container's first process gets no signal that it does not handle.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    try:
        make_app(_needed_commands())()
    except Exception as error:
        if not _is_expected(error):
            raise
        fail(str(error))


def _needed_commands() -> Sequence[str]:
    """Return the commands that have to be imported to answer the command line."""
    first_argument = sys.argv[1] if len(sys.argv) > 1 else ""
    if first_argument in COMMANDS:
        return (first_argument,)
    if first_argument == "--version":
        return ()
    return SHOWN


def _is_expected(error: Exception) -> bool:
    return any(
        isinstance(error, getattr(import_module(module), name))
        for module, name in EXPECTED_ERRORS
    )


def make_app(names: Iterable[str] = SHOWN) -> typer.Typer:
    """Return the application with some of its commands."""
    app = typer.Typer(
        help="Serve one language model at three precisions; send each prompt to the soonest that is good enough.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name in names:
        command = COMMANDS[name]
        module = import_module(f"router.cli.{command.module}")
        implementation: Any = getattr(module, command.attribute)
        if isinstance(implementation, typer.Typer):
            app.add_typer(implementation, name=name, rich_help_panel=command.panel)
        else:
            register = app.command(
                name,
                cls=getattr(module, "COMMAND_CLASS", None),
                hidden=name in HIDDEN,
                rich_help_panel=command.panel,
            )
            register(implementation)
    return app


def _print_version(is_wanted: bool) -> None:  # noqa: FBT001  typer's callback
    if is_wanted:
        typer.echo(f"qarr {version('qarr')}")
        raise typer.Exit


def _root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version.",
        ),
    ] = False,
) -> None:
    pass


if __name__ == "__main__":
    main()
