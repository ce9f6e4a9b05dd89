"""The schemes behind ``fast`` and ``balanced``, and which of them suits which hardware: ``schemes.toml``, checked.

A scheme is one way to get a number format: llm-compressor makes a checkpoint of it, or vLLM quantizes the 16-bit folder
while it loads ("online"), or nothing is done. Everything here is pure; ``tiers/this_hardware.py`` reads what this machine
has.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tiers.errors import SchemeError
from tiers.formats import FORMATS
from tiers.spec import TierName

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_Row = TypeVar("_Row", bound=BaseModel)
TABLE = Path(__file__).with_name("schemes.toml")
AUTO = "auto"  # the table chooses
UNQUANTIZED = "bf16"
# The tiers that a scheme is chosen for. ``precise`` has the weights as they are.
CHOSEN_TIERS = (TierName.FAST, TierName.BALANCED)
# What was made before there was a table: for GPUs that cannot be told apart.
USUAL = MappingProxyType({TierName.FAST: "awq-int4", TierName.BALANCED: "fp8"})
# As ``sources`` names them; the head of the table says what they are.
SOURCES = frozenset(
    {
        "llm-compressor",
        "transformer-engine",
        "vllm-fp8",
        "vllm-int8",
        "vllm-kernels",
        "model-optimizer-2015",
        "measured",
    }
)


class Method(StrEnum):
    """How a number format comes about."""

    LLM_COMPRESSOR = "llm-compressor"
    ONLINE = "online"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to serve a number format.

    Attributes:
        name: As settings have it. That of a made checkpoint is its number format's.
        number_format: A name of ``tiers.formats.FORMATS``.
        method: Who quantizes, and when.
        vllm_quantization: What vLLM's ``--quantization`` takes for it; empty: it is not online.
    """

    name: str
    number_format: str
    method: Method
    vllm_quantization: str = ""

    @property
    def is_online(self) -> bool:
        """Tell whether vLLM quantizes the 16-bit folder while it loads."""
        return self.method is Method.ONLINE

    @property
    def engine_args(self) -> tuple[str, ...]:
        """Return vLLM's arguments for it."""
        if not self.is_online:
            return ()
        return ("--quantization", self.vllm_quantization)


@dataclass(frozen=True, slots=True)
class CpuHardware:
    """A processor, by its flags as Linux shows them in ``/proc/cpuinfo``."""

    flags: frozenset[str]

    def __str__(self) -> str:
        """Return it for people."""
        for flag, name in (
            ("amx_tile", "AMX"),
            ("avx512f", "AVX-512"),
            ("avx2", "AVX2"),
        ):
            if flag in self.flags:
                return f"this CPU ({name})"
        return "this CPU"


@dataclass(frozen=True, slots=True)
class GpuHardware:
    """A GPU of NVIDIA; ``compute_capability`` is None where the driver does not tell it."""

    compute_capability: tuple[int, int] | None

    def __str__(self) -> str:
        """Return it for people."""
        if self.compute_capability is None:
            return "this GPU (compute capability not known)"
        major, minor = self.compute_capability
        return f"this GPU (compute capability {major}.{minor})"


@dataclass(frozen=True, slots=True)
class AmdHardware:
    """A GPU of AMD, by the name of its architecture, such as ``gfx942``."""

    architecture: str

    def __str__(self) -> str:
        """Return it for people."""
        return f"this GPU ({self.architecture})"


Hardware = CpuHardware | GpuHardware | AmdHardware


@dataclass(frozen=True, slots=True)
class HardwareClass:
    """One row of the table.

    Attributes:
        name: For people.
        compute_capabilities: Of NVIDIA's GPUs in this class.
        amd_architectures: Of AMD's.
        cpu_flags: What a CPU of this class has at least; None: it is a class of GPUs.
        schemes: For ``fast`` and ``balanced``.
        reasons: Why these, with ``{hardware}`` for the hardware's own name.
        native: Formats that its units multiply.
        served: Formats that vLLM serves there otherwise.
        sources: Where this comes from, by the names that the head of the table explains.
    """

    name: str
    compute_capabilities: tuple[tuple[int, int], ...]
    amd_architectures: tuple[str, ...]
    cpu_flags: frozenset[str] | None
    schemes: Mapping[TierName, Scheme]
    reasons: Mapping[TierName, str]
    native: tuple[str, ...]
    served: tuple[str, ...]
    sources: tuple[str, ...]

    def can_serve(self, number_format: str) -> bool:
        """Tell whether vLLM serves a format on this hardware, natively or otherwise."""
        return number_format in self.native or number_format in self.served


