"""What a running router reads again, and the parts of the deployment that take it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from router.app import App
from router.auth.api_keys import KeysError
from router.deployment.layout import Deployment
from router.deployment.listening import ListenError, open_keys
from router.deployment.options import fleet_options
from router.reload import Commit, ReloadError, Reloads
from router.section import SettingsError
from router.server.server import Server
from router.settings import Settings, changes
from tiers.fleet import Fleet
from tiers.lifecycle.roster import Roster, Source
from tiers.spec import TierName


@dataclass(frozen=True, slots=True)
class Asked:
    """The settings as the command read them at its start, and what reads them again."""

    settings: Settings
    load: Callable[[], Settings]

    def reloads(self, listening: socket.socket) -> Reloads:
        return Reloads(self.settings, partial(self._read, listening.getsockname()[0]))

    def _read(self, host: str) -> Settings:
        try:
            settings = self.load()
            open_keys(settings, host)
        except (SettingsError, KeysError, ListenError) as error:
            raise ReloadError(str(error)) from None
        return settings


class Parts:
    """The parts of a running router. On Ray the deployment's settings differ from those that were read."""

    def __init__(
        self,
        deployment: Deployment,
        read: Settings,
        app: App,
        server: Server,
        *,
        fleet: Fleet,
        roster: Roster,
    ) -> None:
        self._deployment, self._app, self._server, self._fleet = (
            deployment,
            app,
            server,
            fleet,
        )
        self._roster, self._read, self._own = roster, read, deployment.settings

    async def prepare(self, settings: Settings) -> Commit:
        self._check_urls(settings)
        sections = {
            change.key.partition(".")[0] for change in changes(self._read, settings)
        }
        own = self._own.model_copy(
            update={name: getattr(settings, name) for name in sections}
        )
        use = self._app.prepare(own)
        urls = {
            name: own.tiers.of(name).urls
            for name in own.tiers.names
            if own.tiers.of(name).urls
        }

        async def commit() -> None:
            use()
            self._fleet.use(fleet_options(own))
            if urls != self._urls:
                self._roster.name(Source.SETTINGS, urls)
            self._read, self._own = settings, own
            self._server.use(own.server)

        return commit

    @property
    def _urls(self) -> dict[TierName, tuple[str, ...]]:
        return {
            name: self._own.tiers.of(name).urls
            for name in self._own.tiers.names
            if self._own.tiers.of(name).urls
        }

    def _check_urls(self, settings: Settings) -> None:
        deployment, tiers = self._deployment, settings.tiers
        if deployment.local or deployment.ray is not None:
            for name in tiers.names:
                before, after = (
                    self._read.tiers.of(name).replicas_here,
                    tiers.of(name).replicas_here,
                )
                if before != after:
                    raise ReloadError(
                        f"tiers.{name}.urls: {after} engines of the tier would be started here instead of {before}; set "
                        f"tiers.{name}.replicas = {before}, or restart the router"
                    )
        elif settings.discovery.file is None and not any(
            tiers.of(name).urls or tiers.of(name).dns for name in tiers.names
        ):
            raise ReloadError(
                "tiers.*.urls: no engine would be left; name at least one"
            )
