"""What each proxy costs on one core, in front of one stub engine: nginx, vllm-router, smg, LiteLLM, Portkey and QARR.

usage: python benchmarks/side_by_side.py [--seconds 5] [--passes 3] [--only ROW,ROW] [--beside DIR] [--json FILE]

Proxies have the first core; stub engine and load share the last one (from four cores on, each has its own). All proxies
run, one is asked at a time, and every pass asks each, so that a slow minute hits all. Trust CPU time an answer first, and
only ratios of one run. The table goes to standard output, progress to standard error.

The first table has the quantities of public gateway benchmarks (BerriAI/ai-gateway-bench, cuihuan/llm-gateway-bench),
computed as they do: added p50 is the median answer's time through the gateway less the median asked directly, in the same
round, of which the median over the rounds is taken; added p99 the same of 99 of 100. Memory is the largest that was seen.

The last table has bursts of new connections while 64 others keep the proxy busy: from connecting to the first answer.

Peers come from their package indexes into cached environments of their own (``scripts/setup vllm-router smg litellm
portkey``), nginx and Node from the system; what cannot be had is skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from measure import free_port, process, wait_for
from proxies import (
    BASE,
    OURS,
    OURS_GENERATE,
    PROXIES,
    STREAM_TOKENS,
    WHOLE_TOKENS,
    Place,
    SkippedError,
    Started,
    commit,
    default_tokenizer,
    of_checkout,
    started,
)
from token_load import burst, load

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from token_load import BurstSample, Sample

DIRECT = "direct"
GENERATE_TARGET = 1.2  # CPU time of /generate, at most, of that of /v1/chat/completions
WARM_S = 0.5


@dataclass(frozen=True, slots=True)
class Load:
    """One way to ask.

    Attributes:
        title: In the table.
        connections: Each has one request open.
        streamed: Whether answers are streams.
        pause_us: Of the engine, before each token of a stream.
        target: CPU time of QARR, at most, of that of vllm-router's cache_aware; None: there is no target.
    """

    title: str
    connections: int
    streamed: bool
    pause_us: int
    target: float | None

    @property
    def stagger_ms(self) -> float:
        """Return the time between two starts that spreads paced streams evenly, over an answer and over a pause."""
        return (STREAM_TOKENS + 1) * self.pause_us / 1000 / self.connections


WHOLE = f"non-streaming, {WHOLE_TOKENS} tokens"
LOADS: dict[str, Load] = {
    "non-streaming, 1 connection": Load(f"{WHOLE}, 1 connection", 1, False, 0, None),
    "non-streaming": Load(f"{WHOLE}, 16 connections", 16, False, 0, 2.5),
    "non-streaming, 64 connections": Load(
        f"{WHOLE}, 64 connections", 64, False, 0, None
    ),
    "saturated": Load(
        f"{STREAM_TOKENS}-token streams, saturated, 32 connections", 32, True, 0, 1.3
    ),
    "paced": Load(
        f"{STREAM_TOKENS}-token streams, 5 ms a token, 32 connections",
        32,
        True,
        5000,
        1.6,
    ),
}
BURSTS = (64, 500)  # new connections at once
BUSY = LOADS["non-streaming, 64 connections"]  # what the proxy does meanwhile
# of the first table
GATEWAY_LOADS = tuple(name for name, asked in LOADS.items() if not asked.streamed)


@dataclass(frozen=True, slots=True)
class Row:
    """The medians of all passes of one proxy under one load.

    Attributes:
        cpu_us: CPU time an answer, of the process tree.
        least, most: Of the passes.
        ratio: To the base in the same pass; None: the base was not measured.
        per_second: Good answers.
        p50, p99: Milliseconds to the first event, or to the whole answer.
        added_p50, added_p99: The same more than direct in the same pass.
        rss_mb: Resident memory of the process tree.
        answers, errors: In all passes.
    """

    cpu_us: float
    least: float
    most: float
    ratio: float | None
    per_second: float
    p50: float
    p99: float
    added_p50: float | None
    added_p99: float | None
    rss_mb: float
    answers: int
    errors: int


def summary(
    samples: Sequence[Sample],
    base: Sequence[Sample] | None,
    direct: Sequence[Sample] | None,
) -> Row:
    """Return a proxy's medians, and those of its differences to base and to direct, pass by pass."""

    def added(name: str) -> float | None:
        if direct is None or direct is samples:
            return None
        pairs = zip(samples, direct, strict=True)
        more: list[float] = [
            getattr(sample, name) - getattr(alone, name) for sample, alone in pairs
        ]
        return statistics.median(more)

    costs = [sample.cpu_us for sample in samples]
    return Row(
        cpu_us=statistics.median(costs),
        least=min(costs),
        most=max(costs),
        ratio=statistics.median(
            s.cpu_us / b.cpu_us for s, b in zip(samples, base, strict=True)
        )
        if base
        else None,
        per_second=statistics.median(sample.per_second for sample in samples),
        p50=statistics.median(sample.first_p50 for sample in samples),
        p99=statistics.median(sample.first_p99 for sample in samples),
        added_p50=added("first_p50"),
        added_p99=added("first_p99"),
        rss_mb=statistics.median(sample.rss_mb for sample in samples),
        answers=sum(sample.answers for sample in samples),
        errors=sum(sample.errors for sample in samples),
    )


