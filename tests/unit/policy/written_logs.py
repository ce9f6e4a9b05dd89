"""Decision logs that are written."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from router.policy.decide import decide
from router.policy.decision import Sla
from router.policy.decision_log import (
    DecisionLog,
    OutcomeRecord,
)
from tests.unit.policy.fleets import FAST, MEASURED, SCARCE, fleet, query

if TYPE_CHECKING:
    from pathlib import Path

    from router.policy.decision import PolicyParameters


def write(
    path: Path, count: int, gap_s: float = 0.0, table: PolicyParameters = SCARCE
) -> None:
    """Write a log of so many equal chats, each decided on an idle fleet."""
    log = DecisionLog(path, 1 << 30)
    snapshot = fleet(speeds=MEASURED)
    asked = query(sla=Sla(ttft_ms=20_000, tpot_ms=200))
    for number in range(count):
        log.decided(str(number), decide(asked, snapshot, table), snapshot, table)
        log.ended(
            OutcomeRecord(
                str(number),
                FAST,
                prompt_tokens=20,
                output_tokens=40,
                ttft_ms=45.0,
                tpot_ms=26.0,
            )
        )
    log.close()
    shifted = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "decision":
            record["at"] = 1000 + int(record["request_id"]) * gap_s
        shifted.append(json.dumps(record))
    path.write_text("\n".join(shifted) + "\n")
