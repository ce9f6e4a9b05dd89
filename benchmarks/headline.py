"""The headline: the same hardware as three tiers, and as replicas of one precision, under the same open load.

    python benchmarks/headline.py [--rate 50] [--loads 0.3 1.2] [--only simulated | real] [--json FILE]

Guides to routing by precision promise a TTFT 68 % lower, four times the throughput, and 0.4 % errors instead of 18 %. This
shows what is reached, under which load, and what it costs in loss.

``simulated``: three H100 with Llama 3.1 8B, simulated in real time (``simulated_engine.py`` has figures and sources), behind
the real router over real sockets: as one engine each of AWQ, FP8 and BF16, as three replicas of BF16, and as three of FP8,
which is the fairer comparison. All are given the same requests at the same moments: Poisson arrivals of the committed
prompts. At this rate three H100 are nearly idle with short answers, so a load is set by the answers' lengths, as a share of
the tokens a second that three BF16 replicas can produce at most. All fleets have the same settings, and the speeds that
``qarr profile latency`` measured on the three tiers. Losses are assumed (``fleets.py`` has the sources).

``real``: the real engines of this machine at a small load: the router's choice, and everything on one of them; the idle
ones leave it the cores.

Errors are requests that were refused, cut off, or beyond the client's time limit. Of these, TTFT counts none. Tokens a
second are those of complete answers. Loss is the share of tokens that is expected to differ from BF16's likeliest one.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleets import (
    LOSS_SOURCE,
    Cpu,
    Simulation,
    assumed_losses,
    give_profiles,
    given_settings,
    half_life,
    idle,
    kept_profiles,
    measure_speed,
    merged,
    real_engines,
    router,
    simulated_engines,
)
from open_loop import (
    Answer,
    Workload,
    arrivals,
    as_row,
    blocks_of,
    by_class,
    interval,
    mean_loss_of,
    read_prompts,
    resampled,
    send,
    token_loss,
    uniform,
    with_loss,
    write_lines,
)
from simulated_engine import HARDWARE, offline

from router.policy.profiles import Interval, percentile
from router.settings import cache_dir
from tiers.spec import STANDARD_TIERS, TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fleets import Engines
    from open_loop import Arrival


FAST, BALANCED, PRECISE = STANDARD_TIERS
FLEETS: dict[str, tuple[TierName, ...]] = {
    "three tiers": (FAST, BALANCED, PRECISE),
    "3 x BF16": (PRECISE,) * 3,
    "3 x FP8": (BALANCED,) * 3,
    "3 x AWQ": (FAST,) * 3,
}
SHOWN = ("three tiers", "3 x BF16", "3 x FP8")
CLAIMS = "the guides: TTFT -68 %, 4 x the tokens a second, errors 18 -> 0.4 %"
BLOCK_S = 5.0
HALF_LIFE_S = 10.0
TOO_BUSY = "THIS MACHINE WAS TOO BUSY FOR IT"
MOST_LOST_S, MOST_LATE_MS = 0.1, 50.0  # beyond which the machine was measured, not the fleet
MOST_TOKENS = 2048  # of an answer, so that it can end within the client's time limit
PERCENTILE_RESAMPLES = 200


@dataclass(frozen=True, slots=True)
class Load:
    """One load. Times in seconds; bounds in milliseconds.

    Attributes:
        warm_s: Requests that arrive before are not counted.
        limit_s: After which a client leaves.
    """

    title: str
    workload: Workload
    rate: float
    seconds: float
    warm_s: float
    limit_s: float
    ttft_ms: float
    tpot_ms: float
    seed: int

    @property
    def sla(self) -> dict[str, Any]:
        """Return what every request asks for."""
        return {"qarr": {"sla": {"ttft_ms": self.ttft_ms, "tpot_ms": self.tpot_ms}}}


@dataclass(slots=True)
class Row:
    """What one fleet did under one load.

    Attributes:
        answers: To the requests that count.
        busy: Share of the time in which each simulated GPU computed.
        cpu: Share of one core of each process.
        lost_s: Longest that a simulated engine fell behind its clock.
    """

    answers: list[Answer]
    busy: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    lost_s: float = 0.0

    @property
    def late_ms(self) -> float:
        """Return by how much requests were sent too late, in 95 % of cases at most."""
        return percentile([a.late_ms for a in self.answers], 0.95)

    @property
    def disturbed(self) -> bool:
        """Tell whether this machine was too busy to simulate the fleet, or to send what was due."""
        return self.lost_s > MOST_LOST_S or self.late_ms > MOST_LATE_MS

    def times(self, name: str) -> list[float]:
        """Return the times of complete answers, in milliseconds."""
        return [value for a in self.answers if a.error is None and (value := getattr(a, name)) is not None]


def main() -> None:
    """Run as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("simulated", "real"), help="by default both")
    parser.add_argument("--rate", type=float, default=50, help="simulated: requests a second")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 1.2], help="shares of what 3 x BF16 can do")
    parser.add_argument("--fleets", nargs="+", choices=FLEETS, default=list(SHOWN))
    parser.add_argument("--seconds", type=float, default=35)
    parser.add_argument("--warm", type=float, default=10, help="seconds at the beginning that are not counted")
    parser.add_argument("--limit", type=float, default=30, help="a client's time limit in seconds")
    parser.add_argument("--ttft", type=float, default=1000, help="bound that requests have, in milliseconds")
    parser.add_argument("--tpot", type=float, default=25, help="bound that requests have, in milliseconds")
    parser.add_argument("--max-num-seqs", type=int, default=128, help="of each simulated engine")
    parser.add_argument("--real-rate", type=float, default=0.5)
    parser.add_argument("--real-seconds", type=float, default=30)
    parser.add_argument("--profiles", type=Path, default=cache_dir() / "profiles", help="real: folder of profiles")
    parser.add_argument("--set", action="append", default=[], metavar="TOML", help="as policy.give_up='quality'")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file that every answer is written to")
    options = parser.parse_args()
    print(f"$ python benchmarks/headline.py {' '.join(a for a in sys.argv[1:] if not a.startswith('/'))}")
    if options.json is not None:
        options.json.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        if options.only != "real":
            run_simulated(options, Path(folder))
        if options.only != "simulated":
            run_real(options, Path(folder))