@dataclass(frozen=True, slots=True)
class BurstRow:
    """What all passes of one proxy say of bursts of one size: the medians of p50 and p99, the largest time of all.

    Attributes:
        p50, p99, most: Milliseconds from connecting to the end of the first answer.
        answers, errors: In all passes.
    """

    p50: float
    p99: float
    most: float
    answers: int
    errors: int

    @classmethod
    def of(cls, samples: Sequence[BurstSample]) -> BurstRow:
        """Return the row of a proxy's passes."""
        return cls(
            p50=statistics.median(sample.p50 for sample in samples),
            p99=statistics.median(sample.p99 for sample in samples),
            most=max(sample.most for sample in samples),
            answers=sum(sample.answers for sample in samples),
            errors=sum(sample.errors for sample in samples),
        )


@dataclass(slots=True)
class Run:
    """A whole run: what stands above the table, and what was measured."""

    head: list[str]
    versions: dict[str, str]
    skipped: dict[str, str]
    # by load, by proxy, in the order of the passes
    samples: dict[str, dict[str, list[Sample]]]
    # by size, by proxy, in the order of the passes
    bursts: dict[int, dict[str, list[BurstSample]]]

    def burst_rows(self, size: int) -> dict[str, BurstRow]:
        """Return the rows of bursts of one size."""
        return {
            proxy: BurstRow.of(samples) for proxy, samples in self.bursts[size].items()
        }

    def rows(self, name: str) -> dict[str, Row]:
        """Return the rows of one load."""
        found = self.samples[name]
        return {
            proxy: summary(samples, found.get(BASE), found.get(DIRECT))
            for proxy, samples in found.items()
        }

    def text(self) -> str:
        """Return what is printed."""
        lines = [*self.head, ""]
        lines += [f"{name:27} {version}" for name, version in self.versions.items()]
        lines += [f"{name:27} skipped: {why}" for name, why in self.skipped.items()]
        if all(self.samples.get(name) for name in GATEWAY_LOADS):
            lines += ["", *self._gateways()]
        for name, asked in LOADS.items():
            if self.samples.get(name):
                lines += ["", *_table(asked, self.rows(name))]
        if all(self.bursts.get(size) for size in BURSTS):
            lines += [
                "",
                *_burst_table({size: self.burst_rows(size) for size in BURSTS}),
            ]
        measured = (*self.samples.values(), *self.bursts.values())
        wrong = {
            (p, s.error)
            for rows in measured
            for p, found in rows.items()
            for s in found
            if s.error
        }
        lines += [
            f"\nfirst error of {proxy}: {error!r}" for proxy, error in sorted(wrong)
        ]
        return "\n".join(lines) + "\n"

    def _gateways(self) -> list[str]:
        """Return the table of what each adds at each number of connections, and what it reads of a prompt for that."""
        rows = {name: self.rows(name) for name in GATEWAY_LOADS}
        counts = " ".join(
            f"{f'@{LOADS[name].connections}':>17}" for name in GATEWAY_LOADS
        )
        cpu = f"CPU-us @{LOADS['non-streaming'].connections}"
        lines = [
            f"What a gateway adds: {WHOLE}; added ms p50 / p99 at numbers of connections",
            f"{'':34} {cpu:>11} {counts} {'most RSS MB':>12}   reads of a prompt",
        ]
        for proxy in rows["non-streaming"]:
            whose = (
                "ours" if PROXIES[proxy].ours else "" if proxy == DIRECT else "theirs"
            )
            name = f"{proxy} (its own times)" if proxy == DIRECT else proxy
            times = " ".join(
                f"{_times(rows[asked][proxy]):>17}" for asked in GATEWAY_LOADS
            )
            cpu_us, most = rows["non-streaming"][proxy].cpu_us, self.most_rss_mb(proxy)
            reads = "-" if proxy == DIRECT else PROXIES[proxy].reads
            lines.append(
                f"{whose:6} {name:27} {cpu_us:11.0f} {times} {most:12.0f}   {reads}"
            )
        return lines

    def most_rss_mb(self, proxy: str) -> float:
        """Return the largest resident memory of a proxy after any load."""
        return max(
            sample.rss_mb for rows in self.samples.values() for sample in rows[proxy]
        )

    def record(self) -> dict[str, object]:
        """Return what is written as JSON."""
        return {
            "head": self.head,
            "versions": self.versions,
            "skipped": self.skipped,
            "targets": {name: asked.target for name, asked in LOADS.items()}
            | {OURS_GENERATE: GENERATE_TARGET},
            "loads": {name: asdict(asked) for name, asked in LOADS.items()},
            "reads": {
                name: PROXIES[name].reads for name in self.versions if name != DIRECT
            },
            "most_rss_mb": {name: self.most_rss_mb(name) for name in self.versions},
            "rows": {
                name: {p: asdict(row) for p, row in self.rows(name).items()}
                for name in self.samples
            },
            "samples": {
                name: {
                    proxy: [asdict(s) for s in found] for proxy, found in rows.items()
                }
                for name, rows in self.samples.items()
            },
            "bursts": {
                size: {p: asdict(row) for p, row in self.burst_rows(size).items()}
                for size in self.bursts
            },
            "burst_samples": {
                size: {
                    proxy: [asdict(s) for s in found] for proxy, found in rows.items()
                }
                for size, rows in self.bursts.items()
            },
        }


