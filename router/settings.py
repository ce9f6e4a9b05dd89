"""Every setting of QARR, in one typed tree. The only reader of configuration files and environment variables.

Precedence, highest first: command line, environment (``QARR_SERVER__PORT=8081``), the TOML file, defaults.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, cast
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    SecretStr,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from pydantic_core import to_jsonable_python
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from redis.asyncio.connection import parse_url

from classifier import PromptClass  # noqa: TC001  pydantic reads it
from router.removed import removed_setting, without_ignored
from tiers.address import normalised, wrong_with
from tiers.breaker import BreakerOptions
from tiers.checkpoints.prepare import CALIBRATION_SAMPLES, DEFAULT_CALIBRATION, DEFAULT_MODEL
from tiers.lifecycle.engine_args import check_own
from tiers.spec import OVERFLOW, RESERVED, STANDARD_TIERS, TierName

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic.fields import FieldInfo

PREFIX = "QARR_"
MOST_REPLICAS = 64  # of a tier on one machine
PLAIN_VARIABLES = {"QARR_CONFIG", "QARR_CACHE_DIR", "QARR_KEY", "QARR_URL"}  # with the prefix, but no settings
# What Kubernetes sets in pods for a Service that is named qarr or qarr-something, as NAME=VALUE.
_SERVICE_LINK = re.compile(
    r"QARR_(\w+_)?(SERVICE_HOST=[\da-f.:]+|SERVICE_PORT(_\w+)?=\d+|PORT(_\d+_[A-Z]+)?=[a-z]+://\S+"
    r"|PORT_\d+_[A-Z]+_(PROTO=[a-z]+|PORT=\d+|ADDR=[\da-f.:]+))"
)
TRACE_ID = "{trace_id}"  # placeholder in the address of a trace viewer
_SECRET = re.compile(
    r"state\.redis_url|(engine|overflow)\.api_key|tiers\.[^.]+\.env(\..*)?"
)  # never shown, not even in an error
_PASSWORD = re.compile(r"//[^/\s]*@")
PROJECT = Path(__file__).resolve().parents[1]


class SettingsError(Exception):
    """A setting is wrong. The text names the key, what is wrong and what is allowed."""


def cache_dir() -> Path:
    """Return the folder for checkpoints, profiles and logs: ``QARR_CACHE_DIR``, else in the user's cache folder."""
    if named := os.environ.get("QARR_CACHE_DIR"):
        return Path(os.path.expanduser(named))  # noqa: PTH111  pathlib's fails without a home folder
    return Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache") / "qarr"


def runtime_dir() -> Path:
    """Return the folder for the sockets over which a router hands over to another on this machine."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    return Path(given) / "qarr" if given else cache_dir() / "run"


def state_dir() -> Path:
    """Return the folder for what must outlive a restart and can not be made again."""
    return Path(os.environ.get("XDG_STATE_HOME") or _home() / ".local/state") / "qarr"


def config_dir() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or _home() / ".config") / "qarr"


def _home() -> Path:
    """Return the user's home folder; ``QARR_CACHE_DIR`` for a user without one, as containers have with any user id."""
    with suppress(RuntimeError):
        return Path.home()
    if os.environ.get("QARR_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME"):
        return cache_dir()
    raise SettingsError(
        "this user has no home folder: set QARR_CACHE_DIR to a folder for checkpoints, profiles and logs, and perhaps "
        "XDG_CONFIG_HOME for keys and XDG_STATE_HOME for usage, which are kept there else; or set HOME"
    )


Share = Annotated[float, Field(ge=0, le=1)]


Origin = Annotated[
    str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[a-z0-9.-]+(:[0-9]{1,5})?|https?://\[[0-9a-f:]+\](:[0-9]{1,5})?)$")
]


class AllBut(frozenset[str]):
    """Every name except these."""

    def __contains__(self, name: object) -> bool:
        return not super().__contains__(name)