@dataclass(frozen=True, slots=True)
class SchemeTable:
    """The whole table, checked."""

    schemes: Mapping[str, Scheme]
    hardware: tuple[HardwareClass, ...]

    def class_of(self, hardware: Hardware) -> HardwareClass | None:
        """Return the row of a processor; None: the table has none.

        A GPU that no row names counts as the one of the next lower compute capability.
        """
        if isinstance(hardware, CpuHardware):
            return self._class_of_cpu(hardware)
        if isinstance(hardware, AmdHardware):
            return self._class_of_amd(hardware)
        if hardware.compute_capability is None:
            return None
        best: tuple[tuple[int, int], HardwareClass] | None = None
        for row in self.hardware:
            for capability in row.compute_capabilities:
                is_lower = capability <= hardware.compute_capability
                if is_lower and (best is None or capability > best[0]):
                    best = (capability, row)
        return None if best is None else best[1]

    def _class_of_cpu(self, hardware: CpuHardware) -> HardwareClass | None:
        for row in self.hardware:
            if row.cpu_flags is not None and row.cpu_flags <= hardware.flags:
                return row
        return None

    def _class_of_amd(self, hardware: AmdHardware) -> HardwareClass | None:
        for row in self.hardware:
            if hardware.architecture in row.amd_architectures:
                return row
        return None


@dataclass(frozen=True, slots=True)
class SchemeChoice:
    """The scheme of one tier, and why.

    Attributes:
        reason: For people, to follow "because"; empty: the settings name the scheme.
    """

    tier: TierName
    scheme: Scheme
    reason: str

    @property
    def is_usual(self) -> bool:
        """Tell whether it is what was made before there was a table."""
        return self.scheme.name == USUAL[self.tier]

    def __str__(self) -> str:
        """Return it for people, as in "fast: nvfp4, because this GPU (compute capability 10.0) computes it natively"."""
        shown = self.scheme.number_format
        if self.scheme.is_online:
            shown = f"{shown}, quantized while it loads"
        if not self.reason:
            return f"{self.tier}: {shown}, as tiers.{self.tier}.scheme says"
        return f"{self.tier}: {shown}, because {self.reason}"


def schemes_for(hardware: Hardware) -> Mapping[TierName, Scheme]:
    """Return the schemes of ``fast`` and ``balanced`` on some hardware."""
    choices = choose_schemes(hardware, {})
    return {tier: choice.scheme for tier, choice in choices.items()}


def choose_schemes(
    hardware: Hardware, named: Mapping[TierName, str]
) -> dict[TierName, SchemeChoice]:
    """Choose the schemes of ``fast`` and ``balanced``.

    Args:
        hardware: What engines run on.
        named: What the settings name, by tier; ``auto``, or no entry: the table chooses.

    Raises:
        SchemeError: There is no such scheme.
    """
    table = scheme_table()
    row = table.class_of(hardware)
    choices = {}
    for tier in CHOSEN_TIERS:
        name = named.get(tier, AUTO)
        if name != AUTO:
            choices[tier] = SchemeChoice(tier, scheme_named(name, tier), reason="")
        elif row is None:
            reason = f"the table of schemes has no row for {hardware}"
            choices[tier] = SchemeChoice(tier, table.schemes[USUAL[tier]], reason)
        else:
            reason = row.reasons[tier].format(hardware=hardware)
            choices[tier] = SchemeChoice(tier, row.schemes[tier], reason)
    return choices


def scheme_named(name: str, tier: TierName) -> Scheme:
    """Return the scheme that the settings name for a tier.

    Raises:
        SchemeError: There is none of that name.
    """
    scheme = scheme_table().schemes.get(name)
    if scheme is None or scheme.method is Method.NONE:
        raise SchemeError(
            f"tiers.{tier}.scheme is {name!r}: {AUTO}, {', '.join(scheme_names())} are allowed"
        )
    return scheme


def scheme_names() -> tuple[str, ...]:
    """Return the names that settings can have, ``auto`` apart."""
    return tuple(
        name
        for name, scheme in scheme_table().schemes.items()
        if scheme.method is not Method.NONE
    )


def what_can_be_served(hardware: Hardware) -> str:
    """Return the formats that vLLM serves on some hardware, for people; empty: the table does not know it."""
    row = scheme_table().class_of(hardware)
    if row is None:
        return ""
    words = f"{', '.join(row.native)} natively"
    if row.served:
        words = f"{words}; {', '.join(row.served)} otherwise"
    return words


@cache
def scheme_table() -> SchemeTable:
    """Return the table of this release."""
    return read_table(TABLE.read_text("utf-8"), TABLE.name)


# Reading and checking.


