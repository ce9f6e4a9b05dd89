"""Three simulated engines, and load for the router before them, in one process that ends with its parent.

    python -m tiers.simulated.demo ROUTER-URL REQUESTS-A-SECOND

Standard output: one line, each tier's URL as JSON. It ends when its standard input is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import uvicorn
import uvloop

from tiers.errors import EngineDiedError
from tiers.simulated.engine import SimulatedEngine
from tiers.simulated.gpu import HARDWARE
from tiers.simulated.load import send_load

if TYPE_CHECKING:
    from collections.abc import Iterator

SLOWER = 4.0  # than an H100: about an L40S, by its memory's bandwidth
SEQUENCES = 16  # as ``tiers.*.max_num_seqs``
END_S = 5.0


@contextlib.contextmanager
def simulated_engines(router: str, load: float) -> Iterator[dict[str, str]]:
    """Run engines and load in a process of their own; yield the engines' URLs by tier.

    Raises:
        EngineDiedError: They did not start.
    """
    argv = [sys.executable, "-m", __name__, router, str(load)]
    pipe = subprocess.PIPE  # no Ctrl-C reaches its session: the router first finishes what is open
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, start_new_session=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if not (line := process.stdout.readline()):
                raise EngineDiedError("the simulated engines did not start: see above")
            yield json.loads(line)
        finally:
            process.stdin.close()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()


async def run(router: str, load: float) -> None:
    """Serve until standard input ends."""
    engines = {tier: SimulatedEngine(hardware, SLOWER, SEQUENCES, 1) for tier, hardware in HARDWARE.items()}
    servers = {
        tier: uvicorn.Server(uvicorn.Config(engine.app, port=0, log_config=None, timeout_graceful_shutdown=1))
        for tier, engine in engines.items()
    }
    tasks = [asyncio.create_task(server.serve()) for server in servers.values()]
    while not all(server.started for server in servers.values()):  # noqa: ASYNC110  uvicorn tells no event
        await asyncio.sleep(0.01)
    ports = {tier: server.servers[0].sockets[0].getsockname()[1] for tier, server in servers.items()}
    print(json.dumps({tier: f"http://127.0.0.1:{port}" for tier, port in ports.items()}), flush=True)  # noqa: T201
    sending = asyncio.create_task(send_load(router, load)) if load else None
    parent_gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, parent_gone.set)
    await parent_gone.wait()
    if sending is not None:
        sending.cancel()
    for server in servers.values():
        server.should_exit = True
    await asyncio.gather(*tasks)


if __name__ == "__main__":
    uvloop.run(run(sys.argv[1], float(sys.argv[2])))
