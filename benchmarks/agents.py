"""Coding agents that people use, unmodified, against the router: what they send, and whether they finish their errand.

usage: .venv/bin/python benchmarks/agents.py PROGRAMS [--only NAME,NAME] [--kill none,thought,name,arguments,text]
           [--stock-engines] [--record] [--limit SECONDS]

PROGRAMS is a folder in which the agents are installed (they take about 1 GB, so no test needs them):

    cp requirements/agents/* requirements/agents/.npmrc PROGRAMS && cd PROGRAMS && npm ci
    python3.11 -m venv aider && aider/bin/pip install aider-chat==0.86.2

Each agent is given a new repository whose test fails, a home folder of its own, the router's address, and a key. The
engines behind the router follow a script (``tests/agents/errand.py``) with thoughts and tool calls. With ``--kill``, the
engine of one request dies at the second token of that kind; with ``--stock-engines``, no engine resumes its answer. With
``--record``, the requests of each session without a kill go to tests/data/agents, where ``tests/unit/api/test_agents.py``
replays them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

from measure import ROOT, note

sys.path.insert(0, str(ROOT))

from tests.agents.engine import AgentEngine
from tests.agents.errand import TASK, Script, is_repaired, make_repository
from tests.agents.recording import RecordedRequest, write_recording
from tests.fakes.engine import Behaviour
from tests.unit import router_stack as stacks
from tiers.spec import STANDARD_TIERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONTEXT = 131_072
OUTPUT = 8_192
KILLS = ("none", "thought", "name", "arguments", "text")


class Place(NamedTuple):
    """Where an agent runs, and where its programs are."""

    programs: Path
    home: Path
    url: str


class Command(NamedTuple):
    """How an agent is started."""

    arguments: list[str]
    environment: dict[str, str] = {}  # noqa: RUF012  It is never changed.


class Agent(NamedTuple):
    """An agent with one of its providers."""

    name: str
    version: str
    endpoint: str
    command: Callable[[Place], Command]


def codex(place: Place) -> Command:
    """Codex CLI, whose providers speak the Responses API alone."""
    settings = place.home / ".codex/config.toml"
    settings.parent.mkdir()
    settings.write_text(
        'model = "auto"\nmodel_provider = "qarr"\n[model_providers.qarr]\nname = "QARR"\n'
        f'base_url = "{place.url}/v1"\nenv_key = "QARR_API_KEY"\nwire_api = "responses"\n'
    )
    program = str(place.programs / "node_modules/.bin/codex")
    # The repository is a throw-away, and the script's commands are known.
    bypass = "--dangerously-bypass-approvals-and-sandbox"
    return Command([program, "exec", bypass, TASK], {"QARR_API_KEY": "unused"})


def opencode(package: str, place: Place) -> Command:
    """Run opencode with a provider from one of the AI SDK's packages, which it holds."""
    settings = place.home / ".config/opencode/opencode.json"
    settings.parent.mkdir(parents=True)
    model = {"name": "auto", "reasoning": True, "tool_call": True}
    limits = {"limit": {"context": CONTEXT, "output": OUTPUT}}
    provider = {
        "npm": package,
        "name": "QARR",
        "options": {"baseURL": f"{place.url}/v1", "apiKey": "unused"},
        "models": {"auto": {**model, **limits}},
    }
    named = {"model": "qarr/auto", "provider": {"qarr": provider}}
    settings.write_text(json.dumps({**named, "autoupdate": False, "share": "disabled"}))
    program = place.programs / "node_modules/opencode-ai/bin/opencode.exe"
    offline = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}
    return Command([str(program), "run", TASK], offline)


def qwen_code(kind: str, place: Place) -> Command:
    """Run Qwen Code with one of its kinds of authentication, which name the API."""
    program = str(place.programs / "node_modules/.bin/qwen")
    options = ["--auth-type", kind, "-m", "auto", "-y", "--output-format", "json"]
    environment = {
        "OPENAI_API_KEY": "unused",
        "OPENAI_BASE_URL": f"{place.url}/v1",
        "ANTHROPIC_API_KEY": "unused",
        "ANTHROPIC_BASE_URL": place.url,
    }
    return Command(["node", program, *options, TASK], environment)