def _times(row: Row) -> str:
    """Return what a row's answers take more than direct; of direct itself what they take."""
    p50, p99 = (
        (row.p50, row.p99)
        if row.added_p50 is None or row.added_p99 is None
        else (row.added_p50, row.added_p99)
    )
    return f"{p50:.2f} / {p99:.2f}"


def _table(asked: Load, rows: dict[str, Row]) -> list[str]:
    """Return one load's rows, and below them what is said of the targets."""
    more = "added TTFT ms" if asked.streamed else "added time ms"
    lines = [
        asked.title,
        f"{'':34} CPU-us/answer (least to most)   ratio   answers/s   {more} p50 / p99   RSS MB   errors",
    ]
    for name, row in rows.items():
        whose = "ours" if PROXIES[name].ours else "" if name == DIRECT else "theirs"
        ratio = "-" if row.ratio is None or name == DIRECT else f"x{row.ratio:.2f}"
        added = (
            "-"
            if row.added_p50 is None
            else f"{row.added_p50:.2f} / {row.added_p99:.2f}"
        )
        shown = f"{name} (the stub's CPU)" if name == DIRECT else name
        lines.append(
            f"{whose:6} {shown:27} {row.cpu_us:8.0f} {f'({row.least:.0f} to {row.most:.0f})':>20} {ratio:>7} "
            f"{row.per_second:11.0f} {added:>22} {row.rss_mb:8.0f} {row.errors:8}"
        )
    return [*lines, *(f"-> {said}" for said in _verdicts(asked, rows))]


