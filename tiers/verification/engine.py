"""An engine, or one model of a router, that a verification asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiers.errors import ProbeError
from tiers.probe import EngineProbe
from tiers.verification.findings import EngineIdentity

if TYPE_CHECKING:
    from collections.abc import Sequence

    import httpx

    from tiers.probe import ServedModel


@dataclass(frozen=True, slots=True)
class ComparedEngine:
    """A server, and the model that it is asked for.

    Attributes:
        probe: Asks it.
        identity: What it says of itself.
    """

    probe: EngineProbe
    identity: EngineIdentity

    @property
    def model(self) -> str:
        """Return the model's name for requests."""
        return self.identity.model

    @classmethod
    async def connect(
        cls,
        client: httpx.AsyncClient,
        url: str,
        api_key: str,
        *,
        name: str = "",
        model: str = "",
    ) -> ComparedEngine:
        """Ask a server what it serves.

        Args:
            client: Its timeouts hold for short calls.
            url: The base URL; a trailing ``/v1`` is left out.
            api_key: Sent as a bearer token; empty: none is sent.
            name: For people; empty: the URL.
            model: The model's name for requests; empty: the only one that is served.

        Raises:
            ProbeError: The server does not answer as vLLM does, does not serve the model, or serves several and none is
                named; or the URL has a password.
        """
        base_url = url.rstrip("/").removesuffix("/v1")
        if _without_credentials(base_url) != base_url:
            raise ProbeError(
                f"{_without_credentials(base_url)}: leave user name and password out of the URL. An engine takes a key as "
                "bearer token"
            )
        probe = EngineProbe(client, base_url, api_key)
        served = _choose(await probe.models(), model, base_url)
        identity = EngineIdentity(
            name=name or base_url,
            model=served.name,
            max_model_len=served.max_model_len,
            version=await probe.version(),
            kv_cache_dtype=await probe.kv_cache_dtype(),
        )
        return cls(probe, identity)


def _choose(models: Sequence[ServedModel], name: str, url: str) -> ServedModel:
    """Return the model of a name, or the only one."""
    listed = ", ".join(served.name for served in models)
    if name:
        for served in models:
            if served.name == name:
                return served
        raise ProbeError(f"{url} serves no model {name!r}. It serves: {listed}")
    if len(models) != 1:
        raise ProbeError(
            f"{url} serves {len(models)} models: name one of them. It serves: {listed}"
        )
    return models[0]


def _without_credentials(url: str) -> str:
    """Return a URL without user name and password."""
    scheme, separator, rest = url.partition("://")
    host_and_path = rest.rpartition("@")[2]
    return f"{scheme}{separator}{host_and_path}"