class Section(BaseModel):
    """A part of the settings: unknown keys are errors, values do not change.

    Attributes:
        reloads: Settings that a running router takes over when it reads its settings again; others need a restart.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    reloads: ClassVar[frozenset[str]] = frozenset()


class ServerSettings(Section):
    """Where the router listens."""

    reloads: ClassVar[frozenset[str]] = AllBut({"cors_origins", "host", "port", "runtime_dir"})
    max_header_bytes: ClassVar[int] = 32768  # of a request's path and headers
    header_timeout_s: ClassVar[float] = 10.0
    body_timeout_s: ClassVar[float] = 60.0
    write_timeout_s: ClassVar[float] = 30.0  # for a client to read anything of its answer
    # A stream without a first token for this long gets its head, and a comment at this interval; 0: never. A failure is an
    # error event then, not a status.
    silence_s: ClassVar[float] = 15.0
    resume_s: ClassVar[float] = 30.0  # that a stream is kept after its end, or after its connection is lost
    resume_bytes: ClassVar[int] = 1 << 18  # of events, kept of each

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8080, ge=0, le=65535, description="Port to listen on; 0 takes any free one.")
    page: Literal["auto", "on", "off"] = Field(
        "auto", description="The page at `/`: `auto` serves it on loopback, and wherever requests need keys."
    )
    allowed_hosts: tuple[str, ...] = Field(
        (), description="Host names besides addresses and localhost to which a keyless router on loopback answers."
    )
    cors_origins: tuple[Origin, ...] = Field(
        (),
        description="Origins whose web pages may send requests, as in `https://chat.example.com`; `*`: all, with a key.",
    )
    max_body_bytes: int = Field(1 << 20, ge=1024, description="Request bodies over this are refused unread.")
    max_connections: int = Field(4096, ge=1, description="Most open connections; further ones get 503.")
    keep_alive_s: int = Field(
        75,
        ge=1,
        description="Idle connections are kept this long: longer than proxies and clients keep them, so that none "
        "sends a request while the router closes.",
    )
    resume_streams: NonNegativeInt = Field(
        256, description="Resumable streams at once; further ones are served, but cannot be resumed."
    )
    drain_s: NonNegativeFloat = Field(
        30, description="Time for open answers to finish after a signal, or after another router has taken over."
    )
    runtime_dir: Path = Field(
        default_factory=runtime_dir, description="Where `qarr serve` listens for another router that takes over."
    )


class TlsSettings(Section):
    """HTTPS. The files are read again when they change."""

    reloads: ClassVar[frozenset[str]] = frozenset({"certificate", "key"})

    certificate: Path | None = Field(
        None, description="PEM file of the router's certificate and those that sign it; with it, only HTTPS is served."
    )
    key: Path | None = Field(None, description="PEM file of its key, without a password.")
    client_ca: Path | None = Field(
        None, description="PEM file of authorities: only clients with a certificate of one of them are served."
    )
    ca: Path | None = Field(
        None,
        description="PEM file of authorities by which commands such as `qarr tiers` trust a router; none: the system's.",
    )

    @model_validator(mode="after")
    def _complete_pair(self) -> TlsSettings:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key are given together, or neither is")
        if self.client_ca is not None and self.certificate is None:
            raise ValueError("client_ca needs certificate and key")
        return self


class LimitSettings(Section):
    """What one request may ask."""

    reloads: ClassVar[frozenset[str]] = AllBut()
    default_temperature: ClassVar[float] = 0.7
    max_sequences: ClassVar[int] = 1024  # of one OpenAI request: its prompts times ``n``

    max_prompt_chars: int = Field(16_000, ge=1, description="Most characters in a prompt, and in a system prompt.")
    max_prompt_words: int = Field(5_000, ge=1, description="Most words in a prompt, and in a system prompt.")
    max_tokens: int = Field(4_096, ge=1, description="Highest `max_tokens` of a request.")
    default_max_tokens: int = Field(256, ge=1, description="`max_tokens` of a request that gives none.")


def _engine_address(url: str) -> str:
    if wrong := wrong_with(url):
        raise ValueError(f"{wrong}; an address like http://10.0.0.5:8000 is allowed")
    return url


def _once(urls: tuple[str, ...]) -> tuple[str, ...]:
    """Check that no engine is named twice: its load would be counted twice."""
    known = [normalised(url) for url in urls]
    for url, same in zip(urls, known, strict=True):
        if known.count(same) > 1:
            raise ValueError(f"{url} is named more than once")
    return urls


def _dns_address(url: str) -> str:
    if not url:
        return url
    if url.startswith("https:"):
        raise ValueError("engines are reached by their addresses, which no certificate names: http:// is allowed")
    if wrong := wrong_with(url):
        raise ValueError(f"{wrong}; a name like http://qarr-fast.default.svc:8000 is allowed")
    return url


T = TypeVar("T")


def _different(numbers: tuple[T, ...]) -> tuple[T, ...]:
    for number in numbers:
        if numbers.count(number) > 1:
            raise ValueError(f"{number} is named more than once")
    return numbers


def _not_ours(args: tuple[str, ...]) -> tuple[str, ...]:
    """Check that arguments leave alone what QARR itself gives to engines."""
    check_own(args)
    return args


def _engine_variables(variables: dict[str, str]) -> dict[str, str]:
    for name, value in variables.items():
        if not name.isidentifier() or not name.isascii() or "\0" in value:
            raise ValueError(
                f"{name!r}: a name of letters, digits and underscores, and a value without NUL are allowed"
            )
        if name.startswith(PREFIX):
            raise ValueError(f"{name}: variables of QARR's own do not reach engines")
        if name == "VLLM_API_KEY":
            raise ValueError(f"{name}: engines started here get a random key; it cannot be changed")
    return variables


def _no_tier(name: str) -> str:
    """Check that an adapter's name is not one that requests name a tier by."""
    if name in {*RESERVED, *STANDARD_TIERS}:
        raise ValueError(f"{name} names tiers: give the adapter another name")
    return name


AdapterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,99}$"), AfterValidator(_no_tier)]
EngineArgs = Annotated[tuple[str, ...], AfterValidator(_not_ours)]
TierPolicy = Literal["prefer", "require"]
EngineAddress = Annotated[str, AfterValidator(_engine_address)]  # unchanged: profiles of a tier are named by it
BaseAddress = Annotated[EngineAddress, AfterValidator(lambda url: url.rstrip("/"))]


RayResources = Annotated[dict[Annotated[str, Field(min_length=1)], NonNegativeFloat], Field()]


