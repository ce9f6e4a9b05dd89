"""What the first process of a router with several workers has beside the rest: shared memory, and the workers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from router.app import Links
from router.deployment.layout import speed_machine
from router.deployment.options import fleet_options
from router.server.http_protocol import protocol_for
from router.workers.fleet import SharedFleet
from router.workers.gathered import Gathered
from router.workers.pool import Pool
from router.workers.queue import SharedLines
from router.workers.quotas import SharedLedger
from router.workers.setup import Setup, divided
from router.workers.state import Teller
from router.workers.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.app import Router
    from router.auth.api_keys import Caller
    from router.deployment.layout import Deployment
    from router.lifecycle import ServerState
    from router.settings import Settings
    from tiers.replica import Replica

LEAST_REPLICAS = 1024  # that the table has space for: more may be added while the router runs
SPARE = 4  # as many times the engines given: each may be replaced by another one


class Shared:
    """The first process' own part. It makes the shared memory."""

    def __init__(self, deployment: Deployment) -> None:
        settings = deployment.settings
        engines = sum(len(spec.urls) + spec.replicas for spec in deployment.specs)
        self._deployment = deployment
        self.table = Table.make(settings.server.workers, max(LEAST_REPLICAS, SPARE * engines), settings.tiers.names)
        self.fleet = SharedFleet(deployment.specs, speed_machine(settings), fleet_options(settings), self.table)
        self._ledger = SharedLedger.make(settings.server.workers)
        self._teller = Teller(self.fleet)
        self._pool: Pool | None = None
        self._gathered: Gathered | None = None

    @property
    def links(self) -> Links:
        """Return what ties this process to the workers."""
        return Links(
            serves=False, lines=partial(SharedLines, self.table), ledger=self._ledger, busy=self.fleet.busy, traces=self
        )

    def telling(self, changed: Callable[[Replica], None]) -> Callable[[Replica], None]:
        """Return what is called when a replica changes its state: workers know it at once."""

        def tell(replica: Replica) -> None:
            self.fleet.changed(replica)
            if self._pool is not None:
                self._pool.tell()
            changed(replica)

        return tell

    def pool(self, router: Router, server_state: ServerState) -> Pool:
        """Return the server that starts the workers."""
        settings = self._deployment.settings.server
        self._gathered = Gathered(router)
        self._teller.learned = lambda: router.pipeline.policy.learned
        self._pool = Pool(router, server_state, settings, protocol_for(settings))
        self._pool.share(
            self.fleet, self._ledger, self._teller, self._gathered, setup=self._setup, on_settings=self._take
        )
        return self._pool

    async def listed(self, caller: Caller, limit: int) -> list[dict[str, Any]]:
        """See ``TracesElsewhere``."""
        return await self._gathered.listed(caller, limit) if self._gathered is not None else []

    async def found(self, trace_id: str, caller: Caller) -> dict[str, Any] | None:
        """See ``TracesElsewhere``."""
        return await self._gathered.found(trace_id, caller) if self._gathered is not None else None

    def _take(self, settings: Settings) -> None:
        self._deployment = replace(self._deployment, settings=settings)

    def _setup(self, row: int, listening: int) -> Setup:
        deployment, table = self._deployment, self.table
        return Setup(
            row=row,
            settings=divided(deployment.settings, table.shape.workers),
            model=deployment.model,
            tokenizer=deployment.tokenizer,
            machine=self.fleet.machine,
            listening=listening,
            table=table.fd,
            shape=table.shape,
            bells=tuple(table.bells),
            ledger=self._ledger.fd,
            news=self._teller.all(),
        )
