"""``qarr up`` in a process of its own, with an empty store, fake engines and a stand-in quantizer."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from tests.fakes import engine as fake_engine
from tests.fakes import quantizer as fake_quantizer
from tests.ports import reserved_range
from tests.unit.own_router import QARR
from tests.waiting import until

MEMORY_BYTES = 32 << 30
CONFIG = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_size": 8,
    "vocab_size": 4,
    "dtype": "float32",
}


@dataclass(slots=True)
class FirstUp:
    """``qarr up`` with a fake engine and a stand-in quantizer, which obeys a test's orders.

    Attributes:
        errors: The file of its standard error.
        orders: The folder of the orders to the quantizer.
    """

    url: str
    errors: Path
    orders: Path
    store: Path
    env: dict[str, str]
    client: httpx.AsyncClient
    process: subprocess.Popen[bytes]

    def tell(self, command: str, order: str) -> None:
        """Give an order to the quantizer that runs a command."""
        (self.orders / f"{command}.new").write_text(order)
        (self.orders / f"{command}.new").replace(self.orders / command)

    def quantizer(self, command: str) -> tuple[int, int]:
        """Return the process id and the niceness of the quantizer that runs a command; 0, 0 before it does."""
        path = self.orders / f"{command}.pid"
        words = path.read_text().split() if path.exists() else []
        if not words:
            return 0, 0
        return int(words[0]), int(words[1])

    def said(self) -> str:
        """Return its standard error."""
        return self.errors.read_text("utf-8")

    async def get(self, path: str) -> tuple[int, dict[str, Any]]:
        try:
            answer = await self.client.get(self.url + path)
        except httpx.TransportError:
            return 0, {}
        return answer.status_code, answer.json()

    async def until_states(self, **states: str) -> dict[str, Any]:
        async def look() -> dict[str, Any] | None:
            _, body = await self.get("/readyz")
            assert self.process.poll() is None, self.said()
            if not body or not states.items() <= body["tiers"].items():
                return None
            return body

        body: dict[str, Any] = await until(look, f"/readyz to say {states}")
        return body

    async def generate(self, **body: Any) -> httpx.Response:
        return await self.client.post(
            f"{self.url}/generate", json={"prompt": "hi", **body}
        )

    async def qarr(self, *args: str) -> str:
        process = await asyncio.to_thread(
            subprocess.run,
            [QARR, *args],
            capture_output=True,
            text=True,
            check=False,
            env=self.env,
            timeout=60,
        )
        return process.stdout

    async def end(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return await asyncio.to_thread(self.process.wait, 30)


def _interpreter(path: Path, script: str) -> str:
    path.write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(script)} "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


@asynccontextmanager
async def first_up(
    tmp_path: Path,
    made: Callable[[Path], None] = lambda _model: None,
    **settings: str,
) -> AsyncIterator[FirstUp]:
    """Run ``qarr up`` with an empty store and a model in the folder ``model``; ``settings`` are further variables.

    ``made`` is called with the model's folder before anything starts.
    """
    model = tmp_path / "model"
    orders = tmp_path / "orders"
    model.mkdir()
    orders.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = Tokenizer(WordLevel({"hi": 0, "there": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    (model / "tokenizer.json").write_text(tokenizer.to_str())
    made(model)
    # Which engines fit must not depend on what else runs on the machine.
    patched_memory = f"import psutil\nmemory = psutil.virtual_memory()._replace(available={MEMORY_BYTES})\n"
    (tmp_path / "sitecustomize.py").write_text(
        patched_memory + "psutil.virtual_memory = lambda: memory\n"
    )
    base = reserved_range(4)
    env = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "FAKE_QUANTIZER": str(orders),
        "QARR_MODEL__NAME": str(model),
        "QARR_MODEL__STORE": str(tmp_path / "store"),
        "QARR_ENGINE__PYTHON": _interpreter(
            tmp_path / "engine-python", fake_engine.__file__
        ),
        "QARR_QUANTIZER__PYTHON": _interpreter(
            tmp_path / "quantizer-python", fake_quantizer.__file__
        ),
        "QARR_ENGINE__BASE_PORT": str(base),
        "QARR_ENGINE__LOG_DIR": str(tmp_path / "logs"),
        "QARR_SERVER__RUNTIME_DIR": str(tmp_path / "run"),
        "QARR_POLICY__PROFILES": str(tmp_path / "profiles"),
        "QARR_POLICY__MAX_SLOWDOWN": "1e9",
        **settings,
    }
    url = f"http://127.0.0.1:{base + 3}"
    errors = tmp_path / "stderr"
    with errors.open("wb") as file:
        process = subprocess.Popen(
            [QARR, "up", "--port", str(base + 3)],
            stderr=file,
            env=env,
            start_new_session=True,
        )
    try:
        async with httpx.AsyncClient(timeout=20, trust_env=False) as client:
            yield FirstUp(
                url,
                errors=errors,
                orders=orders,
                store=tmp_path / "store",
                env=env,
                client=client,
                process=process,
            )
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(60)
