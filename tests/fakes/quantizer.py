"""A stand-in for ``tiers/checkpoints/quantize.py`` in its environment, which makes small checkpoints at a test's orders.

``FAKE_QUANTIZER`` names a folder. For each command, and each scheme, it waits for a file of that name there, and obeys it:

- a number: it reports so many layers as done, and waits for the file to change;
- ``done``: it finishes;
- ``fail``: it fails as on a full disk.

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


def order_in(path: Path) -> str:
    """Return the test's order in a file; it is empty while there is none."""
    return path.read_text().strip() if path.exists() else ""


def scheme_in(argv: list[str]) -> str:
    """Return the scheme of a recipe, AWQ int4's by its short name."""
    recipe = json.loads(argv[argv.index("--recipe") + 1])
    return {"awq-int4": "awq"}.get(recipe["scheme"], recipe["scheme"])


def reference(orders: Path, command: str) -> dict[str, object] | None:
    """Return scores with the log-probability in ``COMMAND.logprob`` for each token, or None without that file."""
    logprob = order_in(orders / f"{command}.logprob")
    if not logprob:
        return None
    return {
        "texts": [
            {"name": "prose", "token_ids": [1, 2, 3], "logprobs": [float(logprob)] * 2}
        ]
    }


def main() -> int:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # as quantize.py does
    command = sys.argv[2]
    if command == "quantize":
        command = scheme_in(sys.argv)
    source = Path(sys.argv[3])
    target = Path(sys.argv[4])
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
    while (order := order_in(orders / command)) != "done":
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
    made = {
        "group_size": 64,
        "calibration_samples": 32,
        "calibration_tokens": 4096,
        "formats": ["pack-quantized"],
    }
    event("done", versions={"fake": "1"}, **made, reference=reference(orders, command))
    return 0


if __name__ == "__main__":
    sys.exit(main())