class TierSettings(Section):
    """One tier."""

    reloads: ClassVar[frozenset[str]] = frozenset({"urls"})

    max_model_len: int = Field(4096, ge=16, description="Context: prompt plus output, in tokens.")
    max_num_seqs: int = Field(16, ge=1, description="Sequences the engine runs at once.")
    max_in_flight: int = Field(
        32,
        ge=1,
        description="Requests admitted to one replica; further ones go elsewhere, wait, or get 503. A request with "
        "`n` choices counts as `n`.",
    )
    urls: Annotated[tuple[EngineAddress, ...], AfterValidator(_once)] = Field(
        (), description="Engines that run elsewhere."
    )
    dns: Annotated[str, AfterValidator(_dns_address)] = Field(
        "",
        description="Name of engines that run elsewhere, as `http://qarr-fast.default.svc:8000`: each of its addresses "
        "is a replica. It is resolved every `discovery.interval_s`.",
    )
    replicas: int | None = Field(
        None,
        ge=0,
        le=MOST_REPLICAS,
        description="Engines started here, besides those elsewhere; unset: one, or none with `urls` or `dns`. 0 without "
        "these leaves the tier out, unless `discovery.file` names it.",
    )
    gpus: Annotated[tuple[NonNegativeInt, ...], AfterValidator(_different)] = Field(
        (),
        description="CUDA devices for the engines started here, taken in turn; empty: those with most memory left.",
    )
    tensor_parallel: int = Field(1, ge=1, le=64, description="GPUs that share each layer of one engine.")
    pipeline_parallel: int = Field(1, ge=1, le=64, description="Stages, on GPUs of their own, of one engine's layers.")
    across_nodes: bool = Field(
        False, description="On Ray, one engine's GPUs may be on several nodes: vLLM's own Ray executor takes them."
    )
    ray_resources: RayResources = Field(
        {}, description="Over `ray.resources`, for a replica of this tier; 0 takes one away."
    )
    checkpoint: Path | None = Field(None, description="Model folder for this tier instead of the prepared one.")
    engine_args: EngineArgs = Field(
        (),
        description="More vLLM arguments for this tier's engines started here, after `engine.extra_args`; checked by the "
        "installed vLLM before anything starts.",
    )
    env: Annotated[dict[str, str], AfterValidator(_engine_variables)] = Field(
        {}, description="Variables for this tier's engines started here, over those of the environment."
    )
    draft: str = Field(
        "",
        description="Speculative decoding: what proposes tokens that an engine started here checks in one step. `ngram`: "
        "what followed the same words before; a tier of lower precision: its checkpoint; or a model folder. Empty: none. "
        "Requests with `min_p` or `logit_bias` go to tiers without a draft: vLLM refuses them there.",
    )
    precision: str = Field(
        "",
        pattern=r"^([a-z0-9][a-z0-9+.-]{0,31})?$",
        description="What engines that run elsewhere serve, such as `fp8`, if their checkpoint cannot be read here; it is "
        "shown as stated. Of engines that are started here the checkpoint tells it.",
    )

    @model_validator(mode="after")
    def _enough_gpus(self) -> TierSettings:
        world = self.tensor_parallel * self.pipeline_parallel
        if self.gpus and len(self.gpus) < world:
            raise ValueError(
                f"gpus names {len(self.gpus)}, one engine takes tensor_parallel x pipeline_parallel = {world}"
            )
        return self

    @property
    def replicas_here(self) -> int:
        """Return the number of engines that are started here."""
        return int(not (self.urls or self.dns)) if self.replicas is None else self.replicas


DEFAULT_LENGTHS: dict[str, dict[str, Any]] = {
    "fast": {"max_model_len": 2048},
    "balanced": {"max_model_len": 4096},
    "precise": {"max_model_len": 8192},
}


def _complete(given: Any) -> Any:
    """Let a file or variable set one key of one tier without repeating the rest.

    Variables of tiers that only the settings name arrive as text: JSON there is read here.
    """
    if not isinstance(given, dict):
        return given
    tiers = {**{name: {} for name in DEFAULT_LENGTHS}, **given}
    return {
        name: {**DEFAULT_LENGTHS[name], **own}
        if name in DEFAULT_LENGTHS and isinstance(own, dict)
        else {key: _from_json(value) for key, value in own.items()}
        if isinstance(own, dict)
        else own
        for name, own in tiers.items()
    }


def _from_json(value: Any) -> Any:
    """Return the list or object that a text is; else the value as it is."""
    if isinstance(value, str) and value.startswith(("[", "{")):
        with suppress(ValueError):
            return json.loads(value)
    return value


