"""What each proxy costs on one core: nginx, vllm-router, smg and QARR in front of one stub engine, side by side.

usage: python benchmarks/side_by_side.py [--seconds 5] [--passes 3] [--only ROW,ROW] [--beside DIR] [--json FILE]

Proxies have the first core; stub engine and load share the last one (from four cores on, each has its own). All proxies
run, one is asked at a time, and every pass asks each, so that a slow minute hits all. Trust CPU time an answer first, and
only ratios of one run. The table goes to standard output, progress to standard error.

Peers come from the package index into cached environments of their own (``scripts/setup vllm-router smg``), nginx from the
system; what cannot be had is skipped.
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
from token_load import load

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from token_load import Sample

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
        target: CPU time of QARR, at most, of that of vllm-router's cache_aware.
    """

    title: str
    connections: int
    streamed: bool
    pause_us: int
    target: float

    @property
    def stagger_ms(self) -> float:
        """Return the time between two starts that spreads paced streams evenly, over an answer and over a pause."""
        return (STREAM_TOKENS + 1) * self.pause_us / 1000 / self.connections


LOADS: dict[str, Load] = {
    "non-streaming": Load(f"non-streaming, {WHOLE_TOKENS} tokens, 16 connections", 16, False, 0, 1.0),
    "saturated": Load(f"{STREAM_TOKENS}-token streams, saturated, 32 connections", 32, True, 0, 0.8),
    "paced": Load(f"{STREAM_TOKENS}-token streams, 5 ms a token, 32 connections", 32, True, 5000, 1.3),
}


@dataclass(frozen=True, slots=True)
class Row:
    """The medians of all passes of one proxy under one load.

    Attributes:
        cpu_us: CPU time an answer, of the process tree.
        least, most: Of the passes.
        ratio: To the base in the same pass; None: the base was not measured.
        per_second: Good answers.
        added_p50, added_p99: Milliseconds to the first event, or to the whole answer, more than direct in the same pass.
        rss_mb: Resident memory of the process tree.
        answers, errors: In all passes.
    """

    cpu_us: float
    least: float
    most: float
    ratio: float | None
    per_second: float
    added_p50: float | None
    added_p99: float | None
    rss_mb: float
    answers: int
    errors: int


def summary(samples: Sequence[Sample], base: Sequence[Sample] | None, direct: Sequence[Sample] | None) -> Row:
    """Return a proxy's medians, and those of its differences to base and to direct, pass by pass."""

    def added(name: str) -> float | None:
        if direct is None or direct is samples:
            return None
        pairs = zip(samples, direct, strict=True)
        more: list[float] = [getattr(sample, name) - getattr(alone, name) for sample, alone in pairs]
        return statistics.median(more)

    costs = [sample.cpu_us for sample in samples]
    return Row(
        cpu_us=statistics.median(costs),
        least=min(costs),
        most=max(costs),
        ratio=statistics.median(s.cpu_us / b.cpu_us for s, b in zip(samples, base, strict=True)) if base else None,
        per_second=statistics.median(sample.per_second for sample in samples),
        added_p50=added("first_p50"),
        added_p99=added("first_p99"),
        rss_mb=statistics.median(sample.rss_mb for sample in samples),
        answers=sum(sample.answers for sample in samples),
        errors=sum(sample.errors for sample in samples),
    )


@dataclass(slots=True)
class Run:
    """A whole run: what stands above the table, and what was measured."""

    head: list[str]
    versions: dict[str, str]
    skipped: dict[str, str]
    samples: dict[str, dict[str, list[Sample]]]  # by load, by proxy, in the order of the passes

    def rows(self, name: str) -> dict[str, Row]:
        """Return the rows of one load."""
        found = self.samples[name]
        return {proxy: summary(samples, found.get(BASE), found.get(DIRECT)) for proxy, samples in found.items()}

    def text(self) -> str:
        """Return what is printed."""
        lines = [*self.head, ""]
        lines += [f"{name:27} {version}" for name, version in self.versions.items()]
        lines += [f"{name:27} skipped: {why}" for name, why in self.skipped.items()]
        for name, asked in LOADS.items():
            if self.samples.get(name):
                lines += ["", *_table(asked, self.rows(name))]
        wrong = {(p, s.error) for rows in self.samples.values() for p, found in rows.items() for s in found if s.error}
        lines += [f"\nfirst error of {proxy}: {error!r}" for proxy, error in sorted(wrong)]
        return "\n".join(lines) + "\n"

    def record(self) -> dict[str, object]:
        """Return what is written as JSON."""
        return {
            "head": self.head,
            "versions": self.versions,
            "skipped": self.skipped,
            "targets": {name: asked.target for name, asked in LOADS.items()} | {OURS_GENERATE: GENERATE_TARGET},
            "rows": {name: {p: asdict(row) for p, row in self.rows(name).items()} for name in self.samples},
            "samples": {
                name: {proxy: [asdict(s) for s in found] for proxy, found in rows.items()}
                for name, rows in self.samples.items()
            },
        }


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
        added = "-" if row.added_p50 is None else f"{row.added_p50:.2f} / {row.added_p99:.2f}"
        shown = f"{name} (the stub's CPU)" if name == DIRECT else name
        lines.append(
            f"{whose:6} {shown:27} {row.cpu_us:8.0f} {f'({row.least:.0f} to {row.most:.0f})':>20} {ratio:>7} "
            f"{row.per_second:11.0f} {added:>22} {row.rss_mb:8.0f} {row.errors:8}"
        )
    return [*lines, *(f"-> {said}" for said in _verdicts(asked, rows))]


