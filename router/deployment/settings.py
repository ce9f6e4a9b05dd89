"""The fleet: tiers, their engines and checkpoints, and where they run."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    model_validator,
)

from router.section import (
    PROJECT,
    AdapterName,
    EngineAddress,
    Section,
    cache_dir,
    different,
    header_value,
    once,
)
from tiers.address import normalised, wrong_with
from tiers.checkpoints.prepare import DEFAULT_MODEL
from tiers.checkpoints.schemes import AUTO, CHOSEN_TIERS, scheme_named
from tiers.errors import SchemeError
from tiers.lifecycle.engine_args import check_own
from tiers.spec import TierName

MAX_REPLICAS = 64  # a tier, on one machine


def _dns_address(url: str) -> str:
    if not url:
        return url
    if url.startswith("https:"):
        raise ValueError(
            "engines are reached by their addresses, which no certificate names: http:// is allowed"
        )
    fault = wrong_with(url)
    if fault:
        raise ValueError(
            f"{fault}; a name like http://qarr-fast.default.svc:8000 is allowed"
        )
    return url


def _not_ours(args: tuple[str, ...]) -> tuple[str, ...]:
    check_own(args)
    return args


def _checkpoint_name(name: str | None) -> str | None:
    if name is not None and not name.strip():
        raise ValueError("a model folder or a Hugging Face id (owner/name) is allowed")
    return name


def _engine_variables(variables: dict[str, str]) -> dict[str, str]:
    for name, value in variables.items():
        if not name.isidentifier() or not name.isascii() or "\0" in value:
            raise ValueError(
                f"{name!r}: a name of letters, digits and underscores, and a value without NUL are allowed"
            )
        if name.startswith("QARR_"):
            raise ValueError(f"{name}: variables of QARR's own do not reach engines")
        if name == "VLLM_API_KEY":
            raise ValueError(
                f"{name}: engines started here get a random key; it cannot be changed"
            )
    return variables


EngineArgs = Annotated[tuple[str, ...], AfterValidator(_not_ours)]
RayResources = Annotated[
    dict[Annotated[str, Field(min_length=1)], NonNegativeFloat], Field()
]


class TierSettings(Section, reloads=frozenset({"urls"})):
    """One tier."""

    max_model_len: int = Field(
        4096, ge=16, description="Context: prompt plus output, in tokens."
    )
    max_num_seqs: int = Field(
        16, ge=1, description="Sequences the engine runs at once."
    )
    max_in_flight: int = Field(
        32,
        ge=1,
        description="Requests admitted to one replica; further ones go elsewhere, wait, or get 503. A request with "
        "`n` choices counts as `n`.",
    )
    urls: Annotated[tuple[EngineAddress, ...], AfterValidator(once)] = Field(
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
        le=MAX_REPLICAS,
        description="How many engines are started here; unset: one, or none with `urls` or `dns`. 0 without these leaves "
        "the tier out, unless `discovery.file` names it.",
    )
    gpus: Annotated[tuple[NonNegativeInt, ...], AfterValidator(different)] = Field(
        (),
        description="CUDA devices for the engines started here, taken in turn; empty: those with most memory left.",
    )
    tensor_parallel: int = Field(
        1, ge=1, le=64, description="GPUs that share each layer of one engine."
    )
    pipeline_parallel: int = Field(
        1,
        ge=1,
        le=64,
        description="Stages, on GPUs of their own, of one engine's layers.",
    )
    across_nodes: bool = Field(
        False,
        description="On Ray, one engine's GPUs may be on several nodes: vLLM's own Ray executor takes them.",
    )
    ray_resources: RayResources = Field(
        {},
        description="What a replica of this tier takes, over `ray.resources`; 0 removes a resource.",
    )
    checkpoint: Annotated[str | None, AfterValidator(_checkpoint_name)] = Field(
        None,
        description="Published checkpoint for this tier instead of one that is made of `model.name`: a model folder, or a "
        "Hugging Face id, which is fetched. It is served as it is.",
    )
    scheme: str = Field(
        AUTO,
        description="Only `fast` and `balanced`: what stands behind the tier's engines started here. `auto`: what suits "
        "this machine, as `tiers/checkpoints/schemes.toml` has it; or the name of a scheme there, such as `int8-w8a8`. "
        "`online-fp8` and its kin make no checkpoint: vLLM quantizes the 16-bit folder while it loads.",
    )
    engine_args: EngineArgs = Field(
        (),
        description="More vLLM arguments for this tier's engines started here, after `engine.extra_args`; checked by the "
        "installed vLLM before anything starts.",
    )
    env: Annotated[dict[str, str], AfterValidator(_engine_variables)] = Field(
        {},
        description="Variables of this tier's engines started here; they override inherited ones.",
    )
    draft: str = Field(
        "",
        description="Speculative decoding: what proposes tokens that an engine started here checks in one step. `ngram`: "
        "what followed the same words before; a tier of lower precision: its checkpoint; or a model folder. Empty: none. "
        "Requests with `min_p` or `logit_bias` go to tiers without a draft: vLLM refuses them there.",
    )
    precision: str = Field(
        "",
        pattern=r"^([a-z0-9][A-Za-z0-9+. -]{0,31})?$",
        description="Precision of engines that run elsewhere, such as `fp8` or `fp8 on L4`, if their checkpoint cannot be "
        "read here; it is shown as stated. For engines started here the checkpoint tells it.",
    )

    @model_validator(mode="after")
    def _enough_gpus(self) -> TierSettings:
        world_size = self.tensor_parallel * self.pipeline_parallel
        if self.gpus and len(self.gpus) < world_size:
            raise ValueError(
                f"gpus names {len(self.gpus)}, one engine takes tensor_parallel x pipeline_parallel = {world_size}"
            )
        return self

    @property
    def replicas_here(self) -> int:
        """Return how many engines are started here."""
        if self.replicas is not None:
            return self.replicas
        return 0 if self.urls or self.dns else 1


DEFAULT_LENGTHS: dict[str, dict[str, Any]] = {
    "fast": {"max_model_len": 2048},
    "balanced": {"max_model_len": 4096},
    "precise": {"max_model_len": 8192},
}


def complete(tiers: Any) -> Any:
    """Let a file or variable set one key of one tier without repeating the rest.

    Variables of tiers that only the settings name arrive as text: JSON there is read here.
    """
    if not isinstance(tiers, dict):
        return tiers
    standard_tiers: dict[str, Any] = {name: {} for name in DEFAULT_LENGTHS}
    return {
        name: _complete_tier(name, tier)
        for name, tier in {**standard_tiers, **tiers}.items()
    }


def _complete_tier(name: str, tier: Any) -> Any:
    if not isinstance(tier, dict):
        return tier
    if name in DEFAULT_LENGTHS:
        return {**DEFAULT_LENGTHS[name], **tier}
    return {key: _from_json(value) for key, value in tier.items()}


def _from_json(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(("[", "{")):
        with suppress(ValueError):
            return json.loads(value)
    return value


class TiersSettings(Section):
    """The tiers: these three, and any that are named besides, as in ``[tiers.int8]``."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, TierSettings] = Field(init=False)

    fast: TierSettings = Field(
        description="The lowest precision: AWQ int4 where it is made here."
    )
    balanced: TierSettings = Field(description="Between: FP8 where it is made here.")
    precise: TierSettings = Field(
        description="The highest precision, which loss is measured against: BF16, or a quantized model as published."
    )

    @cached_property
    def names(self) -> tuple[TierName, ...]:
        return (
            TierName.FAST,
            TierName.BALANCED,
            *map(TierName, self.__pydantic_extra__),
            TierName.PRECISE,
        )

    def of(self, name: TierName) -> TierSettings:
        tier: TierSettings = getattr(self, name)
        return tier

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
    def _schemes(self) -> TiersSettings:
        for name in self.names:
            tier = self.of(name)
            if tier.scheme == AUTO:
                continue
            if name not in CHOSEN_TIERS:
                raise ValueError(
                    f"tiers.{name}.scheme: only fast and balanced have a scheme; name a folder for this tier "
                    f"(tiers.{name}.checkpoint), or leave it out"
                )
            if tier.checkpoint is not None:
                raise ValueError(
                    f"tiers.{name}.scheme and tiers.{name}.checkpoint both say what stands behind the tier: name one of them"
                )
            try:
                scheme_named(tier.scheme, name)
            except SchemeError as error:
                raise ValueError(str(error)) from error
        return self

    @model_validator(mode="after")
    def _engines_of_their_own(self) -> TiersSettings:
        key_of_url: dict[str, str] = {}
        for name in self.names:
            tier = self.of(name)
            keys_and_urls = [(f"tiers.{name}.urls", url) for url in tier.urls]
            if tier.dns:
                keys_and_urls.append((f"tiers.{name}.dns", tier.dns))
            for key, url in keys_and_urls:
                first_key = key_of_url.setdefault(normalised(url), key)
                if first_key != key:
                    raise ValueError(
                        f"{first_key} and {key} both name {url}: an engine serves at one precision"
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
        description="Seconds between two readings of `discovery.file` and of names (`tiers.<name>.dns`).",
    )


