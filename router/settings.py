"""Every setting of QARR, composed of the rooms' sections. The only reader of settings files and environment variables.

Precedence, highest first: command line, environment (``QARR_SERVER__PORT=8081``), the TOML file, defaults. A variable that
is set and empty counts as not set: Compose's ``${NAME:-}`` and env files make such variables.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python
from pydantic_settings import BaseSettings, EnvSettingsSource

from router.accounting.settings import BudgetSettings, StateSettings
from router.api.settings import LimitSettings, OpenAISettings
from router.auth.settings import AuthSettings, JwtSettings
from router.deployment.settings import (
    DEFAULT_LENGTHS,
    DiscoverySettings,
    EngineSettings,
    LoraSettings,
    ModelSettings,
    QuantizerSettings,
    RaySettings,
    TierSettings,
    TiersSettings,
    complete,
)
from router.pipeline.settings import AdmissionSettings
from router.policy.settings import LikeTier, PolicySettings
from router.profiling.settings import ProfileSettings
from router.section import Section, SettingsError
from router.server.settings import ServerSettings, TlsSettings
from router.telemetry.settings import TelemetrySettings
from router.upstream.settings import OverflowSettings, UpstreamSettings
from tiers.spec import OVERFLOW, TierName

log = logging.getLogger(f"qarr.{__name__}")
PREFIX = "QARR_"
# Settings that are gone, and what takes their place. A variable that is left over from an older release stops no start.
GONE = {
    "engine.canary_min_agreement": "engine.check_tolerance says how far a sound engine may be from what it should answer",
    "engine.warmup_expected": "engines are judged by likelihoods, not by a word",
}
# with the prefix, but no settings
PLAIN_VARIABLES = {"QARR_CONFIG", "QARR_CACHE_DIR", "QARR_KEY", "QARR_URL"}
# What Kubernetes sets in pods for a Service that is named qarr or qarr-something, as NAME=VALUE.
_SERVICE_LINK = re.compile(
    r"QARR_(\w+_)?(SERVICE_HOST=[\da-f.:]+|SERVICE_PORT(_\w+)?=\d+|PORT(_\d+_[A-Z]+)?=[a-z]+://\S+"
    r"|PORT_\d+_[A-Z]+_(PROTO=[a-z]+|PORT=\d+|ADDR=[\da-f.:]+))"
)
_SECRET = re.compile(
    r"state\.redis_url|(engine|overflow)\.api_key|tiers\.[^.]+(\.env(\..*)?)?"
)  # never shown, not even in an error
_LIST_NEEDED = (
    'a list is needed; an environment variable holds it as JSON, as in ["a", "b"]'
)
_TABLE_NEEDED = (
    'a table is needed; an environment variable holds it as JSON, as in {"a": 1}'
)
_NEEDED = {
    "tuple_type": _LIST_NEEDED, "list_type": _LIST_NEEDED, "frozen_set_type": _LIST_NEEDED,
    "dict_type": _TABLE_NEEDED, "mapping_type": _TABLE_NEEDED, "model_type": _TABLE_NEEDED,
}  # fmt: skip
_PASSWORD = re.compile(r"//[^/\s]*@")


class Settings(Section):
    """All settings."""

    server: ServerSettings = Field(default_factory=ServerSettings)
    tls: TlsSettings = TlsSettings()
    limits: LimitSettings = LimitSettings()
    tiers: Annotated[TiersSettings, BeforeValidator(complete)] = Field(
        default_factory=lambda: TiersSettings.model_validate(DEFAULT_LENGTHS)
    )
    discovery: DiscoverySettings = DiscoverySettings()
    model: ModelSettings = Field(default_factory=ModelSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    quantizer: QuantizerSettings = Field(default_factory=QuantizerSettings)
    ray: RaySettings = Field(default_factory=RaySettings)
    policy: PolicySettings = Field(default_factory=PolicySettings)
    profile: ProfileSettings = ProfileSettings()
    admission: AdmissionSettings = AdmissionSettings()
    upstream: UpstreamSettings = UpstreamSettings()
    overflow: OverflowSettings = OverflowSettings()
    lora: LoraSettings = LoraSettings()
    openai: OpenAISettings = OpenAISettings()
    auth: AuthSettings = Field(default_factory=AuthSettings)
    jwt: JwtSettings = JwtSettings()
    state: StateSettings = StateSettings()
    budgets: BudgetSettings = Field(default_factory=BudgetSettings)
    telemetry: TelemetrySettings = TelemetrySettings()

    @model_validator(mode="after")
    def _adapters_are_reached(self) -> Settings:
        for name in self.lora.adapters.keys() & self.openai.aliases.keys():
            raise ValueError(
                f"lora.adapters.{name} has the name of an alias in openai.aliases: give one another name"
            )
        return self

    @model_validator(mode="after")
    def _overflow_fits(self) -> Settings:
        if self.overflow.url and OVERFLOW in self.tiers.names:
            raise ValueError(
                f"overflow.url: a tier is named {OVERFLOW}, as usage and metrics call it: rename the tier"
            )
        return self

    @model_validator(mode="after")
    def _tiers_are_known(self) -> Settings:
        budget = self.policy.loss_budget
        named = {f"policy.prices.{tier}": tier for tier in self.policy.prices}
        named |= (
            {"policy.loss_budget.like": budget.like}
            if isinstance(budget, LikeTier)
            else {}
        )
        named |= {
            f"lora.adapters.{name}.tiers": t
            for name, own in self.lora.adapters.items()
            for t in own.tiers
        }
        named |= {
            f"openai.aliases.{name}": TierName(t)
            for name, t in self.openai.aliases.items()
            if t != "auto"
        }
        for key, tier in named.items():
            if tier not in self.tiers.names:
                raise ValueError(
                    f"{key}: there is no tier {tier}; there are {', '.join(self.tiers.names)}"
                )
        for name in self.lora.adapters.keys() & set(self.tiers.names):
            raise ValueError(
                f"lora.adapters.{name} has the name of a tier: give the adapter another name"
            )
        return self


class _Variables(EnvSettingsSource):
    """Reads the environment. Text where JSON is needed stays text, so that the check of its setting refuses it by name."""

    def decode_complex_value(
        self, field_name: str, field: FieldInfo, value: Any
    ) -> Any:
        try:
            return super().decode_complex_value(field_name, field, value)
        except ValueError:
            return value


def load_settings(
    path: Path | None = None, overrides: dict[str, Any] | None = None
) -> Settings:
    """Read the settings: a TOML file (None: that of ``QARR_CONFIG``, if set), the environment, the command line.

    ``overrides`` is a nested dictionary; values that are None are not set. ``SettingsError``: a key is unknown, a value is
    not allowed, or the file cannot be read.
    """
    _check_variables()
    named = path or os.environ.get("QARR_CONFIG")
    variables = _Variables(
        cast("type[BaseSettings]", Settings),
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
    )
    values = _overlay(
        _read_toml(Path(named)) if named else {}, _without_gone(variables())
    )
    try:
        return Settings.model_validate(_overlay(values, overrides or {}))
    except ValidationError as error:
        raise SettingsError(
            "\n".join(_explain(e) for e in error.errors(include_url=False))
        ) from error


def _without_gone(values: dict[str, Any]) -> dict[str, Any]:
    """Return what variables set, without settings that are gone."""
    kept = dict(values)
    for name in GONE:
        section, _, key = name.partition(".")
        if isinstance(kept.get(section), dict):
            kept[section] = {
                kept_key: value
                for kept_key, value in kept[section].items()
                if kept_key != key
            }
    return kept


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SettingsError(f"settings file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"settings file {path} is not TOML: {error}") from error


def _overlay(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(merged.setdefault(key, {}), dict):
            merged[key] = _overlay(merged[key], value)
        elif value is not None:
            merged[key] = value
    return merged


def _explain(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{key}: there is no such setting ('qarr settings' lists all, the changelog those that are gone)"
    text = _NEEDED.get(error["type"]) or error["msg"].removeprefix("Value error, ")
    if _SECRET.fullmatch(key) or isinstance(error["input"], dict):
        return f"{key}: {text}"
    return f"{key}: {text} (got {_PASSWORD.sub('//***@', repr(error['input']))})"


def _check_variables() -> None:
    """Check that every environment variable with our prefix sets something: a typo must not be silent."""
    for name, value in os.environ.items():
        if not value or not name.startswith(PREFIX) or name in PLAIN_VARIABLES:
            continue
        if _SERVICE_LINK.fullmatch(f"{name}={value}"):
            continue
        parts = name.removeprefix(PREFIX).lower().split("__")
        if ".".join(parts) in GONE:
            log.warning(
                "environment variable %s is ignored, that setting is gone: %s",
                name,
                GONE[".".join(parts)],
            )
            continue
        if not _known(Settings, parts):
            raise SettingsError(
                f"environment variable {name}: there is no setting {'.'.join(parts)} "
                "('qarr settings' lists all, the changelog those that are gone)"
            )


def _known(model: type[BaseModel], parts: list[str]) -> bool:
    if model is TiersSettings:
        model, parts = TierSettings, parts[1:]
    if not parts:
        return True
    field = model.model_fields.get(parts[0])
    inner = _section(field) if field else None
    return field is not None and (inner is None or _known(inner, parts[1:]))


def _section(field: FieldInfo) -> type[BaseModel] | None:
    inner = field.annotation
    return inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None


def leaves(
    model: type[BaseModel], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], FieldInfo, bool]]:
    """Yield each setting's path and field, and whether it reloads; those of a tier once, as ``tiers.*.urls``."""
    for name, field in model.model_fields.items():
        inner = _section(field)
        if inner is TiersSettings:
            yield from leaves(TierSettings, (*path, name, "*"))
        elif inner:
            yield from leaves(inner, (*path, name))
        else:
            yield (
                (*path, name),
                field,
                issubclass(model, Section) and name in model.reloads,
            )