def aider(kind: str, place: Place) -> Command:
    """Aider edits by text, without tools; it runs the test itself and sends what failed."""
    program = str(place.programs / "aider/bin/aider")
    quiet = ["--yes-always", "--no-check-update", "--no-show-model-warnings"]
    plain = ["--analytics-disable", "--no-pretty", "--no-auto-lint"]
    test = ["--auto-test", "--test-cmd", "python3 test_calc.py"]
    model = ["--model", f"{kind}/auto", "--edit-format", "diff"]
    environment = {
        "OPENAI_API_KEY": "unused",
        "OPENAI_API_BASE": f"{place.url}/v1",
        "ANTHROPIC_API_KEY": "unused",
        "ANTHROPIC_API_BASE": place.url,
    }
    arguments = [*model, *quiet, *plain, *test, "--message", TASK, "calc.py"]
    return Command([program, *arguments], environment)


CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
AGENTS = (
    Agent("codex", "Codex CLI 0.169.0", RESPONSES, codex),
    Agent(
        "opencode-chat",
        "opencode 1.18.33",
        CHAT,
        partial(opencode, "@ai-sdk/openai-compatible"),
    ),
    Agent(
        "opencode-messages",
        "opencode 1.18.33",
        MESSAGES,
        partial(opencode, "@ai-sdk/anthropic"),
    ),
    Agent(
        "opencode-responses",
        "opencode 1.18.33",
        RESPONSES,
        partial(opencode, "@ai-sdk/openai"),
    ),
    Agent("qwen-chat", "Qwen Code 0.24.4", CHAT, partial(qwen_code, "openai")),
    Agent(
        "qwen-messages", "Qwen Code 0.24.4", MESSAGES, partial(qwen_code, "anthropic")
    ),
    Agent(
        "qwen-responses",
        "Qwen Code 0.24.4",
        RESPONSES,
        partial(qwen_code, "openai-responses"),
    ),
    Agent("aider-chat", "aider 0.86.2", CHAT, partial(aider, "openai")),
    Agent("aider-messages", "aider 0.86.2", MESSAGES, partial(aider, "anthropic")),
)


class Listener:
    """Stands before the router and notes the requests that come."""

    def __init__(self, app: ASGIApp, statuses: list[int]) -> None:
        self._app = app
        self._statuses = statuses
        self.requests: list[RecordedRequest] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = bytearray()

        async def listen() -> Message:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._statuses.append(message["status"])
            await send(message)

        await self._app(scope, listen, tell)
        path = scope["path"]
        if scope["query_string"]:
            path = f"{path}?{scope['query_string'].decode()}"
        headers = {key.decode(): value.decode() for key, value in scope["headers"]}
        content = json.loads(body) if body else None
        self.requests.append(RecordedRequest(scope["method"], path, headers, content))


class Session(NamedTuple):
    """What came of one errand."""

    agent: Agent
    kill: str
    requests: list[RecordedRequest]
    statuses: list[int]
    has_finished: bool
    is_repaired: bool
    runs: int
    seconds: float
    output: str

    @property
    def row(self) -> str:
        """Return the session as a line of the table."""
        turns = [request for request in self.requests if request.method == "POST"]
        failed = [str(status) for status in self.statuses if status >= 400]
        result = "finished" if self.has_finished and self.is_repaired else "failed"
        agent = self.agent
        return (
            f"{agent.version:18} {agent.endpoint:21} {self.kill:10} {result:9} {len(turns):8} {self.runs:7} "
            f"{','.join(failed) or '-':9} {self.seconds:7.0f}"
        )


HEADER = (
    f"{'agent':18} {'endpoint':21} {'killed in':10} {'errand':9} {'requests':>8} {'engines':>7} {'refused':9} "
    f"{'seconds':>7}"
)


