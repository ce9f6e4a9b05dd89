"""What a turn of a long conversation costs a router: CPU time at four lengths, and with an image of 5 MB.

usage: python benchmarks/turn_cost.py [--passes 5] [--beside DIR] [--json FILE]

Each conversation is one of a coding agent: a system prompt, tools, calls of them and their results, which are slices of
Python's standard library. It is sent once as it is (*fresh*: no router has seen its messages before, apart from the system
prompt and the tools), and then four times with 500 tokens more (*growing*). A token is taken to be four characters. Answers
are not streamed and have eight tokens, so that the prompt is nearly all of the work.

All routers get the same conversations, one after the other and in turns, in every pass another set of them. Routers have
the first core; the stub engine and the client share the last one. CPU time is the kernel's (/proc/PID/task/*/schedstat: user
and system, of all threads and children), less what the router uses in the same time when nobody asks it anything, such as to
watch engines. Trust ratios of one run first.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import platform
import random
import shlex
import socket
import statistics
import sys
import sysconfig
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure import free_port, note, process, tree, wait_for
from proxies import (
    BASE,
    OURS,
    PROXIES,
    WHOLE_TOKENS,
    Place,
    Proxy,
    SkippedError,
    Started,
    commit,
    default_tokenizer,
    of_checkout,
    started,
)
from token_stub import MODEL, WORD

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import psutil

RELAY = "uvloop byte relay"
CHARS_PER_TOKEN = 4
TURN_TOKENS = 500  # that each turn adds
TURNS = 4  # of a conversation, after the first
CONTEXT = 400_000  # tokens, of the stub engine
MAX_BODY_BYTES = 32 << 20
IMAGE_BYTES = 5_000_000  # as base64
IMAGE_TOKENS = 10_000  # of the conversation that has the image
TIMEOUT_S = 60.0
IDLE_S = 4.0  # for which CPU time is read while nobody asks
SYSTEM_PROMPT = (
    "You are a coding agent. You work in the user's repository with the tools that you are given. Read before you write, "
    "change as little as the task needs, run the tests, and say in the end what you have done. "
)
TOOL_PROPERTIES = {
    "path": {"type": "string", "description": "relative to the repository's root"},
    "text": {"type": "string", "description": "what to look for, or to write"},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{what} Paths are relative to the repository's root.",
            "parameters": {"type": "object", "properties": TOOL_PROPERTIES},
        },
    }
    for name, what in (
        ("read_file", "Read a part of a file."),
        ("edit_file", "Replace a text in a file by another one."),
        ("search", "Search the repository for a text."),
        ("run", "Run a command in a shell and return its output."),
    )
]
SOURCES = (
    "argparse.py",
    "ast.py",
    "doctest.py",
    "inspect.py",
    "pickletools.py",
    "subprocess.py",
    "tarfile.py",
    "turtle.py",
    "typing.py",
    "zipfile.py",
)


@dataclass(frozen=True, slots=True)
class Length:
    """Conversations of one length.

    Attributes:
        title: In the table.
        tokens: Of a conversation, at four characters each, when it is first sent.
        conversations: In one pass.
        image_bytes: Of an image in the first message, as base64; 0: there is none.
    """

    title: str
    tokens: int
    conversations: int
    image_bytes: int = 0


LENGTHS = {
    "1k": Length("1,000 tokens", 1_000, 12),
    "10k": Length("10,000 tokens", 10_000, 6),
    "60k": Length("60,000 tokens", 60_000, 3),
    "120k": Length("120,000 tokens", 120_000, 2),
    "image": Length("10,000 tokens and an image of 5 MB", IMAGE_TOKENS, 2, IMAGE_BYTES),
}
KINDS = ("fresh", "growing")


@dataclass(slots=True)
class Conversation:
    """An agent's conversation, made from a seed."""

    random: random.Random
    messages: list[dict[str, Any]]
    chars: int = 0

    @classmethod
    def begin(cls, length: Length, seed: str) -> Conversation:
        """Return a conversation of a length; others with another seed share its system prompt and tools alone."""
        source = random.Random(seed)
        task = f"Task {seed}: find out why nested groups fail, and repair it."
        content: Any = task
        if length.image_bytes:
            image = base64.b64encode(source.randbytes(length.image_bytes * 3 // 4))
            url = {"url": f"data:image/png;base64,{image.decode()}"}
            content = [
                {"type": "text", "text": task},
                {"type": "image_url", "image_url": url},
            ]
        conversation = cls(source, [{"role": "system", "content": SYSTEM_PROMPT * 2}])
        conversation.messages.append({"role": "user", "content": content})
        conversation.chars = len(SYSTEM_PROMPT) * 2 + len(json.dumps(TOOLS))
        wanted_chars = length.tokens * CHARS_PER_TOKEN
        while conversation.chars < wanted_chars:
            missing_chars = wanted_chars - conversation.chars
            conversation.add(min(missing_chars, TURN_TOKENS * CHARS_PER_TOKEN))
        return conversation

    def add(self, chars: int = TURN_TOKENS * CHARS_PER_TOKEN) -> None:
        """Add a call of a tool and its result, of about so many characters together."""
        name = f"call_{len(self.messages)}"
        arguments = json.dumps({"path": f"src/part_{self.random.randrange(10**6)}.py"})
        function = {"name": "read_file", "arguments": arguments}
        call = {"id": name, "type": "function", "function": function}
        said = "I read the next part of the file."
        result_chars = max(chars - len(said) - len(json.dumps(call)), 1)
        start = self.random.randrange(len(_source()) - result_chars)
        self.messages += [
            {"role": "assistant", "content": said, "tool_calls": [call]},
            {
                "role": "tool",
                "tool_call_id": name,
                "content": _source()[start : start + result_chars],
            },
        ]
        self.chars += chars

    def request(self, model: str) -> bytes:
        """Return a chat with the conversation as an HTTP request."""
        body = json.dumps(
            {
                "model": model,
                "messages": self.messages,
                "tools": TOOLS,
                "max_tokens": WHOLE_TOKENS,
                "stream": False,
            }
        ).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


_SOURCES: list[str] = []


def _source() -> str:
    """Return the text from which results of tools are cut, read once."""
    if not _SOURCES:
        folder = Path(sysconfig.get_path("stdlib"))
        _SOURCES.append("".join((folder / name).read_text("utf-8") for name in SOURCES))
    return _SOURCES[0]


@dataclass(frozen=True, slots=True)
class Sample:
    """The turns of one pass: CPU time and time to the answer of one turn, in milliseconds, as means."""

    cpu_ms: float
    wall_ms: float
    turns: int
    kilobytes: float  # of a request, on average


@dataclass(slots=True)
class Turns:
    """Turns of one pass and kind, as they are sent."""

    cpu_ns: float = 0.0
    wall_ns: int = 0
    count: int = 0
    sent_bytes: int = 0

    def sample(self) -> Sample:
        """Return the means of one turn."""
        return Sample(
            cpu_ms=self.cpu_ns / self.count / 1e6,
            wall_ms=self.wall_ns / self.count / 1e6,
            turns=self.count,
            kilobytes=self.sent_bytes / self.count / 1000,
        )


class Client:
    """One kept-alive connection to a router, whose CPU time is read before and after each answer."""

    def __init__(self, router: Started, idle_share: float) -> None:
        self._router = router
        self._idle_share = idle_share
        self._socket = socket.create_connection(("127.0.0.1", router.port), TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, request: bytes, turns: Turns) -> None:
        """Send a request, read the whole answer, and add what it cost."""
        cpu_before_ns = cpu_ns(self._router.process)
        began_ns = time.perf_counter_ns()
        self._socket.sendall(request)
        answer = self._read()
        wall_ns = time.perf_counter_ns() - began_ns
        used_ns = cpu_ns(self._router.process) - cpu_before_ns
        turns.wall_ns += wall_ns
        turns.cpu_ns += used_ns - self._idle_share * wall_ns
        turns.count += 1
        turns.sent_bytes += len(request)
        if not answer.startswith(b"HTTP/1.1 200") or answer.count(WORD) != WHOLE_TOKENS:
            sys.exit(f"error: an answer is wrong: {answer[:300]!r}")

    def _read(self) -> bytes:
        answer = b""
        while not _is_whole(answer):
            part = self._socket.recv(65536)
            if not part:
                sys.exit(f"error: the router closed the connection: {answer[:300]!r}")
            answer += part
        return answer

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def _is_whole(answer: bytes) -> bool:
    head, end, body = answer.partition(b"\r\n\r\n")
    if not end:
        return False
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(body) >= int(line.partition(b":")[2])
    return body.endswith(b"0\r\n\r\n")


def cpu_ns(root: psutil.Process) -> int:
    """Return the CPU time of all threads of a process and of what it has started, in nanoseconds."""
    total_ns = 0
    for running in tree(root):
        for thread in Path(f"/proc/{running.pid}/task").glob("*/schedstat"):
            with suppress(OSError):
                total_ns += int(thread.read_text("ascii").split()[0])
    return total_ns


def idle_shares(routers: dict[str, Started]) -> dict[str, float]:
    """Return what share of a core each router uses while nobody asks it anything."""
    before_ns = {name: cpu_ns(router.process) for name, router in routers.items()}
    time.sleep(IDLE_S)
    return {
        name: (cpu_ns(router.process) - before_ns[name]) / (IDLE_S * 1e9)
        for name, router in routers.items()
    }


def rss_mb(root: psutil.Process) -> float:
    """Return the resident memory of a process and of what it has started."""
    return sum(running.memory_info().rss for running in tree(root)) / 1e6


@dataclass(slots=True)
class Run:
    """A whole run.

    Attributes:
        head: What stands above the tables.
        versions: Of the routers, by row.
        skipped: Why a row is missing.
        samples: By length, by kind, by row, in the order of the passes.
        memory_mb: Resident memory of each row at the end.
    """

    head: list[str]
    versions: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    samples: dict[str, dict[str, dict[str, list[Sample]]]] = field(default_factory=dict)
    memory_mb: dict[str, float] = field(default_factory=dict)

    def rows(self, length: str, kind: str) -> dict[str, dict[str, float | None]]:
        """Return each router's medians for one length and kind, and its ratio to the base in the same passes."""
        by_router = self.samples[length][kind]
        return {
            router: {
                "ratio": _ratio(samples, by_router.get(BASE)),
                "cpu_ms": statistics.median(sample.cpu_ms for sample in samples),
                "least_ms": min(sample.cpu_ms for sample in samples),
                "most_ms": max(sample.cpu_ms for sample in samples),
                "wall_ms": statistics.median(sample.wall_ms for sample in samples),
                "kilobytes": samples[0].kilobytes,
            }
            for router, samples in by_router.items()
        }

    def text(self) -> str:
        """Return what is printed."""
        lines = [*self.head, ""]
        lines += [
            f"{router:27} {version}, {self.memory_mb[router]:.0f} MB at the end"
            for router, version in self.versions.items()
        ]
        lines += [f"{router:27} skipped: {why}" for router, why in self.skipped.items()]
        for name, length in LENGTHS.items():
            for kind in KINDS:
                if name in self.samples:
                    lines += ["", *self._table(length.title, name, kind)]
        return "\n".join(lines) + "\n"

    def _table(self, title: str, length: str, kind: str) -> list[str]:
        rows = self.rows(length, kind)
        kilobytes = next(iter(rows.values()))["kilobytes"]
        ratio_head = f"ratio to {BASE}"
        lines = [
            f"{title}, {kind}: {kilobytes:.0f} kB a request",
            f"{'':27} {ratio_head:>32} {'CPU ms a turn (least to most)':>32} {'ms to the answer':>18}",
        ]
        for router, row in rows.items():
            ratio = "-" if row["ratio"] is None else f"x{row['ratio']:.2f}"
            spread = f"({row['least_ms']:.2f} to {row['most_ms']:.2f})"
            lines.append(
                f"{router:27} {ratio:>32} {row['cpu_ms']:12.2f} {spread:>19} {row['wall_ms']:18.2f}"
            )
        before = [router for router in rows if router not in (BASE, RELAY, OURS)]
        if before and OURS in rows:
            samples = self.samples[length][kind]
            ratio = _ratio(samples[OURS], samples[before[0]])
            lines.append(f"-> {OURS}: x{ratio:.2f} of {before[0]}")
        return lines

    def record(self) -> dict[str, object]:
        """Return what is written as JSON."""
        return {
            "head": self.head,
            "versions": self.versions,
            "skipped": self.skipped,
            "memory_mb": self.memory_mb,
            "lengths": {name: asdict(LENGTHS[name]) for name in self.samples},
            "rows": {
                name: {kind: self.rows(name, kind) for kind in KINDS}
                for name in self.samples
            },
            "samples": {
                name: {
                    kind: {
                        router: [asdict(sample) for sample in samples]
                        for router, samples in by_router.items()
                    }
                    for kind, by_router in by_kind.items()
                }
                for name, by_kind in self.samples.items()
            },
        }


def _ratio(samples: Sequence[Sample], base: Sequence[Sample] | None) -> float | None:
    """Return the median of the ratios of CPU time, pass by pass; None: there is no base."""
    if base is None:
        return None
    return statistics.median(
        sample.cpu_ms / base_sample.cpu_ms
        for sample, base_sample in zip(samples, base, strict=True)
    )


def wanted_routers(beside: Path | None) -> dict[str, Proxy]:
    """Return the rows: the relay, vllm-router, the other checkout and this one."""
    routers = {RELAY: PROXIES[RELAY], BASE: PROXIES[BASE]}
    if beside is not None:
        others = of_checkout(beside.resolve())
        routers |= {name: proxy for name, proxy in others.items() if not proxy.generate}
    routers[OURS] = PROXIES[OURS]
    return routers


@dataclass(frozen=True, slots=True)
class Bench:
    """Everything that runs: the routers in front of one stub engine."""

    routers: dict[str, Started]
    passes: int
    idle_shares: dict[str, float]  # of a core, that each uses while nobody asks

    def measure(self, lengths: Sequence[str], run: Run) -> None:
        """Send every router the conversations of every pass; a first pass that is not counted warms all up."""
        for name in lengths:
            by_kind = {kind: {router: [] for router in self.routers} for kind in KINDS}
            run.samples[name] = by_kind
        for number in range(self.passes + 1):
            for name in lengths:
                self._measure_pass(name, number, run)
        for router, running in self.routers.items():
            run.memory_mb[router] = rss_mb(running.process)

    def _measure_pass(self, name: str, number: int, run: Run) -> None:
        length = LENGTHS[name]
        turns = {kind: {router: Turns() for router in self.routers} for kind in KINDS}
        order = list(self.routers)
        if number % 2:
            order.reverse()
        conversations = length.conversations if number else 1
        for conversation_number in range(conversations):
            seed = f"{name}-{number}-{conversation_number}"
            for router in order:
                self._send(router, Conversation.begin(length, seed), turns)
        for kind in KINDS:
            for router in self.routers:
                sample = turns[kind][router].sample()
                note(f"pass {number}, {name}, {kind}, {router}: {sample.cpu_ms:.2f} ms")
                if number:
                    run.samples[name][kind][router].append(sample)

    def _send(
        self,
        router: str,
        conversation: Conversation,
        turns: dict[str, dict[str, Turns]],
    ) -> None:
        """Send a conversation as it is, and then with a turn more each time."""
        model = "auto" if PROXIES.get(router, PROXIES[OURS]).ours else MODEL
        client = Client(self.routers[router], self.idle_shares[router])
        client.ask(conversation.request(model), turns["fresh"][router])
        for _ in range(TURNS):
            conversation.add()
            client.ask(conversation.request(model), turns["growing"][router])
        client.close()


def start_all(
    wanted: dict[str, Proxy],
    tokenizer: Path | None,
    cores: Sequence[int],
    run: Run,
    stack: ExitStack,
) -> dict[str, Started]:
    """Start the stub engine and every router that can be had."""
    ports = [free_port() for _ in range(3)]
    argv = [sys.executable, "benchmarks/token_stub.py", *map(str, ports)]
    environment = {**os.environ, "STUB_CONTEXT": str(CONTEXT)}
    stack.enter_context(process(argv, cores[-1], env=environment))
    wait_for(ports[0], "/health")
    engines = tuple(f"http://127.0.0.1:{port}" for port in ports)
    routers: dict[str, Started] = {}
    for name, proxy in wanted.items():
        try:
            run.versions[name] = proxy.version()
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            place = Place(engines, free_port(), str(cores[0]), folder, tokenizer)
            routers[name] = stack.enter_context(started(proxy, place))
            note(f"{name}: {run.versions[name]}")
        except SkippedError as why:
            run.versions.pop(name, None)
            run.skipped[name] = str(why)
            note(f"{name}: skipped: {why}")
    return routers


def head(options: argparse.Namespace, cores: Sequence[int]) -> Iterator[str]:
    """Yield the lines above the tables."""
    processors = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        if line.startswith("model name")
    ]
    counted = "counted with the model's tokenizer" if options.tokenizer else "estimated"
    yield f"$ python benchmarks/turn_cost.py {shlex.join(sys.argv[1:])}".rstrip()
    yield (
        f"commit {commit()}, {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC; {len(cores)} cores, "
        f"{processors[0] if processors else platform.machine()}, Linux {platform.release()}, "
        f"Python {platform.python_version()}"
    )
    yield f"Routers on core {cores[0]}, stub engine and client on core {cores[-1]}."
    yield f"Medians of {options.passes} passes, all routers in turns."
    yield f"ratio: CPU time of a turn to that of {BASE} in the same pass."
    yield f"fresh: sent for the first time; growing: {TURNS} further turns, each with {TURN_TOKENS} tokens more."
    yield f"QARR has prompt tokens {counted}, classifies, keeps prefixes, and logs each request; peers log warnings only."


def main() -> None:
    """Start everything, send all turns, print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument(
        "--lengths",
        default=",".join(LENGTHS),
        help=f"with commas between; all: {', '.join(LENGTHS)}",
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
        help="another checkout of QARR with a .venv, as a row",
    )
    options = parser.parse_args()
    lengths = [name.strip() for name in options.lengths.split(",")]
    if unknown := [name for name in lengths if name not in LENGTHS]:
        parser.error(
            f"no such lengths: {', '.join(unknown)}; there are: {', '.join(LENGTHS)}"
        )
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit(
            "error: this needs two cores: one for the routers, one for the stub engine and the client"
        )
    # All routers have room for the longest conversations.
    for tier in ("FAST", "BALANCED", "PRECISE"):
        os.environ[f"QARR_TIERS__{tier}__MAX_MODEL_LEN"] = str(CONTEXT)
    os.environ["QARR_SERVER__MAX_BODY_BYTES"] = str(MAX_BODY_BYTES)
    run = Run(list(head(options, cores)))
    with ExitStack() as stack:
        routers = start_all(
            wanted_routers(options.beside), options.tokenizer, cores, run, stack
        )
        os.sched_setaffinity(0, {cores[-1]})
        Bench(routers, options.passes, idle_shares(routers)).measure(lengths, run)
    print(run.text(), end="")
    if options.json:
        options.json.write_text(json.dumps(run.record(), indent=1) + "\n")


if __name__ == "__main__":
    main()