def _burst_table(rows: dict[int, dict[str, BurstRow]]) -> list[str]:
    """Return the table of bursts."""
    sizes = " ".join(f"{f'{size} new: p50 / p99 / max':>28}" for size in rows)
    lines = [
        f"Bursts of new connections while {BUSY.connections} others keep the proxy busy: {WHOLE}",
        f"{'ms to the first answer':22}{'':12} {sizes}   errors",
    ]
    for name in rows[BURSTS[0]]:
        whose = "ours" if PROXIES[name].ours else "" if name == DIRECT else "theirs"
        found = [by_proxy[name] for by_proxy in rows.values()]
        times = " ".join(
            f"{f'{row.p50:.1f} / {row.p99:.1f} / {row.most:.1f}':>28}" for row in found
        )
        lines.append(
            f"{whose:6} {name:27} {times} {sum(row.errors for row in found):8}"
        )
    return lines


def _verdicts(asked: Load, rows: dict[str, Row]) -> Iterator[str]:
    targets: dict[str, tuple[float | None, float, str]] = {}
    if OURS in rows and asked.target is not None:
        targets[OURS] = (rows[OURS].ratio, asked.target, BASE)
    if OURS_GENERATE in rows and OURS in rows:
        targets[OURS_GENERATE] = (
            rows[OURS_GENERATE].cpu_us / rows[OURS].cpu_us,
            GENERATE_TARGET,
            OURS,
        )
    for name, (ratio, target, other) in targets.items():
        if ratio is not None:
            yield f"{name}: x{ratio:.2f} of {other}; target at most x{target:g}: {'met' if ratio <= target else 'missed'}"


def main() -> None:
    """Start everything, ask all in turns, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=5, help="of each load, for each proxy and pass"
    )
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument(
        "--only", help=f"rows, with commas between: {', '.join(PROXIES)}"
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        default=default_tokenizer(),
        help="model folder, for QARR's counts",
    )
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument(
        "--beside",
        type=Path,
        metavar="DIR",
        help="another checkout of QARR with a .venv, as rows",
    )
    options = parser.parse_args()
    if options.beside:
        PROXIES.update(of_checkout(options.beside.resolve()))
    wanted = (
        [name.strip() for name in options.only.split(",")]
        if options.only
        else list(PROXIES)
    )
    if unknown := [name for name in wanted if name not in PROXIES]:
        parser.error(
            f"no such rows: {', '.join(unknown)}; there are: {', '.join(PROXIES)}"
        )
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit(
            "error: this needs two cores: one for the proxy, one for the stub engine and the load"
        )
    run = Run(_head(options, cores), {}, {}, {}, {})
    with ExitStack() as stack:
        running, stub_port = _start(wanted, options.tokenizer, cores, run, stack)
        os.sched_setaffinity(0, {cores[-1]})
        _measure(running, stub_port, options.seconds, options.passes, run)
    print(run.text(), end="")
    if options.json:
        options.json.write_text(json.dumps(run.record(), indent=1) + "\n")


def _head(options: argparse.Namespace, cores: Sequence[int]) -> list[str]:
    names = [
        line
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        if line.startswith("model name")
    ]
    processor = names[0].partition(":")[2].strip() if names else platform.machine()
    machine = f"{len(cores)} cores, {processor}, Linux {platform.release()}, Python {platform.python_version()}"
    counted = "counted with the model's tokenizer" if options.tokenizer else "estimated"
    return [
        f"$ python benchmarks/side_by_side.py {shlex.join(sys.argv[1:])}".rstrip(),
        f"commit {commit()}, {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC; {machine}",
        f"Proxies on core {cores[0]}, stub engine on core {_stub_core(cores)}, load on core {cores[-1]}.",
        f"Medians of {options.passes} passes of {options.seconds:g} s, all proxies in turns.",
        f"ratio: CPU time an answer to that of {BASE} in the same pass.",
        "QARR runs with classifier, policy with three tiers, metrics, a log line for each request, and 1 % of traces",
        f"recorded and exported; it has prompt tokens {counted}. 1,024 requests may wait in it. Peers log warnings only.",
    ]


def _stub_core(cores: Sequence[int]) -> int:
    """Return the core of the stub engine: one of its own from four cores on."""
    return cores[-2] if len(cores) > 3 else cores[-1]


def _start(
    wanted: Sequence[str],
    tokenizer: Path | None,
    cores: Sequence[int],
    run: Run,
    stack: ExitStack,
) -> tuple[dict[str, Started], int]:
    """Start the stub and every proxy that can be had; return those by name, and the stub's port."""
    ports = [free_port() for _ in range(3)]
    argv = [sys.executable, "benchmarks/token_stub.py", *map(str, ports)]
    stub = stack.enter_context(process(argv, _stub_core(cores)))
    wait_for(ports[0], "/health")
    engines = tuple(f"http://127.0.0.1:{port}" for port in ports)
    running: dict[str, Started] = {}
    for name in wanted:
        proxy = PROXIES[name]
        try:
            run.versions[name] = proxy.version()
            if proxy.command is None:
                running[name] = Started(ports[0], stub, engines)
            elif proxy.shares in running:
                running[name] = running[proxy.shares]
            else:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                place = Place(engines, free_port(), str(cores[0]), folder, tokenizer)
                running[name] = stack.enter_context(started(proxy, place))
            say(f"{name}: {run.versions[name]}")
        except SkippedError as why:
            run.versions.pop(name, None)
            run.skipped[name] = str(why)
            say(f"{name}: skipped: {why}")
    return running, ports[0]