class TiersSettings(Section):
    """The tiers: these three, and any that are named besides, as in ``[tiers.int8]``."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, TierSettings] = Field(init=False)

    fast: TierSettings = Field(description="AWQ int4.")
    balanced: TierSettings = Field(description="FP8.")
    precise: TierSettings = Field(description="BF16.")

    @cached_property
    def names(self) -> tuple[TierName, ...]:
        """Return all tiers: those that the settings add stand before the highest."""
        return (TierName.FAST, TierName.BALANCED, *map(TierName, self.__pydantic_extra__), TierName.PRECISE)

    def of(self, name: TierName) -> TierSettings:
        """Return a tier's settings.

        Raises:
            AttributeError: There is no such tier.
        """
        found: TierSettings = getattr(self, name)
        return found

    @model_validator(mode="after")
    def _added_tiers_have_engines(self) -> TiersSettings:
        for name, tier in self.__pydantic_extra__.items():
            if name in dir(BaseModel) or name in {"names", "of"}:
                raise ValueError(f"tiers.{name}: give the tier another name")
            TierName(name)
            if not (tier.urls or tier.dns or tier.checkpoint or tier.replicas == 0):
                raise ValueError(
                    f"tiers.{name}: no checkpoint is made for a tier of this name, so it needs urls, dns or checkpoint "
                    "(fast, balanced and precise need neither)"
                )
        return self

    @model_validator(mode="after")
    def _engines_of_their_own(self) -> TiersSettings:
        """Check that no engine is in two tiers: it serves at one precision."""
        found: dict[str, str] = {}
        for name in self.names:
            tier = self.of(name)
            for key, url in (*(("urls", url) for url in tier.urls), *((("dns", tier.dns),) if tier.dns else ())):
                other = found.setdefault(normalised(url), f"tiers.{name}.{key}")
                if other != f"tiers.{name}.{key}":
                    raise ValueError(
                        f"{other} and tiers.{name}.{key} both name {url}: an engine serves at one precision"
                    )
        return self


class DiscoverySettings(Section):
    """Where engines that come and go are named."""

    file: Path | None = Field(
        None,
        description='JSON file of engines that run elsewhere, as `{"fast": ["http://10.0.0.5:8000"]}`; read again '
        "whenever it changes. Replace it in one step (rename).",
    )
    interval_s: float = Field(
        5,
        ge=0.1,
        le=3600,
        description="Seconds between two looks at `discovery.file` and at names (`tiers.<name>.dns`).",
    )


class ModelSettings(Section):
    """The model and how its checkpoints are made."""

    name: str = Field(DEFAULT_MODEL, description="The default model, a model folder, or a Hugging Face id.")
    store: Path = Field(default_factory=lambda: cache_dir() / "models", description="Where checkpoints are kept.")
    calibration: Path = Field(DEFAULT_CALIBRATION, description='JSON lines with a "text" field, for AWQ.')
    calibration_samples: NonNegativeInt = Field(
        CALIBRATION_SAMPLES, description="Prompts of that file used, at even distances; 0 uses all."
    )


def _header_value(key: str) -> str:
    if key and not (key.isascii() and key.isprintable() and " " not in key):
        raise ValueError("a key of printable ASCII characters without spaces is allowed")
    return key


class EngineSettings(Section):
    """How engines are started, warmed and stopped."""

    python: Path = Field(
        default_factory=lambda: PROJECT / ".venv-engine/bin/python", description="Interpreter that has vLLM."
    )
    base_port: int = Field(9101, ge=1024, le=65000, description="First engine's port; the next ones follow.")
    api_key: Annotated[str, AfterValidator(_header_value)] = Field(
        "", description="Key of engines given by URL. Engines started here get a random one."
    )
    extra_args: EngineArgs = Field((), description="More vLLM arguments for every engine started here.")
    log_dir: Path = Field(default_factory=lambda: cache_dir() / "logs", description="Where engines log.")
    start_timeout_s: PositiveFloat = Field(600, description="From engine start to its first healthy answer.")
    cpu_kv_cache_gib: int = Field(1, ge=1, description="KV cache of each CPU engine.")
    max_restarts: NonNegativeInt = Field(
        5,
        description="Restarts within 15 minutes of an engine started here that exits, hangs or does "
        "not answer; then it stays down until `qarr tiers restart`. 0: never restarted.",
    )
    hang_s: PositiveFloat = Field(
        120,
        description="An engine that has requests and makes no progress for this long must answer a request of one "
        "token within 30 s, or it is restarted; one given by URL is quarantined.",
    )
    drain_s: NonNegativeFloat = Field(
        120,
        description="Time for open requests to finish before an engine is restarted or recycled; then they are aborted.",
    )
    recycle_every_s: NonNegativeFloat = Field(
        0, description="Each engine is recycled at this interval, one at a time and spread out. 0: never."
    )
    canary_min_agreement: Share = Field(
        0.5,
        description="Share of greedy tokens, up to the first difference, that must equal those recorded at the "
        "checkpoint's first start on this machine, or at first from this URL (`canary.json` in `policy.profiles`). 0: not "
        "compared.",
    )
    warmup_expected: str = Field("Paris", description="Must occur in the answer; empty: any sane text.")


def _ray_address(address: str) -> str:
    if not re.fullmatch(r"auto|([^\s/:\[\]]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}", address):
        raise ValueError("auto is allowed, or the head's HOST:PORT as 10.0.0.5:6379; no ray://, that is Ray Client's")
    return address


class RaySettings(Section):
    """Engines on the machines of a Ray cluster (`qarr up --on ray`)."""

    address: Annotated[str, AfterValidator(_ray_address)] = Field(
        "auto", description="The cluster: `auto` is the one that this machine belongs to, else `HOST:PORT` of its head."
    )
    python: Path = Field(
        default_factory=lambda: PROJECT / ".venv-ray/bin/python", description="Interpreter that has Ray and vLLM."
    )
    resources: RayResources = Field(
        {"CPU": 1},
        description="What Ray reserves on a node for one replica, by the names of Ray's resources. With `GPU` its engine "
        "runs on GPUs, a part of one included; without, on as many threads as `CPU`.",
    )


class QuantizerSettings(Section):
    """The environment that makes checkpoints."""

    python: Path = Field(
        default_factory=lambda: PROJECT / ".venv-quantizer/bin/python",
        description="Interpreter that has llm-compressor.",
    )


class LikeTier(Section):
    """A loss budget by comparison."""

    like: TierName = Field(TierName.BALANCED, description="No more answers than this tier loses.")

    @field_validator("like")
    @classmethod
    def _loses_something(cls, like: TierName) -> TierName:
        if like is TierName.PRECISE:
            raise ValueError("precise loses nothing")
        return like


class PolicySettings(Section):
    """How a tier is chosen."""

    reloads: ClassVar[frozenset[str]] = AllBut({"profiles"})
    negligible_loss: ClassVar[float] = 0.005  # share of answers; a tier that loses no more is as good as the highest
    sla_confidence: ClassVar[float] = 0.9  # with which bounds must be met, if a request gives none

    loss_budget: Share | LikeTier = Field(
        LikeTier(),
        description="Share of answers that may get worse than the highest precision's on a kind of prompt, while engine "
        "time is scarce: a number, or what one tier loses: that tier may answer every prompt, and lower ones those on "
        'which they lose no more than it does on average: `{ like = "balanced" }`. While engines have time to spare, or '
        "at 0, only tiers that lose next to nothing serve in the highest precision's place.",
    )
    max_loss: dict[PromptClass, Share] = Field(
        {},
        description="Most quality loss of each class, as a share of answers; a tier that may lose more is not used. "
        "Classes that are not named have only the budget.",
    )
    give_up: Literal["quality", "latency"] = Field(
        "latency", description="The bound that is given up first if no tier meets all bounds of a request."
    )
    prices: dict[TierName, PositiveFloat] = Field(
        {},
        description="Weight of an engine-second of each tier; 1 if not given. With a price, engine time counts as scarce "
        "from the start: set one where engines cost by use, as in a fleet that scales with its load.",
    )
    profiles: Path = Field(
        default_factory=lambda: cache_dir() / "profiles",
        description="Where `qarr profile` keeps its results. The served checkpoints' profile is used.",
    )
    max_slowdown: float = Field(
        4.0,
        gt=1,
        description="While speed under load is not measured, a tier this many times slower per token than a higher "
        "precision is not used.",
    )
    live_check_share: Share = Field(
        0,
        description="Shadow evaluation: share of prompts served by a lower precision that this and the highest one "
        "answer again while the engines are idle. Numbers, choices, JSON and code in the answers are compared; of others, "
        "the regret is reported. It shows drift, and decides nothing. 0: off.",
    )

    @field_validator("loss_budget", mode="wrap")
    @classmethod
    def _one_message(cls, value: object, check: ValidatorFunctionWrapHandler) -> object:
        try:
            return check(value)
        except ValidationError:
            text = 'a number from 0 to 1, { like = "fast" } or { like = "balanced" } is needed'
            raise ValueError(text) from None


class ProfileSettings(Section):
    """When the router measures itself."""

    latency_s: ClassVar[float] = 150.0  # of work, about, for the speed of all tiers
    idle_s: ClassVar[float] = 5.0  # without requests; doubled after each attempt without a result, up to a minute

    auto: bool = Field(
        True,
        description="Measure the speed and the loss of tiers without a profile in `policy.profiles`, as `qarr profile` "
        "does, while there are no requests. Only if this router started every engine: engines that others use too are "
        "left to `qarr profile`.",
    )


class WaitSettings(Section):
    """Longest waits in the queue, by priority."""

    reloads: ClassVar[frozenset[str]] = AllBut()

    interactive: NonNegativeFloat = Field(10, description="Longest wait for a slot, in seconds.")
    standard: NonNegativeFloat = Field(30, description="Longest wait for a slot, in seconds.")
    batch: NonNegativeFloat = Field(120, description="Longest wait for a slot, in seconds.")


class AdmissionSettings(Section):
    """Who gets the next free slot."""

    reloads: ClassVar[frozenset[str]] = AllBut()
    affinity: ClassVar[bool] = True  # what replicas hold in their prefix caches counts in choices and predictions

    max_waiting: NonNegativeInt = Field(
        256, description="Most requests that wait for a slot; beyond, the least urgent is refused. 0: none waits."
    )
    max_wait_s: WaitSettings = WaitSettings()


class UpstreamSettings(Section):
    """How the router talks to engines."""

    reloads: ClassVar[frozenset[str]] = AllBut()
    connect_timeout_s: ClassVar[float] = 5.0
    retry_share: ClassVar[float] = 0.2  # retries before the first byte that each request adds to a budget shared by all
    retry_reserve: ClassVar[int] = 50  # retries in that budget at the start, and at most
    breaker: ClassVar[BreakerOptions] = BreakerOptions()

    first_token_timeout_s: PositiveFloat = Field(120, description="From sending a request to its first token.")
    token_timeout_s: PositiveFloat = Field(60, description="Longest time between two tokens.")
    answer_timeout_s: PositiveFloat = Field(600, description="Time to the whole answer of an unstreamed request.")
    attempts: int = Field(
        3, ge=1, description="Replicas tried before the first byte, and the most failovers of one answer."
    )


def _overflow_address(url: str) -> str:
    if not url:
        return url
    allowed = "an address like https://api.example.com/v1 is allowed"
    if "@" in url:
        raise ValueError(f"user and password do not belong here: overflow.api_key holds the key; {allowed}")
    if not url.isascii():
        raise ValueError(f"a host's name is written in ASCII (xn--...); {allowed}")
    base = url.rstrip("/")
    if wrong := wrong_with(base.removesuffix("/v1")):
        raise ValueError(f"{wrong}; {allowed}")
    if base.endswith("/completions"):
        raise ValueError(f"the path of an endpoint does not belong here; {allowed}")
    address = urlsplit(url)
    if address.scheme == "http" and address.hostname not in {"localhost", "127.0.0.1", "::1"}:
        raise ValueError(
            "prompts and the key would go over the network in the clear: https:// is allowed, or http:// of this machine"
        )
    return base


def _secret_header_value(key: SecretStr) -> SecretStr:
    _header_value(key.get_secret_value())
    return key


class OverflowSettings(Section):
    """A server of OpenAI's API that answers what all tiers are too full for."""

    reloads: ClassVar[frozenset[str]] = AllBut()
    first_token_timeout_s: ClassVar[float] = 30.0  # other times are those of ``UpstreamSettings``

    url: Annotated[str, AfterValidator(_overflow_address)] = Field(
        "",
        description="Base address, as `https://api.example.com/v1`: https, or http on this machine. Prompts that it answers "
        "leave the router's own engines. Empty: requests that all tiers are too full for are refused.",
    )
    api_key: Annotated[SecretStr, AfterValidator(_secret_header_value)] = Field(
        SecretStr(""), description="Key for it, sent nowhere else; empty: none is sent."
    )
    model: str = Field("", description="Name of the model to ask it for.")
    name: str = Field(
        "",
        pattern=r"^[A-Za-z0-9._-]{0,64}$",
        description="What answers and records call it; empty: the host of `overflow.url`.",
    )
    max_in_flight: int = Field(16, ge=1, description="Most requests that it has at once.")

    @model_validator(mode="after")
    def _complete(self) -> OverflowSettings:
        """Check that an address has the name of a model."""
        if self.url and not self.model:
            raise ValueError("url needs model: the name of the model to ask it for")
        return self

    @property
    def shown_name(self) -> str:
        """Return what answers and records call it; empty: there is none."""
        return self.name or urlsplit(self.url).hostname or "" if self.url else ""