async def run(
    agent: Agent, programs: Path, kill: str, limit_s: float, *, resumes: bool
) -> Session:
    """Let one agent do its errand."""
    statuses: list[int] = []
    listeners: list[Listener] = []
    serving = stacks.serving

    def listening(app: ASGIApp, **options: Any) -> Any:
        listeners.append(Listener(app, statuses))
        return serving(listeners[-1], **options)

    with tempfile.TemporaryDirectory(prefix="qarr-agent-") as made:
        folder = Path(made) / "repository"
        home = Path(made) / "home"
        folder.mkdir()
        home.mkdir()
        make_repository(folder)
        script = Script(folder)
        engines: list[AgentEngine] = []

        def engine(behaviour: Behaviour) -> AgentEngine:
            engines.append(AgentEngine(script.answer, behaviour))
            return engines[-1]

        tiers = {name: {"max_model_len": CONTEXT} for name in STANDARD_TIERS}
        behaviours = {
            str(name): Behaviour(max_model_len=CONTEXT, resumes=resumes)
            for name in tiers
        }
        with patch.object(stacks, "serving", listening):
            async with stacks.router_stack(
                Path(made), {"tiers": tiers}, engine=engine, **behaviours
            ) as stack:
                AgentEngine.tokens_until_kill = 2
                AgentEngine.kill_next_in = None if kill == "none" else kill
                started = time.monotonic()
                code, output = await _run_program(
                    agent.command(Place(programs, home, stack.url)),
                    folder,
                    home=home,
                    limit_s=limit_s,
                )
                seconds = time.monotonic() - started
        requests = [request for listener in listeners for request in listener.requests]
        if kill == "none":
            replaced = {str(folder): "/repository", str(home): "/home/agent", made: "/"}
            SESSIONS[agent.name] = (requests, replaced)
        return Session(
            agent=agent,
            kill=kill,
            requests=requests,
            statuses=statuses,
            has_finished=code == 0,
            is_repaired=is_repaired(folder),
            runs=sum(len(engine.behaviour.requests) for engine in engines),
            seconds=seconds,
            output=output,
        )


SESSIONS: dict[str, tuple[list[RecordedRequest], dict[str, str]]] = {}


async def _run_program(
    command: Command, folder: Path, *, home: Path, limit_s: float
) -> tuple[int | None, str]:
    """Run a program in a group of its own, which ends with it; return its exit status (None: too late) and its output."""
    own = {"HOME": str(home), "TERM": "dumb", "NO_COLOR": "1", "CI": "1"}
    for who in ("AUTHOR", "COMMITTER"):
        own[f"GIT_{who}_NAME"] = "Errand"
        own[f"GIT_{who}_EMAIL"] = "errand@example.com"
    process = await asyncio.create_subprocess_exec(
        *command.arguments,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8", **own}
        | command.environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(limit_s):
            output, _ = await process.communicate()
    except TimeoutError:
        return None, "it took too long"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output.decode("utf-8", "replace")


def main() -> None:
    """Run what is asked for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--kill", default=",".join(KILLS))
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--stock-engines", action="store_true")
    parser.add_argument("--limit", type=float, default=300.0)
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [a.name for a in AGENTS]
    rows = []
    for agent in AGENTS:
        if agent.name not in names:
            continue
        for kill in options.kill.split(","):
            programs = options.programs.resolve()
            session = asyncio.run(
                run(
                    agent,
                    programs,
                    kill,
                    options.limit,
                    resumes=not options.stock_engines,
                )
            )
            note(session.row)
            if not (session.has_finished and session.is_repaired):
                note(session.output[-2000:])
            rows.append(session.row)
    for name, (requests, replaced) in SESSIONS.items():
        if options.record:
            write_recording(name, requests, replaced)
    print("\n".join([HEADER, *rows]))


if __name__ == "__main__":
    main()
