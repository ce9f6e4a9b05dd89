"""Compare checkpoints of one model before anything is loaded: architecture, vocabulary, tokenizer, chat template.

Tiers must be one model, however it was quantized: a caller may be answered by any of them, and an answer that one begins
is continued by another from its token ids. Checkpoints that somebody else has quantized come with files that other
releases of libraries have written, so what is compared is what the files mean:

- sizes that a configuration leaves out are not compared, and neither is the quantization;
- ``tokenizer.json`` may write merges as texts or as pairs, leave out empty members, and pad or truncate by default, which
  engines do not ask for; ``padding_side`` and the like in ``tokenizer_config.json`` do not count either;
- chat templates are compared as parsed by Jinja: comments and white space that never reaches a prompt do not count. White
  space that does reach it counts: it makes other tokens.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tiers.checkpoints.checkpoint import chat_template
from tiers.errors import CheckpointError, ModelMismatchError
from tiers.spec import TierName

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from jinja2.parser import Parser

# Files that define a tokenizer; the first one that a folder has is compared, so that a folder with two is compared by one.
TOKENIZER_DEFINITIONS = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "tiktoken.model",
)
# Numbers in config.json that make another model if they differ.
_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "q_lora_rank",
    "kv_lora_rank",
)
# Steps of a tokenizer.json besides its vocabulary.
_STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
# Members of tokenizer_config.json that change the tokens of a prompt or the end of an answer.
_MARKS = ("bos_token", "eos_token", "add_bos_token", "add_eos_token")
_ADDED_TOKEN = (
    "content",
    "special",
    "normalized",
    "lstrip",
    "rstrip",
    "single_word",
)
DEFAULT_TEMPLATE = "default"
SHOWN_CHARS = 70
# A long line is shown from so many characters before the first one that differs.
CHARS_BEFORE = 30
SHOWN_DIFFERENCES = 4  # More of a tier are counted, not shown.
SHOWN_DIGITS = 12
HOW_TO_MEND = (
    "Name checkpoints that were made of one model (tiers.NAME.checkpoint, or --fast, --balanced and --precise of 'qarr up'; "
    "--model is what the other tiers are made of). If you mean it, say --allow-different, or model.allow_different = true: "
    "tiers that read prompts differently then do not continue each other's answers"
)


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """What a checkpoint's small files say of its model.

    Attributes:
        config: ``config.json``.
        tokenizer_name: The file that defines the tokenizer.
        tokenizer: Its definition, if it is ``tokenizer.json``; else None.
        tokenizer_digest: Digest of the definition.
        tokenizer_config: ``tokenizer_config.json``; empty: there is none.
        templates: Chat templates by name; a model's only one is ``default``.
    """

    config: Mapping[str, Any]
    tokenizer_name: str
    tokenizer: Mapping[str, Any] | None
    tokenizer_digest: str
    tokenizer_config: Mapping[str, Any]
    templates: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CheckpointDifference:
    """One thing in which a checkpoint differs from the one that it is compared with.

    Attributes:
        field: What differs, as its file names it.
        own: What the checkpoint has, for people.
        other: What the checkpoint has that it is compared with.
    """

    field: str
    own: str
    other: str


def read_files(folder: Path) -> CheckpointFiles:
    """Read what is compared of a checkpoint; no weights are read.

    Raises:
        CheckpointError: The folder holds no model, or a file of it cannot be read.
    """
    name = _tokenizer_name(folder)
    content = _content(folder / name)
    tokenizer: Mapping[str, Any] | None = None
    if name == "tokenizer.json":
        tokenizer = _simplified(_json(folder / name))
        content = json.dumps(tokenizer, sort_keys=True).encode()
    tokenizer_config: Mapping[str, Any] = {}
    if (folder / "tokenizer_config.json").is_file():
        tokenizer_config = _json(folder / "tokenizer_config.json")
    return CheckpointFiles(
        config=_json(folder / "config.json"),
        tokenizer_name=name,
        tokenizer=tokenizer,
        tokenizer_digest=hashlib.sha256(content).hexdigest(),
        tokenizer_config=tokenizer_config,
        templates=_templates(chat_template(folder)),
    )


def compare(
    own: CheckpointFiles, other: CheckpointFiles
) -> tuple[CheckpointDifference, ...]:
    """Return in what a checkpoint differs from another one so that they are not one model, the weightiest first."""
    return (
        *_compare_configs(own.config, other.config),
        *_compare_tokenizers(own, other),
        *_compare_templates(own.templates, other.templates),
    )


def check_alike(folders: Mapping[TierName, Path]) -> None:
    """Check that the checkpoints of all tiers are one model: that they read a prompt as the same tokens, and so on.

    Args:
        folders: The checkpoints by tier. The highest precision's, else the last one, is what the others are compared with.

    Raises:
        ModelMismatchError: Two tiers differ; the text says in what, and what to do.
        CheckpointError: A folder is no model's.
    """
    # Tiers that are made of one base have one folder until they are made.
    if len(set(folders.values())) <= 1:
        for folder in set(folders.values()):
            read_files(folder)
        return
    files = {tier: read_files(folder) for tier, folder in folders.items()}
    reference = TierName.PRECISE if TierName.PRECISE in files else list(files)[-1]
    lines = []
    for tier, own in files.items():
        differences = compare(own, files[reference])
        lines += [
            f"  {tier}: {difference.field} is {difference.own}; in {reference} it is {difference.other}"
            for difference in differences[:SHOWN_DIFFERENCES]
        ]
        if len(differences) > SHOWN_DIFFERENCES:
            lines.append(f"  {tier}: {len(differences) - SHOWN_DIFFERENCES} more")
    if lines:
        named = ", ".join(f"{tier} is {folder}" for tier, folder in folders.items())
        raise ModelMismatchError(
            "\n".join(
                [f"the tiers are not one model ({named}):", *lines, f"{HOW_TO_MEND}."]
            )
        )


def prompt_identity(files: CheckpointFiles) -> str:
    """Return what is the same of two checkpoints only if they make the same tokens of the same request."""
    marks = {name: _mark(files.tokenizer_config.get(name)) for name in _MARKS}
    templates = {name: _meaning(text) for name, text in files.templates.items()}
    parts = [files.tokenizer_digest, marks, templates]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


# Architecture.


def _compare_configs(
    own: Mapping[str, Any], other: Mapping[str, Any]
) -> Iterator[CheckpointDifference]:
    for name in ("architectures", "model_type"):
        yield from _compare_values(name, own.get(name), other.get(name))
    own_text = _text_part(own)
    other_text = _text_part(other)
    for name in _SIZES:
        yield from _compare_values(name, own_text.get(name), other_text.get(name))
    yield from _compare_values("rope_theta", _rope(own_text), _rope(other_text))


def _compare_values(
    name: str, own: object, other: object
) -> Iterator[CheckpointDifference]:
    """Yield a difference of two values; what one of the two leaves out is not known, and does not count."""
    if own is None or other is None or own == other:
        return
    yield CheckpointDifference(name, own=_shown(own), other=_shown(other))


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the part that reads and writes text."""
    text_config = config.get("text_config")
    return text_config if isinstance(text_config, dict) else config


