"""Make recorded decisions again, and simulate the recorded arrivals under another policy or profile.

    python benchmarks/replay.py LOG.jsonl [--policy FILE] [--quality FILE] [--latency FILE]

``LOG.jsonl`` is a decision log (``telemetry.decision_log``), ``--policy`` a settings file with another policy section, the
others are profiles. First every decision is made again from the log alone; one that differs is an error. With an option, the
recorded arrivals are simulated under it, and under the recorded policy for comparison (``policy_simulation.py``).
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from policy_simulation import Options, simulate
from recording import differing, read_recording, seen, summarise

from router.policy.decision import PRIORITIES
from router.policy.profiles import ProfileError, load_latency, load_profile
from router.policy.table import policy_table
from router.section import SettingsError
from router.settings import load_settings
from tiers.spec import in_order

if TYPE_CHECKING:
    from recording import Recording, Summary


def main() -> int:
    """Run as the arguments say; return 1 if a decision does not come out as recorded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("log", type=Path, help="decision log")
    parser.add_argument(
        "--policy", type=Path, help="settings file with another policy section"
    )
    parser.add_argument("--quality", type=Path, help="another quality profile")
    parser.add_argument("--latency", type=Path, help="another latency profile")
    options = parser.parse_args()
    try:
        recording = read_recording(options.log)
        others = differing(recording)
        total = len(recording.decisions)
        print(f"{total - len(others)} of {total} decisions come out as recorded")
        for record in others[:10]:
            print(
                f"  otherwise: {record.request_id}, recorded {record.tier or record.refusal}"
            )
        if options.policy or options.quality or options.latency:
            show(compared(recording, options.policy, options.quality, options.latency))
    except (ProfileError, SettingsError) as error:
        sys.exit(f"error: {error}")
    return 1 if others else 0


def compared(
    recording: Recording,
    policy: Path | None,
    quality: Path | None,
    latency: Path | None,
) -> dict[str, Summary]:
    """Return what was seen, and both policies simulated, by the row's title."""
    table = recorded = recording.tables[recording.decisions[-1].policy]
    settings = load_settings(policy)
    if policy is not None:
        table = replace(policy_table(settings.policy, (), None), losses=recorded.losses)
    if quality is not None:
        specs = [tier.spec for tier in recording.decisions[-1].fleet.tiers]
        table = replace(
            table,
            losses=policy_table(
                settings.policy, specs, None, load_profile(quality)
            ).losses,
        )
    longest = {
        number: float(getattr(settings.admission.max_wait_s, name))
        for name, number in PRIORITIES.items()
    }
    options = Options(settings.admission.max_waiting, longest)
    speeds = (
        {fit.tier: fit.model for fit in load_latency(latency).fits}
        if latency is not None
        else None
    )
    return {
        "recorded, as seen": summarise(seen(recording)),
        "recorded, simulated": summarise(simulate(recording, options=options)),
        "other, simulated": summarise(simulate(recording, table, speeds, options)),
    }


def show(rows: dict[str, Summary]) -> None:
    """Print one line a summary."""
    tiers = in_order(tier for summary in rows.values() for tier in summary.shares)
    columns = (
        "SLA met",
        "refused",
        "loss",
        "TTFT p50",
        "p95 ms",
        "TPOT p50",
        "p95 ms",
        "engine s",
    )
    print(f"{'':20}" + "".join(f"{name:>10}" for name in (*tiers, *columns)))
    for name, summary in rows.items():
        cells = [f"{summary.shares.get(tier, 0):.0%}" for tier in tiers]
        cells += [
            f"{summary.met:.1%}",
            str(summary.refused),
            number(summary.mean_loss, 3),
        ]
        cells += [number(summary.ttft_p50), number(summary.ttft_p95)]
        cells += [
            number(summary.tpot_p50, 1),
            number(summary.tpot_p95, 1),
            number(summary.engine_s, 1),
        ]
        print(f"{name:20}" + "".join(f"{cell:>10}" for cell in cells))


def number(value: float | None, digits: int = 0) -> str:
    """Return a number as text; empty if it is not known."""
    return "" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    sys.exit(main())
