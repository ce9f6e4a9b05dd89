"""Figures in the documents are those of the result files, and a result file that does not fit is an error."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("figures")


@pytest.fixture
def results(figures: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a copy of the result files, which the figures are read from."""
    folder = tmp_path / "results"
    shutil.copytree(ROOT / "benchmarks/results", folder)
    monkeypatch.setattr(figures, "RESULTS", folder)
    return folder


def marked_documents() -> list[str]:
    texts = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
    ]
    return sorted(
        str(path.relative_to(ROOT))
        for path in texts
        if re.search("<!-- figures: [a-z-]+ -->", path.read_text("utf-8"))
    )


def test_every_document_with_figures_is_written(figures: Any) -> None:
    """A marker in a document that the script does not write would never be filled."""
    assert set(marked_documents()) == set(figures.DOCUMENTS)


@pytest.mark.parametrize("name", marked_documents())
def test_figures_are_current(figures: Any, name: str) -> None:
    """README and docs/ have the figures that scripts/figures.py writes now."""
    assert (ROOT / name).read_text("utf-8") == figures.document(name), (
        "run .venv/bin/python scripts/figures.py"
    )


def test_a_changed_figure_is_put_right(figures: Any) -> None:
    """The text between two markers is replaced, and nothing else."""
    text = (ROOT / "README.md").read_text("utf-8")
    cost = re.search(r"one core serves ([\d,]+)", text)
    assert cost is not None
    changed = text.replace(cost[0], "one core serves 9,999")
    assert changed != text
    assert figures.render(changed, "benchmarks/results") == text


def test_readme_and_limits_cite_the_same_rows(figures: Any, results: Path) -> None:
    """All documents take the router's cost from one run, and change with it."""
    path = results / "side_by_side.json"
    record = json.loads(path.read_text("utf-8"))
    for rows in record["rows"].values():
        rows["QARR /v1/chat/completions"]["cpu_us"] = 400.0
    path.write_text(json.dumps(record))
    readme = " ".join(figures.document("README.md").split())
    assert "one core serves 2,500 whole answers, or 2,500 streams" in readme
    limits = figures.document("docs/limits.md")
    rows = [
        line
        for line in limits.splitlines()
        if line.startswith("|") and "chat completions" in line
    ]
    assert [row.split(" | ")[3] for row in rows if "| chat completions |" in row] == [
        "2,500"
    ] * len(record["rows"])
    assert any("**QARR, chat completions**" in row and " 400 " in row for row in rows)


def test_bursts_of_a_run_are_columns(figures: Any, results: Path) -> None:
    """A run that has them shows the first answers of new connections beside the other proxies."""
    path = results / "side_by_side.json"
    record = json.loads(path.read_text("utf-8"))
    row = {"p50": 40.4, "p99": 80.2, "most": 99.9, "answers": 64, "errors": 0}
    record["bursts"] = {
        size: dict.fromkeys(record["versions"], row) for size in ("64", "500")
    }
    path.write_text(json.dumps(record))
    limits = figures.document("docs/limits.md")
    assert (
        "first answer to 64 new connections, ms, p50 / p99 / max | first answer to 500 new"
        in limits
    )
    nginx = next(line for line in limits.splitlines() if line.startswith("| nginx"))
    assert nginx.count("40 / 80 / 100") == 2
    assert "while 64 others keep the proxy busy" in " ".join(limits.split())