def _rope(config: Mapping[str, Any]) -> object:
    """Return the base of the positions' frequencies, wherever a release of transformers writes it."""
    parameters = config.get("rope_parameters")
    if isinstance(parameters, dict) and "rope_theta" in parameters:
        return parameters["rope_theta"]
    return config.get("rope_theta")


# Tokenizer.


def _compare_tokenizers(
    own: CheckpointFiles, other: CheckpointFiles
) -> Iterator[CheckpointDifference]:
    if own.tokenizer_digest != other.tokenizer_digest:
        if own.tokenizer is None or other.tokenizer is None:
            yield CheckpointDifference(
                "tokenizer", own=_named_file(own), other=_named_file(other)
            )
        else:
            yield from _compare_definitions(own.tokenizer, other.tokenizer)
    for name in _MARKS:
        own_mark = _mark(own.tokenizer_config.get(name))
        other_mark = _mark(other.tokenizer_config.get(name))
        yield from _compare_values(name, own_mark, other_mark)


def _named_file(files: CheckpointFiles) -> str:
    return f"{files.tokenizer_name} with digest {files.tokenizer_digest[:SHOWN_DIGITS]}"


def _mark(token: object) -> object:
    """Return the text of a special token, which may be written as an object."""
    if isinstance(token, dict):
        return token.get("content")
    return token


