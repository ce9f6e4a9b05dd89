"""The proxies of the side-by-side benchmark: how each is started in front of the stub, or why it cannot be."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

from measure import ROOT, free_port, process, wait_for
from token_load import Question
from token_stub import MODEL

from router.section import cache_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import psutil

BASE = "vllm-router cache_aware"  # what all ratios are to
OURS, OURS_GENERATE = "QARR /v1/chat/completions", "QARR /generate"
OURS_READS = "JSON, tokens, class, text as a prefix"
PROMPT = (
    "Explain how a reverse proxy works, and what one does that a load balancer does not. "
    * 3
)
WHOLE_TOKENS, STREAM_TOKENS = 8, 64
# settings of the router's that are inherited: benchmarks/turn_cost.py sets those of sizes
KEPT_SETTINGS = {
    "QARR_CACHE_DIR",
    "QARR_SERVER__MAX_BODY_BYTES",
    *(f"QARR_TIERS__{tier}__MAX_MODEL_LEN" for tier in ("FAST", "BALANCED", "PRECISE")),
}
NGINX = """worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.log warn;
events {{ worker_connections 4096; }}
http {{
  access_log off; keepalive_requests 100000000;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  upstream engines {{ {servers} keepalive 256; keepalive_requests 100000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=1024; client_body_buffer_size 64k;
    location / {{
      proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""


class SkippedError(Exception):
    """A proxy cannot be had. The text says why, and how to get it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a proxy is to run.

    Attributes:
        engines: URLs of the stub.
        port: That the proxy listens on.
        core: Or cores, as taskset takes them.
        folder: For its files.
        tokenizer: The model's folder; None: QARR estimates tokens.
    """

    engines: tuple[str, ...]
    port: int
    core: str
    folder: Path
    tokenizer: Path | None


@dataclass(frozen=True, slots=True)
class Started:
    """A proxy that answers."""

    port: int
    process: psutil.Process
    engines: tuple[str, ...]  # that it stands before


@dataclass(frozen=True, slots=True)
class Proxy:
    """A row of the table.

    Attributes:
        version: Returns what it is, or raises SkippedError.
        command: Returns the command that starts it, and its environment; None: there is none, and the stub is asked.
        reads: What it looks at in a prompt before it chooses an engine.
        ours: Whether it is this project.
        generate: Whether it is asked on ``/generate``.
        shares: Name of the row whose process it is measured on.
        ready: Path that answers 200 when it can serve.
        headers: Returns the headers that a request to it needs, given the engines' URLs.
        start_s: Seconds that its start may take.
    """

    version: Callable[[], str]
    command: Callable[[Place], tuple[list[str], dict[str, str]]] | None
    reads: str = "nothing"
    ours: bool = False
    generate: bool = False
    shares: str = ""
    ready: str = "/health"
    headers: Callable[[tuple[str, ...]], tuple[tuple[str, str], ...]] | None = None
    start_s: float = 120

    def question(self, *, streamed: bool, engines: tuple[str, ...] = ()) -> Question:
        """Return what it is asked; the answer is the same for all. Where headers name the engines, these are they."""
        tokens = STREAM_TOKENS if streamed else WHOLE_TOKENS
        common = {"max_tokens": tokens, "temperature": 0.7, "stream": streamed}
        if self.generate:
            return Question(
                "/generate",
                {"prompt": PROMPT, **common},
                tokens,
                b"event: done" if streamed else b'"finish_reason"',
            )
        body = {
            "model": "auto" if self.ours else MODEL,
            "messages": [{"role": "user", "content": PROMPT}],
            **common,
        }
        headers = self.headers(engines) if self.headers else ()
        ending = b"data: [DONE]" if streamed else b'"finish_reason"'
        return Question("/v1/chat/completions", body, tokens, ending, headers)


def _nginx_version() -> str:
    if shutil.which("nginx") is None:
        raise SkippedError(
            "nginx is not installed: apt-get install nginx-light, or scripts/setup services"
        )
    said = subprocess.run(
        ["nginx", "-v"], capture_output=True, text=True, check=True
    ).stderr
    return said.strip().rpartition("/")[2]


def _nginx(place: Place) -> tuple[list[str], dict[str, str]]:
    servers = " ".join(
        f"server {url.removeprefix('http://')};" for url in place.engines
    )
    config = place.folder / "nginx.conf"
    config.write_text(
        NGINX.format(folder=place.folder, servers=servers, port=place.port)
    )
    return [
        "nginx",
        "-p",
        str(place.folder),
        "-e",
        str(place.folder / "nginx.log"),
        "-c",
        str(config),
    ], dict(os.environ)


def _byte_relay(place: Place) -> tuple[list[str], dict[str, str]]:
    argv = [
        sys.executable,
        "benchmarks/byte_relay.py",
        str(place.port),
        place.engines[0].rpartition(":")[2],
    ]
    return argv, dict(os.environ)


def from_index(name: str) -> Callable[[], str]:
    """Return a function that makes a peer's environment where it is missing, and returns the version in its lock."""

    def version() -> str:
        _make_environment(name)
        pinned = re.search(
            rf"^{name}==(\S+)",
            (ROOT / f"requirements/{name}.txt").read_text("utf-8"),
            re.MULTILINE,
        )
        assert pinned is not None
        return pinned[1]

    return version


def _make_environment(name: str) -> None:
    """Make a peer's environment where it is missing.

    Raises:
        SkippedError: It could not be made.
    """
    made = subprocess.run(
        ["scripts/setup", name], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if made.returncode:
        said = next(
            (line for line in made.stderr.splitlines() if "error" in line), "no word"
        )
        raise SkippedError(
            f"its environment could not be made (scripts/setup {name}): {said.strip()[:200]}"
        )


def _portkey_version() -> str:
    _make_environment("portkey")
    wanted = json.loads((ROOT / "requirements/portkey/package.json").read_text("utf-8"))
    return str(wanted["dependencies"]["@portkey-ai/gateway"])


def _router(policy: str) -> Callable[[Place], tuple[list[str], dict[str, str]]]:
    def command(place: Place) -> tuple[list[str], dict[str, str]]:
        argv = [".venv-vllm-router/bin/vllm-router", "--log-level", "warning"]
        return [*argv, *_rust_options(place, policy)], dict(os.environ)

    return command


def _smg(place: Place) -> tuple[list[str], dict[str, str]]:
    argv = [
        ".venv-smg/bin/smg",
        "launch",
        "--backend",
        "vllm",
        "--disable-tokenizer-autoload",
        "--log-level",
        "warn",
    ]
    return [*argv, *_rust_options(place, "cache_aware")], dict(os.environ)


def _litellm(place: Place) -> tuple[list[str], dict[str, str]]:
    """Start LiteLLM's proxy with the engines as one model group: no database, no keys, no retries."""
    deployments = [
        {
            "model_name": MODEL,
            "litellm_params": {
                "model": f"openai/{MODEL}",
                "api_base": f"{url}/v1",
                "api_key": "none",
            },
        }
        for url in place.engines
    ]
    settings = {
        "model_list": deployments,
        "litellm_settings": {"num_retries": 0, "telemetry": False},
        # it listens on loopback
        "general_settings": {"dangerously_permit_weak_or_unset_master_key": True},
    }
    config = place.folder / "litellm.yaml"
    config.write_text(json.dumps(settings))  # JSON is YAML
    argv = [
        ".venv-litellm/bin/litellm",
        "--config",
        str(config),
        "--host",
        "127.0.0.1",
        "--port",
        str(place.port),
    ]
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("OTEL_")
    }
    # Its table of prices otherwise comes from the network at each start.
    return argv, own | {
        "LITELLM_LOG": "WARNING",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "NO_PROXY": "127.0.0.1",
    }


def _portkey(place: Place) -> tuple[list[str], dict[str, str]]:
    script = ".venv-portkey/node_modules/@portkey-ai/gateway/build/start-server.js"
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.lower().endswith("_proxy")
    }
    return ["node", script, f"--port={place.port}", "--headless"], own | {
        "NODE_ENV": "production"
    }


def portkey_headers(engines: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return Portkey's configuration of a request: the load is spread over all engines."""
    targets = [
        {"provider": "openai", "api_key": "none", "custom_host": f"{url}/v1"}
        for url in engines
    ]
    config = {"strategy": {"mode": "loadbalance"}, "targets": targets}
    return (("x-portkey-config", json.dumps(config)),)


def _rust_options(place: Place, policy: str) -> list[str]:
    listen = [
        "--host",
        "127.0.0.1",
        "--port",
        str(place.port),
        "--prometheus-port",
        str(free_port()),
    ]
    return [
        "--worker-urls",
        *place.engines,
        "--policy",
        policy,
        *listen,
        "--worker-startup-check-interval",
        "1",
    ]


def commit(checkout: Path = ROOT) -> str:
    """Return the commit of a checkout of this project, and whether something else than results differs from it."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["git", *arguments],
            cwd=checkout,
            capture_output=True,
            text=True,
            check=False,
        )

    changed = (
        git("diff", "--quiet", "HEAD", "--", ".", ":!benchmarks/results").returncode
        == 1
    )
    return (git("rev-parse", "--short", "HEAD").stdout.strip() or "unknown") + (
        " with changes" if changed else ""
    )


def _qarr(place: Place) -> tuple[list[str], dict[str, str]]:
    return _started_from(ROOT, place)


def _started_from(checkout: Path, place: Place) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts the router of a checkout."""
    fast, balanced, precise = place.engines
    argv = [str(checkout / ".venv/bin/qarr"), "serve", "--port", str(place.port)]
    argv += ["--fast", fast, "--balanced", balanced, "--precise", precise]
    argv += ["--tokenizer", str(place.tokenizer)] if place.tokenizer else []
    inherited = {
        n: v
        for n, v in os.environ.items()
        if not n.startswith(("QARR_", "OTEL_")) or n in KEPT_SETTINGS
    }
    return argv, inherited | {
        # an environment that is shared between checkouts imports another one's code
        "PYTHONPATH": str(checkout),
        "QARR_ENGINE__LOG_DIR": str(place.folder),
        "QARR_POLICY__PROFILES": str(place.folder / "profiles"),
        # other proxies have no such limit, and bursts come to more than 256
        "QARR_ADMISSION__MAX_WAITING": "1024",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0.01",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_ENDPOINT": fast,
    }


def of_checkout(checkout: Path) -> dict[str, Proxy]:
    """Return the rows of another checkout of this project, to be compared with this one. It has a ``.venv``."""
    name = f"QARR {commit(checkout)}"
    chat, generate = f"{name} /v1", f"{name} /generate"
    command = partial(_started_from, checkout)
    return {
        chat: Proxy(
            partial(commit, checkout),
            command,
            reads=OURS_READS,
            ours=True,
            ready="/readyz",
        ),
        generate: Proxy(
            partial(commit, checkout),
            command,
            reads=OURS_READS,
            ours=True,
            generate=True,
            shares=chat,
            ready="/readyz",
        ),
    }


PROXIES: dict[str, Proxy] = {
    "direct": Proxy(lambda: "the stub engine alone", None),
    "nginx": Proxy(_nginx_version, _nginx),
    "uvloop byte relay": Proxy(lambda: f"uvloop {version('uvloop')}", _byte_relay),
    "vllm-router round_robin": Proxy(
        from_index("vllm-router"), _router("round_robin"), reads="JSON"
    ),
    BASE: Proxy(
        from_index("vllm-router"),
        _router("cache_aware"),
        reads="JSON, text as a prefix",
    ),
    "smg cache_aware": Proxy(from_index("smg"), _smg, reads="JSON, text as a prefix"),
    "LiteLLM": Proxy(
        from_index("litellm"), _litellm, reads="JSON", ready="/health/liveliness"
    ),
    "Portkey": Proxy(
        _portkey_version, _portkey, reads="JSON", ready="/", headers=portkey_headers
    ),
    OURS: Proxy(commit, _qarr, reads=OURS_READS, ours=True, ready="/readyz"),
    OURS_GENERATE: Proxy(
        commit,
        _qarr,
        reads=OURS_READS,
        ours=True,
        generate=True,
        shares=OURS,
        ready="/readyz",
    ),
}


def default_tokenizer() -> Path | None:
    """Return the folder of a model that ``qarr model prepare`` made, with its tokenizer; None: there is none."""
    found = sorted((cache_dir() / "models").glob("*/bf16-*/tokenizer.json"))
    return found[-1].parent if found else None


@contextmanager
def started(proxy: Proxy, place: Place) -> Iterator[Started]:
    """Run a proxy until it answers.

    Raises:
        SkippedError: It did not start.
    """
    assert proxy.command is not None
    argv, env = proxy.command(place)
    log = place.folder / "output.log"
    with process(argv, place.core, env=env, log=log) as running:
        try:
            wait_for(place.port, proxy.ready, proxy.start_s)
        except TimeoutError as error:
            said = log.read_text("utf-8", "replace").strip().splitlines() or ["nothing"]
            raise SkippedError(
                f"it did not start within {proxy.start_s:g} s; it said: {said[-1][:200]}"
            ) from error
        yield Started(place.port, running, place.engines)