def note(text: str) -> None:
    """Show progress on standard error."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def make_loads(options: argparse.Namespace) -> list[Load]:
    """Return the simulated loads: the answers' lengths are scaled to the share of what three BF16 replicas can do."""
    prompts = read_prompts()
    loads = []
    for share in options.loads:
        scale = scale_for(share, options.rate, options.max_num_seqs, prompts)
        workload = Workload(prompts, by_class(scale, MOST_TOKENS))
        tokens = mean_tokens(workload)
        title = (
            f"{options.rate:g} requests/s, answers of {tokens:.0f} tokens in the mean: "
            f"{share:g} of what 3 x BF16 can do"
        )
        loads.append(
            Load(title, workload, options.rate, options.seconds, options.warm, options.limit, options.ttft,
                 options.tpot, options.seed)
        )  # fmt: skip
    return loads


def mean_tokens(workload: Workload) -> float:
    """Return the mean length of answers, from a large sample."""
    source = random.Random(1)
    return statistics.fmean(workload.tokens(source, kind) for _ in range(200) for kind, _ in workload.prompts)


def scale_for(share: float, rate: float, max_num_seqs: int, prompts: Sequence[tuple[str, str]]) -> float:
    """Return the scale of answers at which a rate is a share of what three BF16 replicas can do."""
    prompt_tokens = round(statistics.fmean(len(text) // 4 + 6 for _, text in prompts))
    scale = 1.0
    for _ in range(12):
        tokens = mean_tokens(Workload(tuple(prompts), by_class(scale, MOST_TOKENS)))
        most = 3 * offline(HARDWARE["precise"], prompt_tokens, round(tokens), 4 * max_num_seqs, max_num_seqs)
        scale *= share * most / (rate * tokens)
    return scale


def run_simulated(options: argparse.Namespace, folder: Path) -> None:
    """Compare fleets of simulated engines."""
    loads = make_loads(options)
    simulation = Simulation(1.0, options.max_num_seqs, 16)
    note("measuring the speed of the three tiers")
    with (
        simulated_engines(FLEETS["three tiers"], simulation) as engines,
        router(folder / "speeds", engines) as measured,
    ):
        speeds = measure_speed(measured, 1.5)
    rows: dict[str, dict[str, Row]] = {load.title: {} for load in loads}
    for name in options.fleets:
        with (
            simulated_engines(FLEETS[name], simulation) as engines,
            router(folder / name.replace(" ", ""), engines, own_settings(options)) as running,
        ):
            give_profiles(running, assumed_losses({}), speeds)
            processes = {"router": running.process, **engines.processes}
            for load in loads:
                row = measured_row(running.url, load, name, lambda _i, _a: {"model": "auto"}, processes, engines)
                row.answers = with_loss(row.answers, assumed_losses({}))
                rows[load.title][name] = row
                keep(options.json, load, name, row)
    policy = f"its loss budget, with a half-life of {HALF_LIFE_S:g} s"
    given = f", {'; '.join(options.set)}" if options.set else ""
    print(f"# simulated: 3 H100, Llama 3.1 8B, real time, batches of at most {options.max_num_seqs}; {LOSS_SOURCE}")
    print(f"# the router's default policy, {policy}{given}")
    print_capacity(options.max_num_seqs, loads)
    for load in loads:
        show(load, rows[load.title])
        for base in ("3 x BF16", "3 x FP8", "3 x AWQ"):
            compare(load, rows[load.title], "three tiers", base)
    print(f"\n{CLAIMS}")


def own_settings(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the settings that differ from the defaults."""
    return merged(half_life(HALF_LIFE_S), given_settings(options.set))


def print_capacity(max_num_seqs: int, loads: Sequence[Load]) -> None:
    """Print what fleets produce if all engines are always full, by the roofline alone."""
    for load in loads:
        tokens, kinds = round(mean_tokens(load.workload)), load.workload.prompts
        prompt = round(statistics.fmean(len(text) // 4 + 6 for _, text in kinds))
        most = {
            tier: offline(HARDWARE[tier], prompt, tokens, 4 * max_num_seqs, max_num_seqs) for tier in STANDARD_TIERS
        }
        told = ", ".join(f"{name} {sum(most[tier] for tier in tiers):,.0f}" for name, tiers in FLEETS.items())
        print(f"# tokens/s if always full, prompts of {prompt} and answers of {tokens} tokens: {told}")


def run_real(options: argparse.Namespace, folder: Path) -> None:
    """Compare ways to use the real engines of this machine."""
    kinds = ("chat", "writing", "multilingual", "code", "math", "extraction")
    workload = Workload(read_prompts(kinds), uniform(8, 32))
    load = Load(
        f"real engines: {options.real_rate:g} requests/s, answers of 8 to 32 tokens", workload, options.real_rate,
        options.real_seconds, 0.0, 60.0, 4000.0, 400.0, options.seed,
    )  # fmt: skip
    note("starting the real engines")
    with real_engines() as engines:
        quality, speeds = kept_profiles(options.profiles, engines)
        with router(folder / "real", engines, own_settings(options)) as running:
            if speeds is None:
                note("measuring the speed of the real engines")
                speeds = measure_speed(running, 4)
            give_profiles(running, quality, speeds)
            print(f"\n# real: {quality.model} on {speeds.machine}; losses measured; the router's default policy")
            modes: dict[str, Callable[[int, Arrival], dict[str, Any]]] = {
                "three tiers": lambda _i, _a: {"model": "auto"},
                "all precise": lambda _i, _a: required(TierName.PRECISE),
                "all balanced": lambda _i, _a: required(TierName.BALANCED),
            }
            rows = {}
            for name, body in modes.items():
                processes = {"router": running.process, **engines.processes}
                rows[name] = row = measured_row(running.url, load, name, body, processes, engines)
                row.answers = with_loss(row.answers, quality)
                keep(options.json, load, name, row)
            show(load, rows)
            for base in ("all precise", "all balanced"):
                compare(load, rows, "three tiers", base)


def required(tier: TierName) -> dict[str, Any]:
    """Return the members of a request that only one tier may answer."""
    return {"model": tier, "qarr": {"tier_policy": "require"}}


def measured_row(
    url: str,
    load: Load,
    name: str,
    body: Callable[[int, Arrival], dict[str, Any]],
    processes: Mapping[str, Any],
    engines: Engines,
) -> Row:
    """Put a load on a fleet, and tell how busy the engines were while requests came that count."""
    plan = arrivals(load.workload, load.rate, load.seconds, load.seed)
    note(f"{name}: {load.title}; {len(plan)} requests")

    def asked(index: int, arrival: Arrival) -> dict[str, Any]:
        more = body(index, arrival)
        return more if "qarr" in more else {**more, **load.sla}  # bounds of requests that require a tier are conditions

    def progress(at_s: float, sent: int, ended: int) -> None:
        note(f"  {at_s:3.0f} s: {sent} sent, {sent - ended} open")

    row = Row([])

    async def watched() -> list[Answer]:
        sending = asyncio.create_task(send(url, plan, asked, f"{label}-{load.rate:g}", load.limit_s, progress))
        await asyncio.sleep(load.warm_s)
        cpu, before = Cpu(dict(processes)), await asyncio.to_thread(engines.work)
        await asyncio.sleep(load.seconds - load.warm_s)
        row.cpu = cpu.shares()
        for engine, work in (await asyncio.to_thread(engines.work)).items():
            row.busy[engine] = (work["busy_s"] - before[engine]["busy_s"]) / (load.seconds - load.warm_s)
            row.lost_s = max(row.lost_s, work["lost_s"] - before[engine]["lost_s"])
        return await sending

    label = "".join(c if c.isalnum() else "-" for c in name)
    row.answers = [a for a in asyncio.run(watched()) if a.at_s >= load.warm_s]
    asyncio.run(idle(url))
    return row


def keep(path: Path | None, load: Load, name: str, row: Row) -> None:
    """Write a row's answers to the file of JSON lines."""
    if path is not None:
        write_lines(path, [{"load": load.title, "row": name, **as_row(answer)} for answer in row.answers])


def show(load: Load, rows: Mapping[str, Row]) -> None:
    """Print one load's table."""
    counted = load.seconds - load.warm_s
    print(
        f"\n{load.title}\n{counted:g} s counted after {load.warm_s:g} s, {len(next(iter(rows.values())).answers)} requests"
    )
    print(
        f"{'fleet':14} {'TTFT p50/p95 ms':>16} {'TPOT p50/p95 ms':>16} {'tokens/s':>9} {'errors %':>9} "
        f"{'refused/cut/late':>17} {'in time %':>10} {'mean loss':>10} {'fast/bal./prec. %':>18}"
        f" {'engines busy %':>15}"
    )
    for name, row in rows.items():
        answers = row.answers
        ttft, tpot = row.times("ttft_ms"), row.times("tpot_ms")
        wrong = [sum(a.error == kind for a in answers) for kind in ("refused", "cut", "late")]
        shares = "/".join(f"{sum(a.tier is tier for a in answers) / len(answers) * 100:.0f}" for tier in STANDARD_TIERS)
        in_time = sum(a.meets(load.ttft_ms, load.tpot_ms) for a in answers) / len(answers)
        print(
            f"{name:14} {percentile(ttft, 0.5):8.0f}/{percentile(ttft, 0.95):<7.0f}"
            f" {percentile(tpot, 0.5):8.1f}/{percentile(tpot, 0.95):<7.1f}"
            f" {sum(a.tokens for a in answers if a.error is None) / counted:9,.0f} {sum(wrong) / len(answers) * 100:9.2f}"
            f" {'/'.join(map(str, wrong)):>17} {in_time * 100:10.1f} {mean_loss_of(answers):10.4f}"
            f" {shares:>18}"
            f" {'/'.join(f'{share * 100:.0f}' for share in row.busy.values()):>15}"
        )
    for name, row in rows.items():
        told = ", ".join(f"{process} {share * 100:.0f} %" for process, share in row.cpu.items())
        behind = f"; an engine fell {row.lost_s * 1000:.0f} ms behind" if row.lost_s else ""
        busy = f" - {TOO_BUSY}" if row.disturbed else ""
        print(f"  {name}: of one core {told}; 95 % of requests sent at most {row.late_ms:.1f} ms late{behind}{busy}")


def compare(load: Load, rows: Mapping[str, Row], name: str, base: str) -> None:
    """Print what one fleet changes against another, with 95 % intervals over blocks of time that both share."""
    if name not in rows or base not in rows:
        return
    mine, other = rows[name].answers, rows[base].answers
    seconds = load.seconds - load.warm_s
    moved = [[_shifted(a, load.warm_s) for a in answers] for answers in (mine, other)]
    cuts = [[blocks_of([answers], BLOCK_S, seconds, top, one) for answers in moved] for top, one in _MEASURES.values()]
    samples = resampled(len(cuts[0][0].top))
    found = dict(zip(_MEASURES, cuts, strict=True))
    tokens = [found["tokens"][0].ratio(s) / max(found["tokens"][1].ratio(s), 1e-9) for s in samples]
    ratio = found["tokens"][0].ratio() / max(found["tokens"][1].ratio(), 1e-9)
    errors, loss = interval(*_pair(found["errors"], samples)), interval(*_pair(found["loss"], samples))
    changes = [ttft_change(moved[0], moved[1], seconds, share) for share in (0.5, 0.95)]
    shown = ", ".join(f"TTFT p{share} {_percent(change)}" for share, change in zip((50, 95), changes, strict=True))
    print(
        f"{name} against {base}: {shown}, tokens/s x {ratio:.2f} ({percentile(tokens, 0.025):.2f} to "
        f"{percentile(tokens, 0.975):.2f}), errors {found['errors'][1].ratio() * 100:.2f} -> "
        f"{found['errors'][0].ratio() * 100:.2f} % ({errors.low * 100:+.2f} to {errors.high * 100:+.2f}), "
        f"loss {loss.mean:+.4f} ({loss.low:+.4f} to {loss.high:+.4f})"
    )
    if rows[name].disturbed or rows[base].disturbed:
        print(f"  not compared with the guides' claims: {TOO_BUSY}")
        return
    before, after = (found["errors"][which].ratio() for which in (1, 0))
    claims = {
        "TTFT -68 %": changes[0].mean <= -0.68,
        "4 x tokens/s": ratio >= 4,
        "errors 18 -> 0.4 %": before >= 0.18 and after <= 0.004,
    }
    reached = [claim for claim, held in claims.items() if held]
    print(f"  of what the guides claim, reached here: {', '.join(reached) or 'nothing'}; for {loss.mean:+.4f} of loss")


_MEASURES: dict[str, tuple[Callable[[Answer], float | None], Callable[[Answer], float] | None]] = {
    "tokens": (lambda a: float(a.tokens) if a.error is None else 0.0, None),
    "errors": (lambda a: float(a.error is not None), lambda _: 1.0),
    "loss": (token_loss, lambda a: a.tokens),
}


def _pair(pair: Sequence[Any], samples: Sequence[Sequence[int]]) -> tuple[Any, Any, Any]:
    return pair[0], samples, pair[1]


def _shifted(answer: Answer, by_s: float) -> Answer:
    return replace(answer, at_s=answer.at_s - by_s)


def _percent(change: Interval) -> str:
    return f"{change.mean * 100:+.0f} % ({change.low * 100:+.0f} to {change.high * 100:+.0f})"


def ttft_change(mine: Sequence[Answer], other: Sequence[Answer], seconds: float, share: float) -> Interval:
    """Return the relative change of a percentile of TTFT, with its interval over blocks of time that both share."""
    count = max(1, round(seconds / BLOCK_S))
    blocks: list[list[list[float]]] = [[[] for _ in range(count)] for _ in range(2)]
    for which, answers in enumerate((mine, other)):
        for a in answers:
            if a.error is None and a.ttft_ms is not None:
                blocks[which][min(count - 1, int(a.at_s / seconds * count))].append(a.ttft_ms)

    def change(chosen: Sequence[int]) -> float:
        own, base = (percentile([t for n in chosen for t in side[n]], share) for side in blocks)
        return own / base - 1 if base else 0.0

    drawn = [change(sample) for sample in resampled(count, times=PERCENTILE_RESAMPLES)]
    return Interval(mean=change(range(count)), low=percentile(drawn, 0.025), high=percentile(drawn, 0.975))


if __name__ == "__main__":
    main()