def _measure(
    running: dict[str, Started], stub_port: int, seconds: float, passes: int, run: Run
) -> None:
    """Ask every proxy under every load, in each pass, forwards and backwards in turns; the first one, short, warms up."""
    run.samples = {name: {proxy: [] for proxy in running} for name in LOADS}
    run.bursts = {size: {proxy: [] for proxy in running} for size in BURSTS}
    for number in range(passes + 1):
        for name, asked in LOADS.items():
            pace(stub_port, asked.pause_us)
            for proxy, target in list(running.items())[:: 1 if number % 2 else -1]:
                sample = uvloop.run(
                    load(
                        target.port,
                        PROXIES[proxy].question(
                            streamed=asked.streamed, engines=target.engines
                        ),
                        target.process,
                        connections=asked.connections,
                        seconds=seconds if number else WARM_S,
                        stagger_ms=asked.stagger_ms,
                    )
                )
                wrong = f", {sample.errors} errors" if sample.errors else ""
                which = f"pass {number} of {passes}" if number else "warm-up"
                say(
                    f"{which}, {name}, {proxy}: {sample.cpu_us:.0f} us an answer, {sample.per_second:.0f}/s{wrong}"
                )
                if number:
                    run.samples[name][proxy].append(sample)
        pace(stub_port, BUSY.pause_us)
        for proxy, target in list(running.items())[:: 1 if number % 2 else -1]:
            _measure_bursts(proxy, target, seconds=seconds, number=number, run=run)


def _measure_bursts(
    proxy: str, target: Started, *, seconds: float, number: int, run: Run
) -> None:
    """Send bursts of each size to one proxy; pass 0 warms up."""
    question = PROXIES[proxy].question(streamed=BUSY.streamed, engines=target.engines)
    for size in BURSTS:
        limit_s = seconds if number else WARM_S
        sample = uvloop.run(
            burst(
                target.port,
                question,
                connections=size,
                busy=BUSY.connections,
                seconds=limit_s,
            )
        )
        wrong = f", {sample.errors} errors" if sample.errors else ""
        which = f"pass {number}" if number else "warm-up"
        say(
            f"{which}, {size} new connections, {proxy}: {sample.p50:.1f} / {sample.p99:.1f} / {sample.most:.1f} ms{wrong}"
        )
        if number:
            run.bursts[size][proxy].append(sample)


def pace(stub_port: int, pause_us: int) -> None:
    """Set the stub's pause before each token."""
    urllib.request.urlopen(
        f"http://127.0.0.1:{stub_port}/pace/{pause_us}", timeout=10
    ).close()


def say(what: str) -> None:
    """Print a line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
