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
class SettingsLoader:
    """The settings as the command read them at its start, and what reads them again."""

    settings: Settings
    load: Callable[[], Settings]

    def reloads(self, listening: socket.socket) -> Reloads:
        """Return what reloads the settings of a router that listens on a socket."""
        host = listening.getsockname()[0]
        return Reloads(self.settings, partial(self._read, host))

    def _read(self, host: str) -> Settings:
        """Read the settings, and check that the address may be served with their keys."""
        try:
            settings = self.load()
            open_keys(settings, host)
        except (SettingsError, KeysError, ListenError) as error:
            raise ReloadError(str(error)) from None
        return settings


class RunningParts:
    """The parts of a running router that take reloaded settings.

    Args:
        deployment: What runs. On Ray its settings differ from those that were read.
        read_settings: The settings as they were read.
        app: The router's app.
        server: Its server.
        fleet: Its fleet.
        roster: Of the engines that run elsewhere.
    """

    def __init__(
        self,
        deployment: Deployment,
        read_settings: Settings,
        app: App,
        server: Server,
        *,
        fleet: Fleet,
        roster: Roster,
    ) -> None:
        self._deployment = deployment
        self._read_settings = read_settings
        self._settings_in_force = deployment.settings
        self._app = app
        self._server = server
        self._fleet = fleet
        self._roster = roster

    async def prepare(self, settings: Settings) -> Commit:
        """Prepare all parts for new settings; return what makes them take these.

        Raises:
            ReloadError: They cannot be taken.
        """
        self._check_engines(settings)
        changed_sections = {
            change.key.partition(".")[0]
            for change in changes(self._read_settings, settings)
        }
        new_settings = self._settings_in_force.model_copy(
            update={section: getattr(settings, section) for section in changed_sections}
        )
        use_in_app = self._app.prepare(new_settings)
        new_urls = _urls_by_tier(new_settings)

        async def commit() -> None:
            use_in_app()
            self._fleet.use(fleet_options(new_settings))
            if new_urls != _urls_by_tier(self._settings_in_force):
                self._roster.name(Source.SETTINGS, new_urls)
            self._read_settings = settings
            self._settings_in_force = new_settings
            self._server.use(new_settings.server)

        return commit

    def _check_engines(self, settings: Settings) -> None:
        """Check that new settings neither start nor end engines, and that a router without engines of its own keeps some.

        Raises:
            ReloadError: They do not keep to that.
        """
        deployment = self._deployment
        if deployment.local or deployment.ray is not None:
            self._check_replicas(settings)
            return
        if settings.discovery.file is not None:
            return
        tiers = [settings.tiers.of(name) for name in settings.tiers.names]
        if not any(tier.urls or tier.dns for tier in tiers):
            raise ReloadError(
                "tiers.*.urls: no engine would be left; name at least one"
            )

    def _check_replicas(self, settings: Settings) -> None:
        for name in settings.tiers.names:
            before = self._read_settings.tiers.of(name).replicas_here
            after = settings.tiers.of(name).replicas_here
            if before != after:
                raise ReloadError(
                    f"tiers.{name}.urls: {after} engines of the tier would be started here instead of {before}; set "
                    f"tiers.{name}.replicas = {before}, or restart the router"
                )


def _urls_by_tier(settings: Settings) -> dict[TierName, tuple[str, ...]]:
    """Return the addresses of engines that run elsewhere, of tiers that have any."""
    urls = {name: settings.tiers.of(name).urls for name in settings.tiers.names}
    return {name: addresses for name, addresses in urls.items() if addresses}
