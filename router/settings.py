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
from router.profiling.settings import ProfileSettings, QualitySettings
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
    "tuple_type": _LIST_NEEDED,
    "list_type": _LIST_NEEDED,
    "frozen_set_type": _LIST_NEEDED,
    "dict_type": _TABLE_NEEDED,
    "mapping_type": _TABLE_NEEDED,
    "model_type": _TABLE_NEEDED,
}
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
    quality: QualitySettings = QualitySettings()
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
        for key, tier in self._tiers_named_in_settings():
            if tier not in self.tiers.names:
                raise ValueError(
                    f"{key}: there is no tier {tier}; there are {', '.join(self.tiers.names)}"
                )
        for name in self.lora.adapters.keys() & set(self.tiers.names):
            raise ValueError(
                f"lora.adapters.{name} has the name of a tier: give the adapter another name"
            )
        return self

    def _tiers_named_in_settings(self) -> Iterator[tuple[str, TierName]]:
        """Yield the tiers that settings name outside of ``tiers``, each with its setting."""
        for tier in self.policy.prices:
            yield f"policy.prices.{tier}", tier
        loss_budget = self.policy.loss_budget
        if isinstance(loss_budget, LikeTier):
            yield "policy.loss_budget.like", loss_budget.like
        for adapter_name, adapter in self.lora.adapters.items():
            for tier in adapter.tiers:
                yield f"lora.adapters.{adapter_name}.tiers", tier
        for alias, target in self.openai.aliases.items():
            if target != "auto":
                yield f"openai.aliases.{alias}", TierName(target)


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
    settings_file = path or os.environ.get("QARR_CONFIG")
    variables = _Variables(
        cast("type[BaseSettings]", Settings),
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
    )
    file_values: dict[str, Any] = {}
    if settings_file:
        file_values = _read_toml(Path(settings_file))
    values = _overlay(file_values, _without_gone(variables()))
    try:
        return Settings.model_validate(_overlay(values, overrides or {}))
    except ValidationError as error:
        faults = error.errors(include_url=False)
        raise SettingsError("\n".join(map(_explain, faults))) from error


def _without_gone(values: dict[str, Any]) -> dict[str, Any]:
    """Return what variables set, without settings that are gone."""
    kept_values = dict(values)
    for gone_name in GONE:
        section_name, _, gone_key = gone_name.partition(".")
        section_values = kept_values.get(section_name)
        if isinstance(section_values, dict):
            kept_section = dict(section_values)
            kept_section.pop(gone_key, None)
            kept_values[section_name] = kept_section
    return kept_values


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SettingsError(f"settings file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"settings file {path} is not TOML: {error}") from error


def _overlay(
    base_values: dict[str, Any], upper_values: dict[str, Any]
) -> dict[str, Any]:
    """Return nested values in which the upper ones count before those of the base; None is not set."""
    merged = dict(base_values)
    for key, value in upper_values.items():
        if isinstance(value, dict) and isinstance(merged.setdefault(key, {}), dict):
            merged[key] = _overlay(merged[key], value)
        elif value is not None:
            merged[key] = value
    return merged


def _explain(fault: Any) -> str:
    """Return what pydantic found wrong, with the setting and without what is secret."""
    key = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"{key}: there is no such setting ('qarr settings' lists all, the changelog those that are gone)"
    fault_text = _NEEDED.get(fault["type"])
    if fault_text is None:
        fault_text = fault["msg"].removeprefix("Value error, ")
    if _SECRET.fullmatch(key) or isinstance(fault["input"], dict):
        return f"{key}: {fault_text}"
    shown_input = _PASSWORD.sub("//***@", repr(fault["input"]))
    return f"{key}: {fault_text} (got {shown_input})"


def _check_variables() -> None:
    """Check that every environment variable with our prefix sets something: a typo must not be silent."""
    for name, value in os.environ.items():
        if not _means_a_setting(name, value):
            continue
        key_parts = name.removeprefix(PREFIX).lower().split("__")
        key = ".".join(key_parts)
        if key in GONE:
            log.warning(
                "environment variable %s is ignored, that setting is gone: %s",
                name,
                GONE[key],
            )
        elif not _is_known(Settings, key_parts):
            raise SettingsError(
                f"environment variable {name}: there is no setting {key} "
                "('qarr settings' lists all, the changelog those that are gone)"
            )


def _means_a_setting(name: str, value: str) -> bool:
    """Tell whether an environment variable is there to set something of ours."""
    if not value or not name.startswith(PREFIX) or name in PLAIN_VARIABLES:
        return False
    return _SERVICE_LINK.fullmatch(f"{name}={value}") is None


def _is_known(model: type[BaseModel], key_parts: list[str]) -> bool:
    """Tell whether a setting of a section, or one within it, has this key."""
    if model is TiersSettings:
        # the first part is a tier's name
        return _is_known(TierSettings, key_parts[1:])
    if not key_parts:
        return True
    field = model.model_fields.get(key_parts[0])
    if field is None:
        return False
    inner_section = _section(field)
    return inner_section is None or _is_known(inner_section, key_parts[1:])


def _section(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section that a field holds; None: it holds a value."""
    field_type = field.annotation
    if isinstance(field_type, type) and issubclass(field_type, BaseModel):
        return field_type
    return None


def leaves(
    model: type[BaseModel], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], FieldInfo, bool]]:
    """Yield each setting's path and field, and whether it reloads; those of a tier once, as ``tiers.*.urls``."""
    for name, field in model.model_fields.items():
        inner_section = _section(field)
        if inner_section is TiersSettings:
            yield from leaves(TierSettings, (*path, name, "*"))
        elif inner_section is not None:
            yield from leaves(inner_section, (*path, name))
        else:
            does_reload = issubclass(model, Section) and name in model.reloads
            yield (*path, name), field, does_reload


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
            continue
        does_reload = isinstance(before, Section) and name in before.reloads
        differences.append(
            Change(
                key,
                _shown_value(key, old),
                after=_shown_value(key, new),
                reloads=does_reload,
            )
        )
    return tuple(differences)


def _shown_value(key: str, value: object) -> str:
    if value is not None and _SECRET.fullmatch(key):
        return "***"
    json_value = to_jsonable_python(value, fallback=str)
    return _PASSWORD.sub("//***@", json.dumps(json_value, ensure_ascii=False))
