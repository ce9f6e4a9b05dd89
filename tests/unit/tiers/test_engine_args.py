"""Arguments that a person gives to engines: what is refused at once, and what vLLM is asked.

A stand-in for vLLM's server reads them here; ``tests/engine`` asks the real one.
"""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from tiers.errors import EngineError
from tiers.lifecycle.engine_args import OWN, check_engine_args, check_own
from tiers.spec import STANDARD_TIERS

FAST, BALANCED, PRECISE = STANDARD_TIERS
SERVER = """
import argparse, sys, uvloop

async def serve():
    raise AssertionError("the server was started")

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", choices=["half", "float"])
parser.add_argument("--parser")
parser.add_argument("--auto", action="store_true")
args = parser.parse_args()
if args.auto and not args.parser:
    raise TypeError("--auto requires --parser")
print("noise")
uvloop.run(serve())
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Return an interpreter whose vLLM is the stand-in; it counts how often it is started."""
    package = tmp_path / "lib" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "api_server.py").write_text(SERVER)
    script = tmp_path / "bin" / "python"
    script.parent.mkdir()
    script.write_text(
        f'#!/bin/sh\necho . >> {tmp_path}/started\nPYTHONPATH={tmp_path}/lib exec {sys.executable} "$@"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def started(tmp_path: Path) -> int:
    path = tmp_path / "started"
    return len(path.read_text().split()) if path.exists() else 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--dytpe", "half"), "unrecognized arguments: --dytpe half"),
        (("--dtype", "int3"), "argument --dtype: invalid choice: 'int3'"),
        (("--auto",), "--auto requires --parser"),
    ],
)
def test_vllms_own_words_are_told(
    tmp_path: Path, python: Path, args: tuple[str, ...], said: str
) -> None:
    """With the tier, its arguments and the settings that have them."""
    with pytest.raises(EngineError) as error:
        check_engine_args(
            python, {FAST: ("--dtype", "half"), PRECISE: args}, tmp_path / "known"
        )
    assert f"tier precise, {' '.join(args)}: " in str(error.value)
    assert said in str(error.value)
    assert "tiers.precise.engine_args" in str(error.value)


def test_what_was_accepted_is_not_asked_again(tmp_path: Path, python: Path) -> None:
    """All tiers are asked about at once; without arguments, nothing is asked."""
    known = tmp_path / "known"
    given = {FAST: ("--dtype", "half"), BALANCED: ("--parser", "x"), PRECISE: ()}
    check_engine_args(python, {FAST: (), PRECISE: ()}, known)
    assert started(tmp_path) == 0
    asked: list[None] = []
    for _ in range(3):
        check_engine_args(python, given, known, lambda: asked.append(None))
    assert started(tmp_path) == len(asked) == 1
    check_engine_args(python, {**given, PRECISE: ("--dtype", "float")}, known)
    assert started(tmp_path) == 2
    # another version
    (tmp_path / "lib" / "python3.11" / "site-packages" / "vllm-9.dist-info").mkdir(
        parents=True
    )
    check_engine_args(python, given, known)
    assert started(tmp_path) == 3


def test_a_broken_environment_is_left_to_its_engines(tmp_path: Path) -> None:
    """They say what is wrong with it when they start."""
    check_engine_args(tmp_path / "none", {FAST: ("--x",)}, tmp_path / "known")
    check_engine_args(tmp_path, {FAST: ("--x",)}, tmp_path / "known")


@pytest.mark.parametrize("name", OWN)
def test_what_qarr_gives_itself_is_refused(name: str) -> None:
    """In every spelling that vLLM takes; the text says where it is set, if anywhere."""
    for args in (
        (name, "1"),
        (f"{name}=1",),
        (name.replace("-", "_").replace("__", "--", 1), "1"),
    ):
        with pytest.raises(
            ValueError,
            match=f"{name} is QARR's own: (set [A-Za-z_.<>]+ instead|it cannot be changed)",
        ):
            check_own(("--dtype", "half", *args))
    check_own(("--dtype", "model", "--model-impl", "auto", "-O0"))