def _compare_definitions(
    own: Mapping[str, Any], other: Mapping[str, Any]
) -> Iterator[CheckpointDifference]:
    own_model = own["model"]
    other_model = other["model"]
    yield from _compare_vocabularies(own_model.get("vocab"), other_model.get("vocab"))
    yield from _compare_lists("merges", own_model, other_model)
    for name in sorted(own_model.keys() | other_model.keys()):
        if name not in {"vocab", "merges"}:
            yield from _compare_shown(
                f"tokenizer model.{name}", own_model.get(name), other_model.get(name)
            )
    yield from _compare_added(own["added_tokens"], other["added_tokens"])
    for name in _STEPS:
        yield from _compare_shown(f"tokenizer {name}", own[name], other[name])


def _compare_shown(
    name: str, own: object, other: object
) -> Iterator[CheckpointDifference]:
    if own != other:
        yield CheckpointDifference(name, own=_shown(own), other=_shown(other))


def _compare_vocabularies(own: Any, other: Any) -> Iterator[CheckpointDifference]:
    if own == other:
        return
    if not isinstance(own, dict) or not isinstance(other, dict):
        yield CheckpointDifference(
            "the vocabulary", own=_counted(own), other=_counted(other)
        )
        return
    token = min(
        (
            token
            for token in own.keys() | other.keys()
            if own.get(token) != other.get(token)
        ),
        key=lambda token: (own.get(token, other.get(token)), token),
    )
    yield CheckpointDifference(
        "the vocabulary",
        own=f"{_counted(own)}, {_number_of(token, own)}",
        other=f"{_counted(other)}, {_number_of(token, other)}",
    )


def _counted(entries: Any) -> str:
    if isinstance(entries, (dict, list)):
        return f"{len(entries):,} entries"
    return _shown(entries)


def _number_of(token: str, vocabulary: Mapping[str, Any]) -> str:
    if token in vocabulary:
        return f"{token!r} is token {vocabulary[token]}"
    return f"{token!r} is none"


def _compare_lists(
    name: str, own: Mapping[str, Any], other: Mapping[str, Any]
) -> Iterator[CheckpointDifference]:
    own_entries = own.get(name) or []
    other_entries = other.get(name) or []
    if own_entries == other_entries:
        return
    place = _first_difference(own_entries, other_entries)
    yield CheckpointDifference(
        f"the list of {name}",
        own=f"{_counted(own_entries)}, number {place + 1} is {_entry(own_entries, place)}",
        other=f"{_counted(other_entries)}, number {place + 1} is {_entry(other_entries, place)}",
    )


def _entry(entries: Sequence[Any], place: int) -> str:
    return _shown(entries[place]) if place < len(entries) else "none"


def _compare_added(
    own: Mapping[str, Any], other: Mapping[str, Any]
) -> Iterator[CheckpointDifference]:
    """Yield the first added token that differs, which stands for all."""
    for token_id in sorted(own.keys() | other.keys(), key=int):
        if own.get(token_id) != other.get(token_id):
            yield CheckpointDifference(
                f"added token {token_id}",
                own=_shown(own.get(token_id)),
                other=_shown(other.get(token_id)),
            )
            return