class AdapterSettings(Section):
    """A LoRA adapter that engines started here load at their start."""

    path: Path = Field(description="Folder in the form of PEFT, with `adapter_config.json`.")
    tiers: Annotated[tuple[TierName, ...], AfterValidator(_different)] = Field(
        (), description="Tiers whose engines load it; empty: all that have engines here."
    )


class LoraSettings(Section):
    """LoRA adapters: small changes of the model's weights, which requests name as their model."""

    adapters: dict[AdapterName, AdapterSettings] = Field(
        {},
        description='Adapters by name, as in `support = { path = "/models/support", tiers = ["precise"] }`. Requests for '
        "one are kept to the tiers that have it.",
    )
    at_run_time: bool = Field(
        False, description="Start engines so that `qarr adapters load` may load more. Takes memory for one adapter."
    )
    max_rank: Literal[8, 16, 32, 64, 128, 256, 320, 512] = Field(
        16, description="Highest rank of adapters loaded at run time; those named here raise it by themselves."
    )


class OpenAISettings(Section):
    """OpenAI's API."""

    reloads: ClassVar[frozenset[str]] = AllBut()

    tier_policy: TierPolicy = Field("require", description="Of a tier named as `model`; `prefer` makes it a hint.")
    aliases: dict[str, Literal["auto"] | TierName] = Field(
        {}, description='More model names, as in `"gpt-*" = "auto"`.'
    )
    embeddings_urls: Annotated[tuple[BaseAddress, ...], AfterValidator(_once)] = Field(
        (), description="Engines that serve `/v1/embeddings`; the first one that answers is used."
    )


