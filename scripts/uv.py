"""Run the pinned uv with pip's settings: python scripts/uv.py ARGUMENTS...

uv comes from the package index, checked against the hashes in requirements/uv.txt, into an environment of its own in
QARR_CACHE_DIR. What it downloads is kept there too, so that environments share files.

uv does not read pip's variables or pip.conf. So that a machine on which pip finds its index needs no second configuration,
they are passed on in uv's own variables, unless those are set. Where none names an index or a folder, uv itself knows where
the CPU builds are that requirements/*-cpu.txt lock.
"""

from __future__ import annotations

import ast
import fcntl
import os
import subprocess
import sys
from pathlib import Path

LOCK = Path(__file__).parent.parent / "requirements/uv.txt"
SECTIONS = ("global", "install", ":env:")  # as pip reads them: the later one counts
# pip's setting, uv's variables for it (of which none may be set), and what uv writes between two values
SAME = (
    ("index-url", ("UV_DEFAULT_INDEX", "UV_INDEX_URL"), None),
    ("extra-index-url", ("UV_INDEX", "UV_EXTRA_INDEX_URL"), " "),
    ("find-links", ("UV_FIND_LINKS",), ","),
    ("trusted-host", ("UV_INSECURE_HOST",), " "),
    ("cert", ("SSL_CERT_FILE",), None),
    ("client-cert", ("SSL_CLIENT_CERT",), None),
    ("proxy", ("ALL_PROXY", "HTTPS_PROXY", "https_proxy"), None),
    ("default-timeout", ("UV_HTTP_TIMEOUT",), None),
    ("timeout", ("UV_HTTP_TIMEOUT",), None),
)
# What says where packages are. If any is set, nothing else is asked.
PLACES = (
    "UV_DEFAULT_INDEX",
    "UV_INDEX_URL",
    "UV_INDEX",
    "UV_EXTRA_INDEX_URL",
    "UV_FIND_LINKS",
    "UV_TORCH_BACKEND",
)
PLACE_OPTIONS = (
    "--index",
    "--default-index",
    "--extra-index-url",
    "--find-links",
    "--no-index",
    "--torch-backend",
)


def pip_settings(python: Path) -> dict[str, str]:
    """Return what pip is told by its files and its variables, by name."""
    listed = subprocess.run(
        [python, "-m", "pip", "config", "list"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in found:
            found[section][name.removeprefix("--")] = str(ast.literal_eval(value))
    return {
        name: value for section in SECTIONS for name, value in found[section].items()
    }


def uv_settings(pip: dict[str, str], environment: dict[str, str]) -> dict[str, str]:
    """Return the variables that tell uv what pip is told, less what the environment tells it already."""
    told = {}
    for name, variables, between in SAME:
        if name not in pip or any(variable in environment for variable in variables):
            continue
        told[variables[0]] = between.join(pip[name].split()) if between else pip[name]
    if "UV_INDEX" in told and "UV_INDEX_STRATEGY" not in environment:
        told["UV_INDEX_STRATEGY"] = (
            # all indexes alike, as pip does; hashes say which file is right
            "unsafe-best-match"
        )
    return told


def torch_backend(arguments: list[str], environment: dict[str, str]) -> list[str]:
    """Return the option with which uv finds torch's CPU build, for a lock that has it, unless told where packages are."""
    locked = any(argument.endswith("-cpu.txt") for argument in arguments)
    told = any(environment.get(name) for name in PLACES) or any(
        each.startswith(PLACE_OPTIONS) for each in arguments
    )
    return (
        ["--torch-backend", "cpu"]
        if arguments[:2] == ["pip", "install"] and locked and not told
        else []
    )


def install_uv(environments: Path) -> Path:
    """Return an environment that has the pinned uv, and pip, after making it where it is missing.

    Raises:
        subprocess.CalledProcessError: A command failed; it has said why.
    """
    environment = (
        environments / f"uv-{LOCK.read_text('utf-8').split('==')[1].split()[0]}"
    )
    environments.mkdir(parents=True, exist_ok=True)
    with (environments / "uv.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (environment / ".complete").exists():
            subprocess.run(
                [sys.executable, "-m", "venv", "--clear", environment],
                check=True,
                stdout=sys.stderr,
            )
            argv = [
                environment / "bin/python",
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
            ]
            subprocess.run(
                [*argv, "--no-deps", "--require-hashes", "-r", LOCK],
                check=True,
                stdout=sys.stderr,
            )
            (environment / ".complete").touch()
    return environment


def main() -> None:
    """Become uv."""
    environment = dict(os.environ)
    caches = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    cache = Path(environment.get("QARR_CACHE_DIR") or f"{caches}/qarr")
    try:
        installed = install_uv(cache / "envs")
        pip = pip_settings(installed / "bin/python")
    except subprocess.CalledProcessError as error:
        sys.exit(
            f"error: uv could not be installed: '{' '.join(map(str, error.cmd))}' ended with {error.returncode}"
        )
    ours = {
        # beside the environments, which get links to its files
        "UV_CACHE_DIR": str(cache / "uv"),
        # for one file, on a machine that does much else
        "UV_COMPILE_BYTECODE_TIMEOUT": "600",
        "UV_NO_PROGRESS": "1",
        "UV_PYTHON_DOWNLOADS": "never",
        **uv_settings(pip, environment),
    }
    arguments = sys.argv[1:]
    if arguments[:1] == ["pip"] and pip.get("no-index", "").lower() in {
        "1",
        "on",
        "true",
        "yes",
    }:
        arguments.append("--no-index")
    program, environment = installed / "bin/uv", {**ours, **environment}
    arguments += torch_backend(arguments, environment)
    os.execve(program, [str(program), *arguments], environment)  # noqa: S606


if __name__ == "__main__":
    main()
