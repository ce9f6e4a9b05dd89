"""Read the GPUs that a person names: ``2xH100``, one that is not known with the figures of its data sheet, or a file.

``2xNAME:96GB,1792GB/s,500TF`` gives memory, memory bandwidth and dense BF16 throughput; ``fp8=1000TF,fp4=2000TF`` that of
lower formats, ``capability=12.0`` the GPU's compute capability. A TOML file has the same fields, in a table for each kind of
GPU. If the kind is known, the fields that are given replace the known ones.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiers.errors import PlanError
from tiers.sizing.hardware import GpuKind, known_gpus, plain_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

GIB_IN_GB = (1 << 30) / 1e9
MAX_GPUS_OF_A_KIND = 100_000
_COUNTED = re.compile(
    r"\s*(?:(\d+)\s*[x*]\s*|(\d{1,3})\s+(?=[a-z]))?(\S.*?)\s*", re.IGNORECASE
)
_COUNT_LAST = re.compile(r"(.*\S)\s*[x*]\s*(\d+)", re.IGNORECASE)
_BEGINS_A_KIND = re.compile(r"\s*\d+\s*[x*]|\s*[a-z][^=:]*(:|$)", re.IGNORECASE)
_NAME = re.compile(r"\w[\w .+/()-]{0,63}")
_VALUE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(\S*)")
_FORM = "NAME:96GB,1792GB/s,500TF"
_WHERE_TO_LOOK = (
    "The maker's data sheet has the figures, of one GPU:\n"
    '  96GB      "GPU memory"\n'
    '  1792GB/s  "Memory bandwidth"\n'
    '  500TF     "BF16 Tensor Core" or "Peak bfloat16", with FP32 accumulate; half of a figure "with sparsity"\n'
    '  fp8=...   "FP8 Tensor Core", likewise, where there is such a line; left out: FP8 is computed in BF16\n'
    '  fp4=...   "FP4 Tensor Core", likewise; left out: FP4 is computed in BF16\n'
    '  int8=...  "INT8 Tensor Core", likewise, in TOPS; left out: INT8 is computed in BF16\n'
    "  price=... what one costs an hour, if you know"
)


@dataclass(frozen=True, slots=True)
class _Figure:
    """A figure that may be given for a GPU.

    Attributes:
        attribute: The name of the attribute of ``GpuKind``.
        units: How many of the attribute's unit each unit is; the first one is meant where none is written.
        least: The smallest value that is allowed, in the attribute's unit.
        most: The largest value that is allowed, in the attribute's unit.
        example: As a person writes it.
    """

    attribute: str
    units: Mapping[str, float]
    least: float
    most: float
    example: str


_MEMORY = {"gb": 1.0, "gib": GIB_IN_GB, "tb": 1000.0}
_BANDWIDTH = {"gb/s": 1.0, "gbps": 1.0, "tb/s": 1000.0, "tbps": 1000.0}
_FLOPS = {
    "tf": 1.0,
    "tflops": 1.0,
    "tflop/s": 1.0,
    "tflops/s": 1.0,
    "pf": 1000.0,
    "pflops": 1000.0,
    "pflop/s": 1000.0,
}
_TOPS = {"tops": 1.0, "top/s": 1.0, "t": 1.0, "tf": 1.0, "pops": 1000.0}
_HOUR = {"/h": 1.0, "/hour": 1.0}
_NO_UNIT = {"": 1.0}
FIELDS: dict[str, _Figure] = {
    "memory": _Figure("memory_gb", _MEMORY, least=1, most=10_000, example="96GB"),
    "bandwidth": _Figure(
        "bandwidth_gb_s", _BANDWIDTH, least=10, most=100_000, example="1792GB/s"
    ),
    "bf16": _Figure("bf16_tflops", _FLOPS, least=1, most=100_000, example="500TF"),
    "fp8": _Figure("fp8_tflops", _FLOPS, least=1, most=100_000, example="1000TF"),
    "fp4": _Figure("fp4_tflops", _FLOPS, least=1, most=200_000, example="2000TF"),
    "int8": _Figure("int8_tops", _TOPS, least=1, most=100_000, example="1000TOPS"),
    "int4": _Figure("int4_tops", _TOPS, least=1, most=200_000, example="2000TOPS"),
    "capability": _Figure(
        "compute_capability", _NO_UNIT, least=3, most=30, example="12.0"
    ),
    "price": _Figure("price_per_hour", _HOUR, least=0, most=10_000, example="1.9"),
}
REQUIRED = ("memory", "bandwidth", "bf16")
_FIELDS_ALLOWED = (
    "allowed are 96GB, 1792GB/s, 500TF, fp8=1000TF, fp4=2000TF, int8=1000TOPS, int4=2000TOPS, capability=12.0 and "
    "price=1.9"
)


def parse_gpus(text: str) -> tuple[GpuKind, int | None]:
    """Read a kind of GPU, and how many there are, as in ``2xH100``; without a number, as many as are needed.

    Raises:
        PlanError: The kind is not known and its figures are not given, a figure is wrong, or the number is 0.
    """
    counted_name, colon, written_figures = text.partition(":")
    count, name = _count_and_name(counted_name)
    where = f"--gpus {text}"
    values: dict[str, float] = {}
    if colon:
        for written in written_figures.split(","):
            field, value = _field_and_value(written, where)
            if field in values:
                raise PlanError(f"{where}: {field} is given twice; {_FIELDS_ALLOWED}")
            values[field] = value
    return _make_kind(name, values, where), count


def parse_all_gpus(text: str) -> dict[GpuKind, int | None]:
    """Read several kinds of GPU, as in ``2xA100,4xL4``, or the name of a TOML file that has them.

    Raises:
        PlanError: One cannot be read, or is named twice.
    """
    where = f"--gpus {text}"
    if Path(text).suffix == ".toml":
        return _without_repetition(_read_file(Path(text)), where)
    kinds = (parse_gpus(kind) for kind in _split_kinds(text))
    return _without_repetition(kinds, where)


def is_as_built_in(kind: GpuKind) -> bool:
    """Tell whether a kind of GPU is one of the known ones, with the figures that are known; prices do not count."""
    return kind.model_copy(update={"price_per_hour": None}) in known_gpus()


def given_figures(kind: GpuKind) -> str:
    """Return, for people, the figures of a kind of GPU that were given, and what is assumed of those that were not."""
    text = (
        f"{kind.name} {_origin_words(kind)}: {kind.memory_gb:,g} GB, {kind.bandwidth_gb_s:,g} GB/s, "
        f"{kind.bf16_tflops:,g} TFLOP/s in BF16"
    )
    if kind.fp8_tflops is not None:
        text += f", {kind.fp8_tflops:,g} in FP8"
    if kind.fp4_tflops is not None:
        text += f", {kind.fp4_tflops:,g} in FP4"
    if kind.int8_tops is not None:
        text += f", {kind.int8_tops:,g} TOP/s in INT8"
    if kind.fp8_tflops is None:
        text += (
            "; no throughput in FP8, so FP8 weights are computed in BF16, as on GPUs without FP8 units: if its data sheet "
            "has a line for FP8, add fp8=..."
        )
    if kind.fp4_tflops is None:
        text += (
            "; no throughput in FP4, so weights in FP4 are computed in BF16: if its data sheet has a line for FP4, add "
            "fp4=..."
        )
    text += "; integer 4-bit weights are computed in BF16 by every planned engine"
    if kind.int4_tops is not None:
        text += ", so int4 is not in the plan"
    return text


def _origin_words(kind: GpuKind) -> str:
    if any(gpu.is_called(kind.name) for gpu in known_gpus()):
        return "with other figures than those built in"
    return "as given"


def unknown_gpu(name: str) -> str:
    """Return, for people, which GPUs are known, those with similar names first, and how one that is not is given."""
    most_similar_first = sorted(
        known_gpus(), key=lambda kind: _likeness(kind, name), reverse=True
    )
    known_names = ", ".join(kind.name for kind in most_similar_first)
    example = _FORM.replace("NAME", plain_for_text(name) or "NAME")
    return (
        f"{name.strip() or 'an empty name'} is no GPU that is known here.\n{_count_hint(name)}"
        f"Known are, most similar first: {known_names}.\n"
        f"Any other takes its own figures in place of these, or a TOML file with them: --gpus '2x{example}'\n"
        f"{_WHERE_TO_LOOK}"
    )


def _count_hint(name: str) -> str:
    """Return a line for a name that ends with a number of GPUs; empty: it does not."""
    match = _COUNT_LAST.fullmatch(name)
    if match is None:
        return ""
    return f"Write {match[2]}x{match[1]} for {match[2]} of them.\n"


def plain_for_text(name: str) -> str:
    """Return a name in the form that ``--gpus`` takes: without spaces, commas and colons."""
    return re.sub(r"[\s,:]+", "-", name.strip()).strip("-")


def _split_kinds(text: str) -> list[str]:
    """Divide a text at the commas between kinds of GPU, but not at those between the figures of one GPU."""
    kinds = [""]
    for part in text.split(","):
        has_figures = ":" in kinds[-1]
        if not kinds[-1]:
            kinds[-1] = part
        elif not has_figures or _BEGINS_A_KIND.match(part):
            kinds.append(part)
        else:
            kinds[-1] = f"{kinds[-1]},{part}"
    return kinds


def _count_and_name(text: str) -> tuple[int | None, str]:
    match = _COUNTED.fullmatch(text)
    if match is None:
        return None, text.strip()
    count = match[1] or match[2]
    name = match[3]
    if not count:
        return None, name
    return _checked_count(int(count), f"--gpus {text}"), name


def _checked_count(count: int, where: str) -> int:
    if not 1 <= count <= MAX_GPUS_OF_A_KIND:
        raise PlanError(
            f"{where}: the number of GPUs must be from 1 to {MAX_GPUS_OF_A_KIND:,}; leave it out for as many as are needed"
        )
    return count


def _field_and_value(written: str, where: str) -> tuple[str, float]:
    """Read one figure, whose field is named or follows from its unit."""
    name, equals, value = written.partition("=")
    if equals:
        field = name.strip().lower()
        if field not in FIELDS:
            raise PlanError(f"{where}: there is no figure {field}; {_FIELDS_ALLOWED}")
        return field, _value(field, value, where)
    figure = written.strip()
    match = _VALUE.fullmatch(figure)
    unit = match[2].lower() if match else ""
    for field in REQUIRED:
        if unit in FIELDS[field].units:
            return field, _value(field, written, where)
    if figure.isdecimal():
        raise PlanError(
            f"{where}: {figure} has no unit; {_FIELDS_ALLOWED}. Write 2xH100 for two GPUs"
        )
    raise PlanError(
        f"{where}: {figure or 'an empty figure'} cannot be read; {_FIELDS_ALLOWED}"
    )


def _value(field: str, written: str, where: str) -> float:
    """Return a figure in the unit of its attribute.

    Raises:
        PlanError: It cannot be read, or is not allowed.
    """
    figure = FIELDS[field]
    number_and_unit = written.strip()
    match = _VALUE.fullmatch(number_and_unit)
    factor = None
    if match is not None:
        without_unit = None if match[2] else 1.0
        factor = figure.units.get(match[2].lower(), without_unit)
    if match is None or factor is None:
        raise PlanError(
            f"{where}: {field} is {number_and_unit or 'empty'}; a value like {figure.example} is allowed"
        )
    value = float(match[1]) * factor
    if not figure.least <= value <= figure.most:
        unit = next(iter(figure.units)).upper()
        allowed = f"{figure.least:,g} to {figure.most:,g} {unit}".rstrip()
        hint = ": is the unit right?" if unit else ""
        raise PlanError(
            f"{where}: {field} is {number_and_unit}; {allowed} is allowed{hint}"
        )
    return value


def _make_kind(name: str, values: Mapping[str, float], where: str) -> GpuKind:
    """Return a known kind with the figures that are given, or one that is made of figures alone."""
    figures: dict[str, Any] = {
        FIELDS[field].attribute: value for field, value in values.items()
    }
    if "capability" in values:
        figures["compute_capability"] = _capability(values["capability"])
    known = next((gpu for gpu in known_gpus() if gpu.is_called(name)), None)
    if known is not None:
        kind = known.model_copy(update=figures)
    else:
        _check_unknown_kind(name, values, where)
        kind = GpuKind(name=name, **figures)
    lower_formats = {"fp8": kind.fp8_tflops, "fp4": kind.fp4_tflops}
    for field, tflops in lower_formats.items():
        if tflops is not None and tflops < kind.bf16_tflops:
            raise PlanError(
                f"{where}: {field} is {tflops:g}TF, less than bf16's {kind.bf16_tflops:g}TF; as much or more is allowed. "
                f"Leave it out for a GPU without {field.upper()} units"
            )
    return kind


def _capability(number: float) -> tuple[int, int]:
    """Return a compute capability as its makers count it: 12.1 is 12 and 1."""
    major = int(number)
    return major, round(10 * (number - major))


def _check_unknown_kind(name: str, values: Mapping[str, float], where: str) -> None:
    """Check that a GPU that is not known has a usable name, and all figures that are needed.

    Raises:
        PlanError: It does not.
    """
    if not values or not plain_name(name):
        raise PlanError(f"{where}: {unknown_gpu(name)}")
    if not _NAME.fullmatch(name):
        raise PlanError(
            f"{where}: a GPU's name of up to 64 letters, digits, spaces and .+/()- is allowed"
        )
    missing = [field for field in REQUIRED if field not in values]
    if missing:
        examples = ", ".join(f"{field} as {FIELDS[field].example}" for field in missing)
        raise PlanError(
            f"{where}: {name} is not known here, and lacks {examples}.\n{_WHERE_TO_LOOK}"
        )


def _read_file(path: Path) -> list[tuple[GpuKind, int | None]]:
    """Read a TOML file with a table for each kind of GPU."""
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise PlanError(
            f"--gpus {path}: the file cannot be read: {error.strerror}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"--gpus {path}: not TOML: {error}") from error
    if not tables:
        raise PlanError(f"--gpus {path}: it names no GPU; {_file_form()}")
    return [_kind_of_table(name, table, path) for name, table in tables.items()]


def _kind_of_table(name: str, table: object, path: Path) -> tuple[GpuKind, int | None]:
    """Read the table of one kind of GPU."""
    if not isinstance(table, dict):
        raise PlanError(
            f"{path}: {name}: a table for each kind of GPU is needed; {_file_form()}"
        )
    where = f"{path}: [{name}]"
    count: int | None = None
    values: dict[str, float] = {}
    for key, written in table.items():
        if key == "count":
            count = _count_in_table(written, where)
        else:
            values[key] = _value_in_table(key, written, where)
    return _make_kind(name, values, where), count


def _count_in_table(written: object, where: str) -> int:
    if not isinstance(written, int) or isinstance(written, bool):
        raise PlanError(f"{where}: count is {written!r}; a whole number is allowed")
    return _checked_count(written, where)


def _value_in_table(field: str, written: object, where: str) -> float:
    if field not in FIELDS:
        raise PlanError(
            f"{where}: there is no field {field}; allowed are count, {', '.join(FIELDS)}"
        )
    is_number = isinstance(written, int | float) and not isinstance(written, bool)
    if not is_number and not isinstance(written, str):
        raise PlanError(
            f'{where}: {field} is {written!r}; "{FIELDS[field].example}" is allowed'
        )
    return _value(field, str(written), where)


def _file_form() -> str:
    return 'it has the form [NAME] count = 2, memory = "96GB", bandwidth = "1792GB/s", bf16 = "500TF", each on its own line'


def _without_repetition(
    kinds: Iterable[tuple[GpuKind, int | None]], where: str
) -> dict[GpuKind, int | None]:
    """Return the number of each kind of GPU.

    Raises:
        PlanError: A kind is named twice.
    """
    counts: dict[GpuKind, int | None] = {}
    for kind, count in kinds:
        if any(earlier_kind.is_called(kind.name) for earlier_kind in counts):
            raise PlanError(
                f"{where}: {kind.name} is named twice; write how many there are in all"
            )
        counts[kind] = count
    return counts


def _likeness(kind: GpuKind, name: str) -> float:
    """Return how similar a name is to one of a kind of GPU, 0..1."""
    wanted = plain_name(name)
    likeness = 0.0
    for known_name in (kind.name, *kind.also):
        matcher = SequenceMatcher(None, wanted, plain_name(known_name))
        likeness = max(likeness, matcher.ratio())
    return likeness