class ModelSettings(Section):
    """The model and how its checkpoints are made."""

    name: str = Field(
        DEFAULT_MODEL,
        description="The default model, a model folder, or a Hugging Face id. One that is quantized already is the highest "
        "precision as it is published, and nothing is made of it.",
    )
    allow_different: bool = Field(
        False,
        description="Serve tiers together whose checkpoints differ in architecture, vocabulary, tokenizer or chat template. "
        "Tiers that read prompts differently do not continue each other's answers.",
    )
    store: Path = Field(
        default_factory=lambda: cache_dir() / "models",
        description="Where checkpoints are kept.",
    )
    calibration: Path | None = Field(
        None,
        description='Your own prompts for schemes that are calibrated (AWQ, GPTQ, NVFP4, INT8): JSON lines with a "text" '
        "field. Unset: prompts that come with this project.",
    )
    calibration_samples: NonNegativeInt | None = Field(
        None,
        description="How many of these prompts are used, evenly spaced; 0: all. Unset: 16 of up to 256 tokens on a CPU and "
        "for the default model; 512 of up to 2,048 on a GPU.",
    )


class EngineSettings(Section):
    """How engines are started, warmed and stopped."""

    python: Path = Field(
        default_factory=lambda: PROJECT / ".venv-engine/bin/python",
        description="Python that has vLLM.",
    )
    base_port: int = Field(
        9101,
        ge=1024,
        le=65000,
        description="First engine's port; the next ones follow.",
    )
    api_key: Annotated[str, AfterValidator(header_value)] = Field(
        "",
        description="Key of engines given by URL. Engines started here get a random one.",
    )
    extra_args: EngineArgs = Field(
        (), description="More vLLM arguments for every engine started here."
    )
    log_dir: Path = Field(
        default_factory=lambda: cache_dir() / "logs", description="Folder of the logs."
    )
    start_timeout_s: PositiveFloat = Field(
        600, description="Time from an engine's start to its first healthy answer."
    )
    cpu_kv_cache_gib: float | None = Field(
        None,
        ge=0.25,
        le=4096,
        description="KV cache of each CPU engine, in GiB; unset: by context and `max_num_seqs`.",
    )
    max_restarts: NonNegativeInt = Field(
        5,
        description="Restarts within 15 minutes of an engine started here that exits, hangs or does "
        "not answer; then it stays down until `qarr tiers restart`. 0: never restarted.",
    )
    hang_s: PositiveFloat = Field(
        60,
        description="An engine that has requests and makes no progress for this long must answer a request of one "
        "token within 30 s, or it is restarted; one given by URL is quarantined. After a quarter of it, health says so.",
    )
    drain_s: NonNegativeFloat = Field(
        120,
        description="Time for open requests to finish before an engine is restarted or recycled; then they are aborted.",
    )
    recycle_every_s: NonNegativeFloat = Field(
        0,
        description="Each engine is recycled at this interval, one at a time and spread out. 0: never.",
    )
    check_tolerance: NonNegativeFloat = Field(
        1.0,
        description="Before traffic, an engine's log-probabilities of fixed texts are compared with what its checkpoint "
        "should give. This multiplies the difference that sound engines may have. 0: not compared.",
    )