def _verdicts(asked: Load, rows: dict[str, Row]) -> Iterator[str]:
    targets = {OURS: (rows[OURS].ratio, asked.target, BASE)} if OURS in rows else {}
    if OURS_GENERATE in rows and OURS in rows:
        targets[OURS_GENERATE] = (rows[OURS_GENERATE].cpu_us / rows[OURS].cpu_us, GENERATE_TARGET, OURS)
    for name, (ratio, target, other) in targets.items():
        if ratio is not None:
            yield f"{name}: x{ratio:.2f} of {other}; target at most x{target:g}: {'met' if ratio <= target else 'missed'}"


def main() -> None:
    """Start everything, ask all in turns, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5, help="of each load, for each proxy and pass")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--only", help=f"rows, with commas between: {', '.join(PROXIES)}")
    parser.add_argument("--tokenizer", type=Path, default=default_tokenizer(), help="model folder, for QARR's counts")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--beside", type=Path, metavar="DIR", help="another checkout of QARR with a .venv, as rows")
    options = parser.parse_args()
    if options.beside:
        PROXIES.update(of_checkout(options.beside.resolve()))
    wanted = [name.strip() for name in options.only.split(",")] if options.only else list(PROXIES)
    if unknown := [name for name in wanted if name not in PROXIES]:
        parser.error(f"no such rows: {', '.join(unknown)}; there are: {', '.join(PROXIES)}")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("error: this needs two cores: one for the proxy, one for the stub engine and the load")
    run = Run(_head(options, cores), {}, {}, {})
    with ExitStack() as stack:
        running, stub_port = _start(wanted, options.tokenizer, cores, run, stack)
        os.sched_setaffinity(0, {cores[-1]})
        _measure(running, stub_port, options.seconds, options.passes, run)
    print(run.text(), end="")
    if options.json:
        options.json.write_text(json.dumps(run.record(), indent=1) + "\n")


def _head(options: argparse.Namespace, cores: Sequence[int]) -> list[str]:
    names = [line for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines() if line.startswith("model name")]
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
        f"recorded and exported; it has prompt tokens {counted}. Peers log warnings only.",
    ]


def _stub_core(cores: Sequence[int]) -> int:
    """Return the core of the stub engine: one of its own from four cores on."""
    return cores[-2] if len(cores) > 3 else cores[-1]


def _start(
    wanted: Sequence[str], tokenizer: Path | None, cores: Sequence[int], run: Run, stack: ExitStack
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
                running[name] = Started(ports[0], stub)
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


def _measure(running: dict[str, Started], stub_port: int, seconds: float, passes: int, run: Run) -> None:
    """Ask every proxy under every load, in each pass, forwards and backwards in turns; the first one, short, warms up."""
    run.samples = {name: {proxy: [] for proxy in running} for name in LOADS}
    for number in range(passes + 1):
        for name, asked in LOADS.items():
            pace(stub_port, asked.pause_us)
            for proxy, target in list(running.items())[:: 1 if number % 2 else -1]:
                sample = uvloop.run(
                    load(
                        target.port,
                        PROXIES[proxy].question(streamed=asked.streamed),
                        target.process,
                        connections=asked.connections,
                        seconds=seconds if number else WARM_S,
                        stagger_ms=asked.stagger_ms,
                    )
                )
                wrong = f", {sample.errors} errors" if sample.errors else ""
                which = f"pass {number} of {passes}" if number else "warm-up"
                say(f"{which}, {name}, {proxy}: {sample.cpu_us:.0f} us an answer, {sample.per_second:.0f}/s{wrong}")
                if number:
                    run.samples[name][proxy].append(sample)


def pace(stub_port: int, pause_us: int) -> None:
    """Set the stub's pause before each token."""
    urllib.request.urlopen(f"http://127.0.0.1:{stub_port}/pace/{pause_us}", timeout=10).close()


def say(what: str) -> None:
    """Print a line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
