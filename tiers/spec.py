"""Values that describe the fleet: tiers, precisions, replica states, and how an engine is started."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from pathlib import Path  # noqa: TC003  pydantic reads it for the decision log
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakValueDictionary

from pydantic_core import CoreSchema, PydanticCustomError, core_schema

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Precision(StrEnum):
    """The number formats of weights that are made here. Other checkpoints may have others."""

    AWQ_INT4 = "awq-int4"
    FP8 = "fp8"
    BF16 = "bf16"


class TierName(str):
    """A tier's name. Names are interned: equal ones are one object.

    ``fast``, ``balanced`` and ``precise`` always exist, and ``precise`` is the highest precision, which loss is measured
    against. The settings may name more. What stands above what is the fleet's to tell (``Fleet.rank``).
    """

    __slots__ = ("__weakref__",)
    FAST: ClassVar[TierName]
    BALANCED: ClassVar[TierName]
    PRECISE: ClassVar[TierName]

    def __new__(cls, name: str) -> TierName:  # noqa: PYI034  there are no subclasses
        """Return the tier's name.

        Raises:
            ValueError: No tier can have it.
        """
        known = _NAMES.get(name)
        if known is None:
            if not _NAME.fullmatch(name) or name in RESERVED:
                raise ValueError(f"{TIER_NAMES} are allowed")
            known = _NAMES.setdefault(str(name), super().__new__(cls, name))
        return known

    def __reduce__(self) -> tuple[type[TierName], tuple[str]]:
        """Return how a copy is made: it is the same object."""
        return TierName, (str.__str__(self),)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: object, handler: object
    ) -> CoreSchema:
        """Return how pydantic validates it: a string that may be a tier's name."""
        del source, handler
        return core_schema.no_info_after_validator_function(
            _tier_name, core_schema.str_schema()
        )


def _tier_name(text: str) -> TierName:
    try:
        return TierName(text)
    except ValueError as error:  # pydantic would put "Value error" before its text
        raise PydanticCustomError("tier_name", "{why}", {"why": str(error)}) from None


SHOWN_DIGITS = 16  # people are shown so many digits of a digest
RESERVED = {"auto", "qarr"}  # names of models that stand for any tier
# stands for a tier in counts of what a server outside of the fleet has answered
OVERFLOW = "overflow"
TIER_NAMES = "1 to 32 lower-case letters, digits, - and _, beginning with a letter, and neither auto nor qarr,"
_NAME = re.compile(r"^[a-z][a-z0-9_-]{0,31}$")
_NAMES: WeakValueDictionary[str, TierName] = WeakValueDictionary()
TierName.FAST, TierName.BALANCED, TierName.PRECISE = map(
    TierName, ("fast", "balanced", "precise")
)
# The tiers that are always there, from the lowest precision to the highest.
STANDARD_TIERS = (TierName.FAST, TierName.BALANCED, TierName.PRECISE)


def in_order(tiers: Iterable[TierName]) -> list[TierName]:
    """Return tiers, each once, in the order in which they are shown where no fleet tells one: the highest comes last."""
    known = set(tiers)
    added = sorted(known - set(STANDARD_TIERS))
    return [
        t
        for t in (TierName.FAST, TierName.BALANCED, *added, TierName.PRECISE)
        if t in known
    ]


NGRAM = "ngram"
UNKNOWN = "unknown"  # the precision of an engine that cannot say

# What is made for each tier. What a tier serves is ``TierSpec.precision``.
PRECISIONS: dict[TierName, Precision] = {
    TierName.FAST: Precision.AWQ_INT4,
    TierName.BALANCED: Precision.FP8,
    TierName.PRECISE: Precision.BF16,
}


@dataclass(frozen=True, slots=True)
class EngineBuild:
    """What an engine computes with, beside its weights.

    Attributes:
        version: The release of vLLM; None: it is not told.
        kv_cache_dtype: Type of the KV cache as vLLM names it, such as ``auto`` or ``fp8``; None: it is not told.
    """

    version: str | None = None
    kv_cache_dtype: str | None = None

    def __str__(self) -> str:
        """Return it for people, and for digests."""
        version = self.version or "of an unknown release"
        kv_cache = self.kv_cache_dtype or "unknown"
        return f"vLLM {version}, KV cache {kv_cache}"