@pytest.mark.parametrize(
    ("name", "line", "figure"),
    [
        ("classifier_cost.txt", "   100               44 / 68", "classifier-cost"),
        (
            "classifier_quality.txt",
            "  F1 has code                                    0.943",
            "classifier-quality",
        ),
        ("predictions.txt", "fast                56", "predictions"),
        ("choices.txt", "H100, one for each tier, 0.5", "choice-worth"),
        ("big_fleet.txt", "resident set, MB                      118.02", "big-fleet"),
        ("engine_check.txt", "fast      broken wrong zero points ", "engine-checks"),
    ],
)
def test_a_line_that_does_not_fit_is_named(
    figures: Any, results: Path, name: str, line: str, figure: str
) -> None:
    """A benchmark that prints something new cannot lose a row of a document in silence."""
    path = results / name
    lines = path.read_text("utf-8").splitlines()
    number = next(index for index, text in enumerate(lines) if text.startswith(line))
    lines[number] = f"? {lines[number]}"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(
        figures.FigureError,
        match=rf"{name}, line {number + 1}: '\? {re.escape(line[:4])}.*figures.py",
    ):
        figures.FIGURES[figure]("results")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "<!-- figures: nothing -->\n<!-- /figures -->\n",
            "there is no figure 'nothing'; there are: .*big-fleet, ",
        ),
        ("<!-- figures: big-fleet -->\n", "1 markers .* and 0 .* make 0 figures"),
        ("text\n<!-- /figures -->\n", "0 markers .* and 1 .* make 0 figures"),
    ],
)
def test_a_marker_that_does_not_fit_is_told(
    figures: Any, text: str, problem: str
) -> None:
    """An unknown name, and a marker without its counterpart, are errors."""
    with pytest.raises(figures.FigureError, match=problem):
        figures.render(text, "results")


def test_a_result_that_is_missing_is_told(figures: Any, results: Path) -> None:
    """The error names the file and says what to do."""
    (results / "big_fleet.txt").unlink()
    with pytest.raises(
        figures.FigureError,
        match=r"big_fleet.txt: No such file .* write the output of its benchmark",
    ):
        figures.FIGURES["big-fleet"]("results")


def test_readme_shows_every_load_of_its_settings(figures: Any) -> None:
    """Of four settings; the loads at which one precision is best, and those that no fleet carries, are shown too."""
    plans = json.loads((ROOT / "benchmarks/results/plans.json").read_text("utf-8"))
    loads = []
    shown_settings = [each for each in plans["settings"] if each["in_readme"]]
    assert len(shown_settings) == 4
    for setting in shown_settings:
        loads += [f"{load['load']:g}/{setting['unit']}" for load in setting["loads"]]
    rows = [
        line.split(" | ")
        for line in figures.FIGURES["pays"]("results").splitlines()
        if line.startswith("| ")
    ]
    shown = []
    for row in rows[2:]:
        shown += [load.strip("* ") for load in row[1].split(", ")]
    assert sorted(shown) == sorted(loads)


def test_the_profile_of_the_h200_is_what_was_measured(figures: Any) -> None:
    """The profile is fitted to gpu_speed.jsonl, without rows whose speed the client limited."""
    module = importlib.import_module("gpu_profile")
    fitted = module.gpu_profile().model_dump_json(indent=1) + "\n"
    assert module.PROFILE.read_text("utf-8") == fitted
    for line in module.MEASURED.read_text("utf-8").splitlines()[1:]:
        row = json.loads(line)
        counts = "prompt" in row or (
            row["alone"] and row["concurrency"] <= 128 and row["tokens_s"] < 10_000
        )
        assert (module.read_sample(row) is not None) is counts


def test_a_load_is_planned_and_simulated(
    figures: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The planned fleet and the fleets of one precision serve the same requests; their times stand beside the price."""
    plans = importlib.import_module("plans")
    (setting,) = [setting for setting in plans.SETTINGS if "four H200" in setting.name]
    result = plans.at_load(setting, 0.5, argparse.Namespace(requests=20, seed=1))
    assert result["command"] == f"qarr plan {setting.arguments} --load 0.5/s"
    profile = "benchmarks/results/latency_llama-3.1-8b_h200.json"
    assert result["speed"] == f"measured: {profile}"
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == ["planned", "fast alone", "balanced alone", "precise alone"]
    assert result["single"] == "precise"
    assert rows["planned"] == {**rows["precise alone"], "name": "planned"}
    assert rows["precise alone"]["lost"] == 0
    assert 0 < rows["balanced alone"]["lost"] < rows["fast alone"]["lost"]
    for row in rows.values():
        assert 3 < row["tpot_p50"] <= row["tpot_p95"]
        assert 20 < row["ttft_p50"] <= row["ttft_p95"]
    assert "$ qarr plan --model" in capsys.readouterr().out