def _ray_address(address: str) -> str:
    if not re.fullmatch(r"auto|([^\s/:\[\]]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}", address):
        raise ValueError(
            "auto is allowed, or the head's HOST:PORT as 10.0.0.5:6379; ray:// is for Ray Client"
        )
    return address


class RaySettings(Section):
    """Engines on the machines of a Ray cluster (`qarr up --on ray`)."""

    address: Annotated[str, AfterValidator(_ray_address)] = Field(
        "auto",
        description="The cluster: `auto` is the one that this machine belongs to, else `HOST:PORT` of its head.",
    )
    python: Path = Field(
        default_factory=lambda: PROJECT / ".venv-ray/bin/python",
        description="Python that has Ray and vLLM.",
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
        description="Python that has llm-compressor.",
    )


class AdapterSettings(Section):
    """A LoRA adapter that engines started here load at their start."""

    path: Path = Field(
        description="Folder in PEFT's format, with `adapter_config.json`."
    )
    tiers: Annotated[tuple[TierName, ...], AfterValidator(different)] = Field(
        (),
        description="Tiers whose engines load it; empty: all that have engines here.",
    )


class LoraSettings(Section):
    """LoRA adapters: small changes of the model's weights, which requests name as their model."""

    adapters: dict[AdapterName, AdapterSettings] = Field(
        {},
        description='Adapters by name, as in `support = { path = "/models/support", tiers = ["precise"] }`. Requests for '
        "one are kept to the tiers that have it.",
    )
    at_run_time: bool = Field(
        False, description="Allow `qarr adapters load`. Takes memory for one adapter."
    )
    max_rank: Literal[8, 16, 32, 64, 128, 256, 320, 512] = Field(
        16,
        description="Highest rank of adapters loaded at run time; `lora.adapters` may raise it.",
    )