class AuthSettings(Section):
    """Who may use the router."""

    reloads: ClassVar[frozenset[str]] = AllBut()

    keys_file: Path = Field(
        default_factory=lambda: config_dir() / "keys.json",
        description="Keys, kept as hashes. Once this file exists, requests need a key.",
    )
    allow_keyless: bool = Field(
        False, description="Serve without keys to everyone who reaches an address that is not loopback."
    )


Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]


class ClaimSettings(Section):
    """Which claims of a JWT say who it is for, and what that caller may do."""

    reloads: ClassVar[frozenset[str]] = AllBut()

    name: str = Field("sub", min_length=1, description="Claim of a token that names its caller.")
    rights: str = Field(
        "qarr",
        min_length=1,
        description="Claim with an object of rights, by the names of a key's fields; it may be absent.",
    )


class JwtSettings(Section):
    """JWTs of an issuer, which let callers in as keys do."""

    reloads: ClassVar[frozenset[str]] = AllBut()

    issuer: str = Field(
        "", description="Issuer of the tokens, as their claim `iss` has it; empty: tokens are not accepted."
    )
    audience: str = Field("", description="Of which the claim `aud` must have this.")
    jwks: str = Field(
        "", description="The issuer's public keys (JWKS): a file, or an address: https, or http on this machine."
    )
    algorithms: Annotated[tuple[Algorithm, ...], Field(min_length=1)] = Field(
        ("RS256", "ES256", "EdDSA"), description="Algorithms of signatures that are accepted."
    )
    claims: ClaimSettings = ClaimSettings()

    @model_validator(mode="after")
    def _complete_issuer(self) -> JwtSettings:
        given = {"issuer": self.issuer, "audience": self.audience, "jwks": self.jwks}
        lacking = [name for name, value in given.items() if not value]
        if lacking and len(lacking) < len(given):
            raise ValueError(f"{' and '.join(lacking)}: issuer, audience and jwks are given together, or none is")
        if "://" in self.jwks:
            address = urlsplit(self.jwks)
            local = address.scheme == "http" and address.hostname in {"localhost", "127.0.0.1", "::1"}
            if not address.hostname or not (address.scheme == "https" or local):
                raise ValueError("jwks: a file, an address with https://, or with http:// of this machine is allowed")
        return self


def _redis_address(url: SecretStr) -> SecretStr:
    try:
        if text := url.get_secret_value():
            parse_url(text)
    except ValueError:
        raise ValueError("an address that begins with redis://, rediss:// or unix:// is allowed") from None
    return url


class StateSettings(Section):
    """What several routers share."""

    redis_url: Annotated[SecretStr, AfterValidator(_redis_address)] = Field(
        SecretStr(""),
        description="Redis, for routers that share quotas and load; empty: each router counts for itself.",
    )


class BudgetSettings(Section):
    """What requests cost, and where it is counted."""

    reloads: ClassVar[frozenset[str]] = frozenset({"replica_hour", "currency", "while_unknown"})

    replica_hour: PositiveFloat | None = Field(
        None,
        description="Price of an hour of one replica of the highest tier. A second of another tier's replica counts as "
        "`policy.prices` has it, or without those by its GPUs. Unset: nothing costs money.",
    )
    currency: str = Field("USD", max_length=16, description="Of `budgets.replica_hour`, for people.")
    file: Path = Field(
        default_factory=lambda: state_dir() / "usage.sqlite",
        description="Usage by day, key, team and tier; without `state.redis_url` also what budgets have used. Routers of "
        "one machine may share it.",
    )
    while_unknown: Literal["refuse", "serve"] = Field(
        "refuse",
        description="While it is not known what a budget has used (a file or Redis that cannot be read): refuse its "
        "requests with `503`, or serve them and count from 0.",
    )
    metrics_keys: int = Field(
        50, ge=0, description="Keys, in the key file's order, that have metrics of their own; the rest are `other`."
    )


