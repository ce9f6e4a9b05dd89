"""Which module of which architecture gets which format: made anew of tiny models, and compared with the committed table."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from router.settings import load_settings
from tiers.checkpoints.recipes import scheme_names

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "benchmarks/checkpoint_formats.py"
TABLE = ROOT / "benchmarks/results/checkpoint_formats.txt"
# Quick ones; the table has all. NVFP4 runs prompts through the model, with all experts.
SCHEMES = ("fp8-block", "nvfp4-w4a16", "int4")
CALIBRATED = ("DeepseekV3ForCausalLM", "nvfp4")


def sections(text: str) -> dict[str, list[str]]:
    """Return the lines of each architecture and scheme."""
    lines_by_head: dict[str, list[str]] = {}
    head = ""
    for line in text.splitlines():
        if line and not line.startswith((" ", "$")):
            head = line
            lines_by_head[head] = []
        elif head:
            lines_by_head[head].append(line)
    return lines_by_head


def made_by(*arguments: str) -> dict[str, list[str]]:
    """Return what the program shows."""
    python = load_settings(None, {}).quantizer.python
    process = subprocess.run(
        [python, "-P", PROGRAM, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return sections(process.stdout)


@pytest.mark.parametrize(
    "arguments",
    [
        tuple(part for scheme in SCHEMES for part in ("--scheme", scheme)),
        ("--architecture", CALIBRATED[0], "--scheme", CALIBRATED[1]),
    ],
    ids=["rounded", "calibrated"],
)
def test_modules_have_the_formats_of_the_table(arguments: tuple[str, ...]) -> None:
    """Output heads, routers and vision towers stay in BF16; experts and attention do not."""
    made = made_by(*arguments)
    committed = sections(TABLE.read_text("utf-8"))
    assert made
    for head, lines in made.items():
        assert lines == committed[head], head


def test_each_architecture_has_each_scheme() -> None:
    """None fails, and experts are never left out."""
    committed = sections(TABLE.read_text("utf-8"))
    architectures = {head.partition(",")[0] for head in committed}
    assert len(architectures) == 7
    assert len(committed) == len(architectures) * len(scheme_names())
    for head, lines in committed.items():
        text = "\n".join(lines)
        in_16_bits = text.partition("scale")[0]
        assert "fails" not in text, head
        assert "experts" not in in_16_bits, head