class VerificationState(StrEnum):
    """What is known of what an engine computes, before and while it serves."""

    OFF = "off"  # nothing is verified
    PENDING = "pending"  # there is no reference yet
    VERIFIED = "verified"  # it was compared, and nothing wrong was found
    ACCEPTED = "accepted"  # an operator accepted what it computes
    REFERENCE = "reference"  # others are compared with it, and it with nothing
    DIFFERS = "differs"  # it treats requests otherwise than its reference
    CANNOT_TELL = "cannot tell"  # it does not give what is compared


class ReplicaStatus(Enum):
    """The state of a replica, or of a tier: that of its best replica. Only a ``READY`` one gets requests."""

    # only of a tier: its checkpoint is being made, and there is no engine yet
    PREPARING = "preparing"
    STARTING = "starting"  # process started, or URL not yet answering
    WARMING = "warming"  # /health answers; warm-up generations run
    READY = "ready"
    DRAINING = "draining"  # gets no new requests; open ones may finish
    UNREACHABLE = "unreachable"  # was alive; stopped answering probes
    FAILED = "failed"  # exited, or its warm-up failed
    # runs elsewhere; answers otherwise than before, hangs or is too slow; for an operator
    QUARANTINED = "quarantined"
    STOPPED = "stopped"
    # only of a tier: its engines run elsewhere, and none is known yet
    WAITING = "waiting"
    ABSENT = "absent"  # only of a tier: no engine of it is configured


@dataclass(frozen=True, slots=True)
class Draft:
    """What proposes tokens that an engine checks in one step (speculative decoding; Leviathan et al. 2023).

    Attributes:
        source: ``ngram``, which finds them in the prompt and the answer so far, a tier's name or a model folder.
        tokens: Proposed at a time.
        checkpoint: Folder of the draft model; None: there is none, or it is still to be made.
    """

    source: str
    tokens: int = 4
    checkpoint: Path | None = None

    @property
    def startable(self) -> bool:
        """Tell whether an engine can start with it."""
        return self.source == NGRAM or self.checkpoint is not None


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter (Hu et al. 2021): a small change of the model's weights, chosen by each request.

    Attributes:
        name: By which requests name it.
        path: Folder in the form of PEFT, where the engine runs.
    """

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class Adapters:
    """What an engine is started with for LoRA.

    Attributes:
        loaded: Adapters that it loads at its start.
        max_rank: Of any adapter.
        at_run_time: More may be loaded while it runs.
    """

    loaded: tuple[Adapter, ...] = ()
    max_rank: int = 16
    at_run_time: bool = False

    @property
    def enabled(self) -> bool:
        """Tell whether the engine needs LoRA at all: it costs memory and time."""
        return bool(self.loaded) or self.at_run_time


NO_ADAPTERS = Adapters()


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One tier as configured.

    Attributes:
        max_model_len: Prompt plus output tokens that the engine accepts.
        max_num_seqs: Sequences that the engine runs at the same time.
        max_in_flight: Slots of one replica: a request takes one for each of its answers; more requests wait, go elsewhere
            or are refused.
        urls: Engines that run elsewhere.
        named_by: What names further engines that run elsewhere while the router runs: a DNS name, a file.
        awaited: Whether one of these may be named at any time.
        replicas: Engines that are started here.
        checkpoint: Folder that those are started from; None: there are none, or it is still to be made.
        digest: Digest of the checkpoint's weights; None: unknown.
        precision: Number format of the weights that are served, for people: read from the checkpoint, or ``fp8 (stated)``,
            or ``unknown``; with that of the KV cache if it is quantized: ``fp8+kv-fp8``. Of replicas that differ, all, with
            commas.
        stated_precision: What the settings say about engines given by URL; None: nothing.
        gpus: CUDA devices for the engines started here, in the order in which they are taken; empty: chosen by the plan.
        tensor_parallel: GPUs that share each layer of one engine.
        pipeline_parallel: Stages into which the layers of one engine are divided.
        draft: For speculative decoding; None: one token a step.
        adapters: Names of the LoRA adapters that all its engines offer.
        held: Whether only requests get it that require it by name, until its loss is known (quality.gate = hold).
        expected_precision: Of the checkpoint that is still to be made; empty: none is, or it is the tier's usual one.
        prompt_identity: The same in tiers that make the same tokens of a request, if tiers may differ in that; None: all do.
    """

    name: TierName
    max_model_len: int
    max_num_seqs: int
    max_in_flight: int
    urls: tuple[str, ...] = ()
    named_by: tuple[str, ...] = ()
    awaited: bool = False
    checkpoint: Path | None = None
    digest: str | None = None
    precision: str = UNKNOWN
    stated_precision: str | None = None
    replicas: int = 1
    gpus: tuple[int, ...] = ()
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    draft: Draft | None = None
    adapters: tuple[str, ...] = ()
    held: bool = False
    expected_precision: str = ""
    prompt_identity: str | None = None

    @property
    def startable(self) -> bool:
        """Tell whether all that its engines are started from is there."""
        return self.checkpoint is not None and (
            self.draft is None or self.draft.startable
        )

    @property
    def absent(self) -> bool:
        """Tell whether no engine of it is configured, and none is awaited."""
        return not (self.urls or self.replicas or self.awaited)

    @property
    def world_size(self) -> int:
        """Return the number of GPUs that one engine takes."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def checkpoint_id(self) -> str | None:
        """Return the first digits of the checkpoint's digest; None: unknown."""
        return self.digest[:SHOWN_DIGITS] if self.digest else None

    @property
    def identity(self) -> str | None:
        """Return what identifies the tier's weights: their digest, else where they are or what names it; None: unknown."""
        if self.digest is not None:
            return self.digest
        folder = [str(self.checkpoint)] if self.checkpoint is not None else []
        return " ".join([*self.urls, *folder] or self.named_by) or None


