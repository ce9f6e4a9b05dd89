"""A stand-in for ``tiers/checkpoints/quantize.py`` in its environment: makes small checkpoints, and waits where a test tells it to.

``FAKE_QUANTIZER`` names a folder. For each command it waits for a file of that name there, and does what the file says:
a number: report so many layers as done, and wait for the file to change; ``done``: finish; ``fail``: fail as on a full disk.
It leaves its process id and niceness in ``COMMAND.pid``, and its arguments in ``COMMAND.argv``. Fixed texts are scored at once.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
LAYERS = 31
MESSAGES = {"awq": "quantizing to AWQ int4, groups of 64", "fp8": "quantizing to FP8"}


def event(name: str, **fields: object) -> None:
    sys.stdout.write(json.dumps({"event": name, **fields}) + "\n")
    sys.stdout.flush()


def told(path: Path) -> str:
    """Return what the test says, an empty text where it says nothing yet."""
    return path.read_text().strip() if path.exists() else ""


def reference(orders: Path, command: str) -> dict[str, object] | None:
    """Return scores in which each token has the log-probability that ``COMMAND.logprob`` names; None where there is none."""
    named = told(orders / f"{command}.logprob")
    if not named:
        return None
    return {
        "texts": [
            {"name": "prose", "token_ids": [1, 2, 3], "logprobs": [float(named)] * 2}
        ]
    }


def main() -> int:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # as quantize.py does
    command, source, target = sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
    orders = Path(os.environ["FAKE_QUANTIZER"])
    if command == "score":
        event("done", versions={"fake": "1"}, reference=reference(orders, "bf16"))
        return 0
    (orders / f"{command}.pid").write_text(
        f"{os.getpid()} {os.getpriority(os.PRIO_PROCESS, 0)}"
    )
    (orders / f"{command}.argv").write_text(" ".join(sys.argv[3:]))
    event("progress", message="loading the base model", done=0, total=0)
    reported = 0
    while (order := told(orders / command)) != "done":
        if order == "fail":
            sys.stderr.write("OSError: [Errno 28] No space left on device\n")
            return 1
        while reported < int(order or 0):
            reported += 1
            event(
                "progress",
                message=MESSAGES.get(command, command),
                done=reported,
                total=LAYERS,
            )
        time.sleep(0.02)
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    header = b"{}      "
    (target / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header
    )
    made = {"group_size": 64, "calibration_samples": 32, "calibration_tokens": 4096}
    event("done", versions={"fake": "1"}, **made, reference=reference(orders, command))
    return 0


if __name__ == "__main__":
    sys.exit(main())