@dataclass(frozen=True, slots=True)
class Change:
    """A setting with another value; values are shown as text, without what is secret."""

    key: str
    before: str
    after: str
    reloads: bool  # whether a running router takes it over

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.after}"


def changes(before: BaseModel, after: BaseModel, path: str = "") -> tuple[Change, ...]:
    """Return the settings that differ. A tier that is only in one of both is one change, which needs a restart."""
    differences: list[Change] = []
    names = [
        *type(before).model_fields,
        *(before.model_extra or {}),
        *(after.model_extra or {}),
    ]
    for name in dict.fromkeys(names):
        key = f"{path}{name}"
        old = getattr(before, name, None)
        new = getattr(after, name, None)
        if old == new:
            continue
        if (
            isinstance(old, Section)
            and isinstance(new, type(old))
            and not isinstance(old, LikeTier)
        ):
            differences.extend(changes(old, new, f"{key}."))
        else:
            reloads = isinstance(before, Section) and name in before.reloads
            differences.append(
                Change(key, _shown_value(key, old), _shown_value(key, new), reloads)
            )
    return tuple(differences)


def _shown_value(key: str, value: object) -> str:
    if value is not None and _SECRET.fullmatch(key):
        return "***"
    shown = to_jsonable_python(value, fallback=str)
    return _PASSWORD.sub("//***@", json.dumps(shown, ensure_ascii=False))