class _SchemeRow(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    number_format: str
    method: Method
    vllm_quantization: str = ""


class _HardwareRow(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1)
    compute_capabilities: tuple[str, ...] = ()
    amd_architectures: tuple[str, ...] = ()
    cpu_flags: tuple[str, ...] | None = None
    fast: str
    fast_because: str = Field(min_length=1)
    balanced: str
    balanced_because: str = Field(min_length=1)
    native: tuple[str, ...]
    served: tuple[str, ...]
    sources: tuple[str, ...] = Field(min_length=1)


def read_table(text: str, file_name: str) -> SchemeTable:
    """Read a table of schemes.

    Args:
        text: In TOML.
        file_name: For errors.

    Raises:
        SchemeError: It is no such table; the text names the row, the field, and what is allowed.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SchemeError(f"{file_name} is no TOML: {error}") from error
    unknown = sorted(document.keys() - {"scheme", "hardware"})
    if unknown:
        raise SchemeError(
            f"{file_name}: {unknown[0]}: only [[scheme]] and [[hardware]] are allowed"
        )
    schemes: dict[str, Scheme] = {}
    for number, row in enumerate(document.get("scheme", ()), 1):
        scheme = _scheme(row, f"{file_name}, scheme {number}")
        if scheme.name in schemes:
            raise SchemeError(
                f"{file_name}, scheme {number} ({scheme.name}): name: it is there already"
            )
        schemes[scheme.name] = scheme
    hardware = tuple(
        _hardware_class(row, schemes, f"{file_name}, hardware {number}")
        for number, row in enumerate(document.get("hardware", ()), 1)
    )
    _check_each_is_in_one_row(hardware, file_name)
    return SchemeTable(schemes=MappingProxyType(schemes), hardware=hardware)


def _scheme(source: Any, where: str) -> Scheme:
    """Return one scheme, checked."""
    row = _validated(_SchemeRow, source, where)
    where = f"{where} ({row.name})"
    _check_formats((row.number_format,), "number_format", where)
    is_online = row.method is Method.ONLINE
    if is_online != bool(row.vllm_quantization):
        raise SchemeError(
            f"{where}: vllm_quantization: a scheme with method online names what --quantization takes, others leave it out"
        )
    if not is_online and row.name != row.number_format:
        raise SchemeError(
            f"{where}: name: that of a checkpoint's scheme is its number format, {row.number_format}"
        )
    return Scheme(**row.model_dump())


def _hardware_class(
    source: Any, schemes: Mapping[str, Scheme], where: str
) -> HardwareClass:
    """Return one row of hardware, checked."""
    row = _validated(_HardwareRow, source, where)
    where = f"{where} ({row.name})"
    kinds = (row.compute_capabilities, row.amd_architectures, row.cpu_flags is not None)
    if sum(map(bool, kinds)) != 1:
        raise SchemeError(
            f"{where}: compute_capabilities, amd_architectures, cpu_flags: a row has one of them"
        )
    _check_formats(row.native, "native", where)
    _check_formats(row.served, "served", where)
    for name in row.sources:
        if name not in SOURCES:
            raise SchemeError(
                f"{where}: sources: {name!r} is not explained in the table's head; {', '.join(sorted(SOURCES))} are"
            )
    chosen = {
        tier: _chosen(getattr(row, tier), tier, schemes, where=where)
        for tier in CHOSEN_TIERS
    }
    hardware_class = HardwareClass(
        name=row.name,
        compute_capabilities=_capabilities(row.compute_capabilities, where),
        amd_architectures=row.amd_architectures,
        cpu_flags=None if row.cpu_flags is None else frozenset(row.cpu_flags),
        schemes=MappingProxyType(chosen),
        reasons=MappingProxyType(
            {tier: getattr(row, f"{tier}_because") for tier in CHOSEN_TIERS}
        ),
        native=row.native,
        served=row.served,
        sources=row.sources,
    )
    for tier, scheme in chosen.items():
        if not hardware_class.can_serve(scheme.number_format):
            raise SchemeError(
                f"{where}: {tier}: {scheme.number_format} is neither in native nor in served"
            )
    return hardware_class


def _chosen(
    name: str, tier: TierName, schemes: Mapping[str, Scheme], *, where: str
) -> Scheme:
    scheme = schemes.get(name)
    if scheme is None:
        raise SchemeError(
            f"{where}: {tier}: there is no scheme {name!r}; {', '.join(schemes)} are allowed"
        )
    return scheme


def _capabilities(texts: Sequence[str], where: str) -> tuple[tuple[int, int], ...]:
    capabilities = []
    for text in texts:
        capability = parse_capability(text)
        if capability is None:
            raise SchemeError(
                f"{where}: compute_capabilities: {text!r}: a text like 9.0 is allowed"
            )
        capabilities.append(capability)
    return tuple(capabilities)


def parse_capability(text: str) -> tuple[int, int] | None:
    """Return a compute capability from a text like ``9.0``; None: it is none."""
    major, _, minor = text.strip().partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        return None
    return int(major), int(minor)


def _check_formats(names: Iterable[str], field: str, where: str) -> None:
    for name in names:
        if name not in FORMATS:
            raise SchemeError(
                f"{where}: {field}: {name!r} is no number format; {', '.join(FORMATS)} are allowed"
            )


def _check_each_is_in_one_row(
    hardware: Sequence[HardwareClass], file_name: str
) -> None:
    """Check that no compute capability and no architecture is in two rows."""
    row_of: dict[object, str] = {}
    for row in hardware:
        for key in (*row.compute_capabilities, *row.amd_architectures):
            if key in row_of:
                raise SchemeError(
                    f"{file_name}: {row.name}: {key} is in the row {row_of[key]} already"
                )
            row_of[key] = row.name


def _validated(kind: type[_Row], source: Any, where: str) -> _Row:
    try:
        return kind.model_validate(source)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "row"
        raise SchemeError(f"{where}: {field}: {first['msg']}") from error