def _simplified(definition: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a ``tokenizer.json`` means, written in one way."""
    model = definition.get("model") or {}
    # An empty member means the same as none; which one is written depends on the release.
    simplified_model = {
        name: value for name, value in model.items() if value not in (None, False, "")
    }
    merges = simplified_model.get("merges")
    if isinstance(merges, list):
        simplified_model["merges"] = [_merge(merge) for merge in merges]
    return {
        "model": simplified_model,
        "added_tokens": _added_tokens(definition.get("added_tokens")),
        **{name: definition.get(name) for name in _STEPS},
    }


def _merge(merge: Any) -> Any:
    """Return a merge as a pair: older releases write it as a text with a space between."""
    if isinstance(merge, str):
        return merge.split(" ")
    return merge


def _added_tokens(entries: Any) -> dict[str, Any]:
    """Return what counts of added tokens, by their ids."""
    added = {}
    for entry in entries or ():
        added[str(entry["id"])] = {
            name: entry.get(name) or False for name in _ADDED_TOKEN
        }
    return added


# Chat template.


def _compare_templates(
    own: Mapping[str, str], other: Mapping[str, str]
) -> Iterator[CheckpointDifference]:
    for name in sorted(own.keys() | other.keys()):
        field = f"the chat template {name!r}"
        if name == DEFAULT_TEMPLATE:
            field = "the chat template"
        if name not in own or name not in other:
            yield CheckpointDifference(
                field, own=_length(own.get(name)), other=_length(other.get(name))
            )
        elif _meaning(own[name]) != _meaning(other[name]):
            yield _template_difference(field, own[name], other[name])


def _length(template: str | None) -> str:
    if template is None:
        return "none"
    return f"{len(template)} characters long"


def _template_difference(field: str, own: str, other: str) -> CheckpointDifference:
    own_lines = own.splitlines()
    other_lines = other.splitlines()
    number = _first_difference(own_lines, other_lines)
    own_line = _line(own_lines, number)
    other_line = _line(other_lines, number)
    place = _first_difference(own_line or "", other_line or "")
    return CheckpointDifference(
        f"line {number + 1} of {field}",
        own=_from_before(own_line, place),
        other=_from_before(other_line, place),
    )


def _line(lines: Sequence[str], number: int) -> str | None:
    return lines[number] if number < len(lines) else None


def _from_before(line: str | None, place: int) -> str:
    """Return a line for people from shortly before a place on, in quotes, so that white space shows."""
    if line is None:
        return "none"
    start = max(place - CHARS_BEFORE, 0)
    quoted = _shown(json.dumps(line[start:], ensure_ascii=False))
    return f"... {quoted}" if start else quoted


@cache
def _meaning(template: str) -> str:
    """Return what is the same of two templates only if they write the same prompts, as far as their texts show it."""
    try:
        return repr(_parser().parse(template))
    except (TemplateError, RecursionError):
        # What Jinja cannot read here, vLLM may read by means of its own.
        return template


@cache
def _parser() -> ImmutableSandboxedEnvironment:
    """Return Jinja as transformers sets it up for chat templates (``utils/chat_template_utils.py``)."""
    return ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )


class _Generation(Extension):
    """The tag ``generation`` of transformers. It marks what a model has written and changes no prompt."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own form

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _templates(template: Any) -> dict[str, str]:
    """Return chat templates by name; ``tokenizer_config.json`` may have a text, or a list of several with names."""
    if isinstance(template, list):
        return {str(entry["name"]): str(entry["template"]) for entry in template}
    return {DEFAULT_TEMPLATE: str(template)} if template else {}


# Files and texts.


def _tokenizer_name(folder: Path) -> str:
    for name in TOKENIZER_DEFINITIONS:
        if (folder / name).is_file():
            return name
    raise CheckpointError(
        f"{folder} has none of {', '.join(TOKENIZER_DEFINITIONS)}: not a model folder"
    )


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): a model folder needs it"
        ) from error


def _json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(_content(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not JSON ({error}): copy the model anew"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must be a JSON object: copy the model anew")
    return content


def _shown(value: object) -> str:
    """Return a value for people, cut to a length that fits in a line."""
    if value is None:
        return "none"
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) > SHOWN_CHARS:
        return f"{text[:SHOWN_CHARS]} ..."
    return text


def _first_difference(own: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the first place where two sequences differ: the end of the shorter one if there is none before."""
    for place, (entry, other_entry) in enumerate(zip(own, other, strict=False)):
        if entry != other_entry:
            return place
    return min(len(own), len(other))