@dataclass(frozen=True, slots=True)
class TemplateTokens:
    """Tokens that the chat template adds to the texts of a conversation. All tiers share one template.

    Attributes:
        alone: To a single user message.
        with_system: To a system and a user message.
        further_pair: To each further answer and user message.
    """

    alone: int = 0
    with_system: int = 0
    further_pair: int = 0

    def conversation(self, messages: int, *, system: bool) -> int:
        """Return the tokens added to this many messages, a system message included."""
        added, first = (self.with_system, 2) if system else (self.alone, 1)
        return added + -(-self.further_pair * max(messages - first, 0) // 2)


@dataclass(frozen=True, slots=True)
class EnginePlacement:
    """An engine's share of the machine.

    Attributes:
        cores: CPU cores that the engine's processes may use; empty: all.
        threads: OpenMP threads of the engine (CPU only).
        gpus: CUDA device indices; none for a CPU engine.
        gpu_memory_fraction: Share of each GPU's memory for weights and KV cache, 0..1.
        kv_cache_gib: KV cache of a CPU engine, in GiB; in quarters.
    """

    cores: tuple[int, ...] = ()
    threads: int = 1
    gpus: tuple[int, ...] = ()
    gpu_memory_fraction: float = 0.0
    kv_cache_gib: float = 1


@dataclass(frozen=True, slots=True)
class OtlpTarget:
    """Where engines send their spans. ``protocol`` is ``grpc`` or ``http/protobuf``."""

    endpoint: str
    protocol: str


@dataclass(frozen=True, slots=True)
class EngineLaunch:
    """All that an engine's command line and environment are made from.

    Attributes:
        extra_args: Of vLLM, as a person gave them; they come last, so that they win.
        env: Variables that a person gave; they win too.
        adapters: For LoRA.
    """

    tier: TierSpec
    placement: EnginePlacement
    python: Path
    served_model: str
    host: str
    port: int
    api_key: str
    otlp: OtlpTarget | None = None
    extra_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    adapters: Adapters = NO_ADAPTERS

    @property
    def url(self) -> str:
        """Return the engine's base URL."""
        return f"http://{self.host}:{self.port}"
