"""Ten thousand requests that nobody would send, and every attack on the socket, against a real router over fake engines.

usage: python benchmarks/chaos/fuzz.py [--requests 10000] [--seed 20]

The same seed sends the same requests. Ends with status 1 if the router answered with a 5xx, hung, wrote a traceback, stopped
serving, or kept anything: connections, tasks, leases, files. Attacks only processes that it started itself, on loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from attacks import Attack, every_attack
from mutations import BODIES, Mutant, mutant
from running import PATIENCE_S, Running, Wire, fetch, generation, running

BATCH = 100
CLIENTS = 8
AT_ONCE = 6  # attacks
POOLED = 64  # connections to engines that may stay open for the next request


@dataclass(slots=True)
class Report:
    """What was seen.

    Attributes:
        faults: What should not be; each is shown.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    attacks: int = 0
    batches: int = 0
    left: int = 0
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Held:
    """What the router holds."""

    leases: int
    tasks: int
    clients: int
    files: int
    rss_mb: float


def main() -> None:
    """Run it all and print the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=20)
    args = parser.parse_args()
    # so that the processes started here end with this one
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as router:
        report, stages = asyncio.run(_all(router, args.requests, args.seed))
        log = router.log.read_text("utf-8", "replace")
    if "Traceback" in log:
        report.faults.append(
            "the router wrote a traceback:\n" + log[log.index("Traceback") :][:3000]
        )
    _show(report, stages, time.monotonic() - started, args)
    sys.exit(1 if report.faults else 0)


async def _all(
    router: Running, requests: int, seed: int
) -> tuple[Report, dict[str, Held]]:
    report = Report()
    operations = await _operations(router.port)
    await _still_serves(router, report, "before anything")
    before = await held(router)
    rng = random.Random(seed)
    mutants = [mutant(rng, operations) for _ in range(requests)]
    for at in range(0, requests, BATCH):
        batch = mutants[at : at + BATCH]
        await asyncio.gather(
            *(_client(router, batch[n::CLIENTS], report) for n in range(CLIENTS))
        )
        report.batches += 1
        await _still_serves(router, report, f"after request {at + len(batch)}")
    between = await _nothing_held(router, before, report, "after the requests")
    *attacks, crowd = every_attack()
    places = asyncio.Semaphore(AT_ONCE)
    await asyncio.gather(
        *(_attack(router, attack, report, places) for attack in attacks)
    )
    await _nothing_held(router, before, report, "after the attacks")
    await _attack(router, crowd, report, places)
    after = await _nothing_held(router, before, report, "after the crowd")
    return report, {"before": before, "after requests": between, "after attacks": after}


async def _operations(port: int) -> list[tuple[str, str]]:
    """Return every (method, path) of the router's own document; those with a body more often."""
    document = json.loads(
        (
            await fetch(port, b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n")
        ).body
    )
    found = [
        (method, path)
        for path, methods in document["paths"].items()
        for method in methods
    ]
    assert {path for _, path in found} >= set(BODIES)
    return [
        operation
        for operation in found
        for _ in range(3 if operation[1] in BODIES else 1)
    ]


async def _client(router: Running, mutants: list[Mutant], report: Report) -> None:
    """Send requests one by one, each on a connection of its own: what is wrong with one must not hide in the next."""
    for one in mutants:
        wire = await Wire.open(router.port)
        try:
            await wire.send(one.data)
            if one.leaves:
                report.left += 1
                continue
            seen = await wire.answer(head_only=one.head_only)
            report.statuses[seen.status] += 1
            if seen.status >= 500:
                report.faults.append(
                    f"{seen.status} for {one.name}: {seen.body[:300]!r}"
                )
        except TimeoutError:
            report.faults.append(f"hangs: {one.name}")
        finally:
            wire.drop()


async def _attack(
    router: Running, attack: Attack, report: Report, places: asyncio.Semaphore
) -> None:
    report.attacks += 1
    try:
        async with places, asyncio.timeout(2 * PATIENCE_S):
            seen = await attack.run(router.port)
    except TimeoutError:
        report.faults.append(f"hangs: {attack.name}")
    except (AssertionError, asyncio.IncompleteReadError) as error:
        report.faults.append(f"{attack.name}: {error}")
    else:
        report.statuses.update(seen)
        if not attack.allowed.issuperset(seen):
            report.faults.append(
                f"{attack.name}: answered {sorted(set(seen))}, allowed {sorted(attack.allowed)}"
            )
    await _still_serves(router, report, f"after the attack '{attack.name}'")


async def _still_serves(router: Running, report: Report, when: str) -> None:
    """Ask for what must work, whatever was sent before."""
    try:
        seen = await fetch(router.port, generation(tier="fast"))
    except (TimeoutError, OSError) as error:
        report.faults.append(
            f"{when}: a good request is not answered ({type(error).__name__})"
        )
        return
    if seen.status != 200 or b"event: done" not in seen.body:
        report.faults.append(
            f"{when}: a good request is answered {seen.status} {seen.body[:300]!r}"
        )


async def held(router: Running) -> Held:
    """Return what the router holds now."""
    fleet = json.loads(
        (
            await fetch(router.port, b"GET /tiers HTTP/1.1\r\nhost: localhost\r\n\r\n")
        ).body
    )
    replicas = [replica for tier in fleet["tiers"] for replica in tier["replicas"]]
    kinds = ("in_flight", "prompt_tokens_outstanding", "output_tokens_outstanding")
    metrics = (
        await fetch(router.port, b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")
    ).body.decode()
    tasks = float(metrics.partition("\nqarr_tasks ")[2].partition("\n")[0])
    connections = router.process.net_connections(kind="tcp")
    clients = sum(
        c.laddr.port == router.port and c.status != psutil.CONN_LISTEN
        for c in connections
    )
    return Held(
        leases=sum(replica[kind] for replica in replicas for kind in kinds),
        tasks=int(tasks),
        clients=clients,
        files=router.process.num_fds(),
        rss_mb=router.process.memory_info().rss / (1 << 20),
    )


async def _nothing_held(
    router: Running, before: Held, report: Report, when: str
) -> Held:
    """Wait until the router holds no more than at first; what it still holds after a while is leaked."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        now = await held(router)
        leaked = {
            "leases": now.leases,
            "tasks": max(now.tasks - before.tasks, 0),
            "connections": max(now.clients - max(before.clients, 1), 0),
            "files": max(now.files - before.files - POOLED, 0),
        }
        if not any(leaked.values()):
            return now
        if time.monotonic() > deadline:
            report.faults.append(
                f"{when}: still held: { ({k: v for k, v in leaked.items() if v}) }"
            )
            return now
        await asyncio.sleep(0.2)


def _show(
    report: Report, stages: dict[str, Held], took_s: float, args: argparse.Namespace
) -> None:
    print(
        f"$ python benchmarks/chaos/fuzz.py --requests {args.requests} --seed {args.seed}\n"
    )
    print(
        f"requests       {args.requests}, {report.left} of them left unread; {report.attacks} attacks; {took_s:.0f} s"
    )
    by_status = ", ".join(
        f"{status or 'closed'}: {count}"
        for status, count in sorted(report.statuses.items())
    )
    print(f"by status      {by_status}")
    print(f"good requests  {report.batches + report.attacks + 1} between them")
    print(f"faults         {len(report.faults)}")
    for stage, holds in stages.items():
        print(f"{stage:15}{holds}")
    for fault in report.faults[:40]:
        print(f"FAULT {fault}")


if __name__ == "__main__":
    main()