def _viewer_address(url: str) -> str:
    if url and not (url.startswith(("http://", "https://")) and TRACE_ID in url):
        raise ValueError(f"an address that begins with http:// or https:// and has {TRACE_ID} in it is allowed")
    return url


class TelemetrySettings(Section):
    """What goes into logs and traces. Exporters are set by the standard `OTEL_*` variables."""

    reloads: ClassVar[frozenset[str]] = frozenset({"record_prompts", "log_level"})
    recent_requests: ClassVar[int] = 500  # ended ones in memory; as many that failed or missed their SLA besides

    record_prompts: bool = Field(False, description="Put prompts on spans.")
    trace_url: Annotated[str, AfterValidator(_viewer_address)] = Field(
        "", description="Address of a trace in a trace viewer, with `{trace_id}` in it; answers then carry it."
    )
    sampled_prompts: Path | None = Field(
        None,
        description="File of sampled prompts, to write tasks from and to train the classifier; none: no prompt is kept.",
    )
    prompt_share: Share = Field(0.01, description="Share of prompts that are sampled to that file.")
    decision_log: Path | None = Field(
        None,
        description="File for every decision with all its inputs except the prompt; `benchmarks/replay.py` reads it.",
    )
    log_format: Literal["text", "json"] = Field("text", description="Format of the router's log on standard error.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Level of that log: `info` has one line for each failure, and what `request_lines` adds."
    )
    request_lines: Literal["auto", "file", "stderr", "both"] = Field(
        "auto",
        description="Where the lines of inference requests that end well go: the log file, standard error, or both. "
        "`auto`: the file; standard error if there is none, both if `log_format` is `json`. Lines of those that fail or "
        "are refused go to both.",
    )
    log_file_mb: NonNegativeInt = Field(
        20,
        description="The same log, `info` and up, is written as JSON to `router-PORT.log` in `engine.log_dir`, which is "
        "rotated at this size. 0: no such file.",
    )

    def trace_address(self, trace_id: str) -> str | None:
        """Return the address of a trace in the viewer; None: no viewer is known."""
        return self.trace_url.replace(TRACE_ID, trace_id) or None


class Settings(BaseSettings):
    """All settings."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        nested_model_default_partial_update=True,
    )

    server: ServerSettings = Field(default_factory=ServerSettings)
    tls: TlsSettings = TlsSettings()
    limits: LimitSettings = LimitSettings()
    tiers: Annotated[TiersSettings, BeforeValidator(_complete)] = Field(
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
            raise ValueError(f"lora.adapters.{name} has the name of an alias in openai.aliases: give one another name")
        return self

    @model_validator(mode="after")
    def _overflow_fits(self) -> Settings:
        """Check that no tier has the overflow's name in metrics and usage."""
        if self.overflow.url and OVERFLOW in self.tiers.names:
            raise ValueError(f"overflow.url: a tier is named {OVERFLOW}, as usage and metrics call it: rename the tier")
        return self

    @model_validator(mode="after")
    def _tiers_are_known(self) -> Settings:
        budget = self.policy.loss_budget
        named = {f"policy.prices.{tier}": tier for tier in self.policy.prices}
        named |= {"policy.loss_budget.like": budget.like} if isinstance(budget, LikeTier) else {}
        named |= {f"lora.adapters.{name}.tiers": t for name, own in self.lora.adapters.items() for t in own.tiers}
        named |= {f"openai.aliases.{name}": TierName(t) for name, t in self.openai.aliases.items() if t != "auto"}
        for key, tier in named.items():
            if tier not in self.tiers.names:
                raise ValueError(f"{key}: there is no tier {tier}; there are {', '.join(self.tiers.names)}")
        for name in self.lora.adapters.keys() & set(self.tiers.names):
            raise ValueError(f"lora.adapters.{name} has the name of a tier: give the adapter another name")
        return self

    @classmethod
    def settings_customise_sources(cls, *_: Any, **sources: Any) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read the environment, then the caller's values (the file): no .env and no secrets folder."""
        return _without_ignored(sources["env_settings"]), sources["init_settings"]


def _without_ignored(source: PydanticBaseSettingsSource) -> PydanticBaseSettingsSource:
    """Return a source of settings that leaves out those that are gone and ignored."""
    return cast("PydanticBaseSettingsSource", lambda: without_ignored(source())[0])


class _Overlaid(Settings):
    """Settings with the command line on top; they do not read the environment again, which would take precedence."""

    @classmethod
    def settings_customise_sources(cls, *_: Any, **sources: Any) -> tuple[PydanticBaseSettingsSource, ...]:
        return (sources["init_settings"],)


