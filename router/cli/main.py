"""The ``qarr`` command. What a command does not need is not imported: serving loads ten times as much as a help text."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer

from router.cli.common import fail

# Name → module, what stands for it there (a function, or an application with commands of its own), and panel of the help.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "up": ("serve", "up", "Serve"),
    "serve": ("serve", "serve", "Serve"),
    "demo": ("demo", "demo", "Serve"),
    "router": ("serve", "serve", "Serve"),  # what it is called elsewhere
    "model": ("model", "model_app", "Serve"),
    "plan": ("plan", "plan", "Measure"),
    "classify": ("classify", "classify", "Measure"),
    "profile": ("profile", "profile_app", "Measure"),
    "reload": ("show_settings", "reload", "Operate"),
    "tiers": ("tiers", "tiers_app", "Operate"),
    "adapters": ("adapters", "adapters_app", "Operate"),
    "keys": ("keys", "keys_app", "Operate"),
    "top": ("top", "top", "Look"),
    "logs": ("logs", "logs", "Look"),
    "doctor": ("doctor.command", "doctor", "Look"),
    "health": ("health", "health", "Look"),
    "settings": ("show_settings", "show_settings", "Look"),
}
HIDDEN = {"router"}
# in the help, and as suggestions for a mistyped name
SHOWN = [name for name in COMMANDS if name not in HIDDEN]
# Errors that end a command with their text, and where they are defined.
EXPECTED = (
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
    """Run the command; expected errors end it with their text and status 2, not with a traceback."""
    # in a container, where the kernel keeps a signal from a process that does not handle it
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    named = sys.argv[1] if len(sys.argv) > 1 else ""
    try:
        make_app(
            (named,) if named in COMMANDS else () if named == "--version" else SHOWN
        )()
    except Exception as error:
        if not isinstance(
            error,
            tuple(getattr(import_module(module), name) for module, name in EXPECTED),
        ):
            raise
        fail(str(error))


def make_app(names: Iterable[str] = SHOWN) -> typer.Typer:
    app = typer.Typer(
        help="Serve one language model at three precisions; send each prompt to the soonest that is good enough.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name in names:
        module, attribute, panel = COMMANDS[name]
        found: Any = getattr(import_module(f"router.cli.{module}"), attribute)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name, rich_help_panel=panel)
        else:
            app.command(name, hidden=name in HIDDEN, rich_help_panel=panel)(found)
    return app


def _print_version(wanted: bool) -> None:  # noqa: FBT001  typer's callback
    if wanted:
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