def load_settings(path: Path | None = None, overrides: dict[str, Any] | None = None) -> Settings:
    """Read the settings.

    Args:
        path: TOML file; None: that of ``QARR_CONFIG``, if set.
        overrides: Values from the command line, as a nested dictionary; ``None`` values are not set.

    Raises:
        SettingsError: A key is unknown, a value is not allowed, or the file cannot be read.
    """
    _check_variables()
    named = path or os.environ.get("QARR_CONFIG")
    try:
        settings = Settings(**(_read_toml(Path(named)) if named else {}))
        if overrides:
            settings = _Overlaid(**_overlay(settings.model_dump(), overrides))
    except ValidationError as error:
        raise SettingsError("\n".join(_explain(e) for e in error.errors(include_url=False))) from error
    return settings


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        values, ignored = without_ignored(tomllib.loads(path.read_text("utf-8")))
    except OSError as error:
        raise SettingsError(f"settings file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"settings file {path} is not TOML: {error}") from error
    for key, instead in ignored.items():
        logging.getLogger(__name__).warning("%s is ignored, the setting is gone: %s", key, instead)
    return values


def _overlay(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, dict):
            merged[key] = _overlay(merged.get(key, {}), value)
        elif value is not None:
            merged[key] = value
    return merged


def _explain(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        if gone := removed_setting(key):
            return f"{key}: this setting is gone: {gone.instead}"
        return f"{key}: there is no such setting ('qarr settings' lists all)"
    text = error["msg"].removeprefix("Value error, ")
    if _SECRET.fullmatch(key) or isinstance(error["input"], dict):
        return f"{key}: {text}"
    return f"{key}: {text} (got {_PASSWORD.sub('//***@', repr(error['input']))})"


def _check_variables() -> None:
    """Check that every environment variable with our prefix sets something: a typo must not be silent."""
    for name, value in os.environ.items():
        if not name.startswith(PREFIX) or name in PLAIN_VARIABLES or _SERVICE_LINK.fullmatch(f"{name}={value}"):
            continue
        parts = name.removeprefix(PREFIX).lower().split("__")
        key = ".".join(parts)
        if gone := removed_setting(key):
            if gone.refused:
                raise SettingsError(f"environment variable {name}: this setting is gone: {gone.instead}")
            logging.getLogger(__name__).warning("%s is ignored, the setting is gone: %s", name, gone.instead)
        elif not _known(Settings, parts):
            raise SettingsError(f"environment variable {name}: there is no setting {key}")


def _known(model: type[BaseModel], parts: list[str]) -> bool:
    field = model.model_fields.get(parts[0])
    if field is None and model is TiersSettings and len(parts) > 1:
        return _known(TierSettings, parts[1:])
    inner = _section(field) if field else None
    return field is not None and (inner is None or len(parts) == 1 or _known(inner, parts[1:]))


def _section(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section that a field holds; None: it holds a value."""
    inner = field.annotation
    return inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None


def schema() -> dict[str, Any]:
    return Settings.model_json_schema()


def table() -> str:
    """Return every setting with its default and meaning, as a Markdown table; a tier's are one row for all tiers."""
    rows: dict[str, tuple[FieldInfo, bool, dict[str, str]]] = {}
    for key, field, reloads in leaves(Settings):
        name = ".".join((key[0], "*", *key[2:]) if key[0] == "tiers" else key)
        rows.setdefault(name, (field, reloads, {}))[2][key[1]] = _shown_default(key, field)
    shown = ["| setting | default | reloads | meaning |", "| --- | --- | --- | --- |"]
    for name, (field, reloads, of) in rows.items():
        default = (
            ", ".join(f"{tier} {d}" for tier, d in of.items()) if len({*of.values()}) > 1 else next(iter(of.values()))
        )
        shown.append(f"| `{name}` | {default} | {'yes' if reloads else 'no'} | {field.description} |")
    return "\n".join(shown)


def leaves(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo, bool]]:
    """Yield each setting's path and field, and whether it reloads."""
    for name, field in model.model_fields.items():
        if inner := _section(field):
            yield from leaves(inner, (*path, name))
        else:
            yield (*path, name), field, issubclass(model, Section) and name in model.reloads


@dataclass(frozen=True, slots=True)
class Change:
    """A setting with another value; values are shown as text, without what is secret.

    Attributes:
        reloads: Whether a running router takes it over.
    """

    key: str
    before: str
    after: str
    reloads: bool

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.after}"


def changes(before: BaseModel, after: BaseModel, path: str = "") -> tuple[Change, ...]:
    """Return the settings that differ. A tier that is only in one of both is one change, which needs a restart."""
    found: list[Change] = []
    names = [*type(before).model_fields, *(before.model_extra or {}), *(after.model_extra or {})]
    for name in dict.fromkeys(names):
        key, old, new = f"{path}{name}", getattr(before, name, None), getattr(after, name, None)
        if old == new:
            continue
        if isinstance(old, Section) and isinstance(new, type(old)) and not isinstance(old, LikeTier):
            found.extend(changes(old, new, f"{key}."))
        else:
            reloads = isinstance(before, Section) and name in before.reloads
            found.append(Change(key, _shown_value(key, old), _shown_value(key, new), reloads))
    return tuple(found)


def _shown_value(key: str, value: object) -> str:
    if value is not None and _SECRET.fullmatch(key):
        return "***"
    shown = to_jsonable_python(value, fallback=str)
    return _PASSWORD.sub("//***@", json.dumps(shown, ensure_ascii=False))


def _shown_default(key: tuple[str, ...], field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if key[0] == "tiers" and key[2] in DEFAULT_LENGTHS[key[1]]:
        value = DEFAULT_LENGTHS[key[1]][key[2]]
    if value == runtime_dir():
        return "`<runtime>`"
    if isinstance(value, Path):
        for folder, shown in (
            (cache_dir(), "<cache>"), (config_dir(), "<config>"), (state_dir(), "<state>"), (PROJECT, "<project>"),
        ):  # fmt: skip
            if value.is_relative_to(folder):
                return f"`{shown}/{value.relative_to(folder)}`"
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if value in ({}, (), "", None):
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{k}: {v}" for k, v in value.items())
    return f"`{value}`"
