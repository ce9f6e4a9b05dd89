"""Checkpoints of one model, and of others: what is compared before anything is loaded, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.made_checkpoints import model
from tiers.checkpoints.compare import (
    check_alike,
    compare,
    prompt_identity,
    read_files,
)
from tiers.errors import CheckpointError, ModelMismatchError
from tiers.spec import STANDARD_TIERS

FAST, BALANCED, PRECISE = STANDARD_TIERS
PUBLISHED = Path(__file__).parents[2] / "data" / "checkpoints_published"
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_experts": 128,
    "vocab_size": 151936,
    "rope_theta": 1000000.0,
}
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {"id": 3, "content": "<|im_end|>", "special": True, "normalized": False}
    ],
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
    "post_processor": None,
    "decoder": {"type": "ByteLevel"},
    "model": {
        "type": "BPE",
        "dropout": None,
        "byte_fallback": False,
        "vocab": {"a": 0, "b": 1, "ab": 2},
        "merges": ["a b"],
    },
}
TOKENIZER_CONFIG: dict[str, Any] = {
    "eos_token": "<|im_end|>",
    "add_bos_token": False,
    "model_max_length": 131072,
}
TEMPLATE = """{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
"""


def checkpoint(
    folder: Path,
    *,
    config: dict[str, Any] | None = None,
    tokenizer: dict[str, Any] | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    template: str = TEMPLATE,
) -> Path:
    """Write the small files of a checkpoint; what is given is written over what the usual one has."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    (folder / "tokenizer.json").write_text(
        json.dumps({**TOKENIZER, **(tokenizer or {})})
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**TOKENIZER_CONFIG, **(tokenizer_config or {})})
    )
    (folder / "chat_template.jinja").write_text(template)
    return folder


def bpe(**changes: Any) -> dict[str, Any]:
    return {"model": {**TOKENIZER["model"], **changes}}


def said(own: Path, other: Path) -> list[tuple[str, str, str]]:
    differences = compare(read_files(own), read_files(other))
    return [(found.field, found.own, found.other) for found in differences]


SAME = {
    "quantized": {
        "config": {"quantization_config": {"quant_method": "modelopt"}, "dtype": "x"}
    },
    "transformers 5": {
        "config": {
            "rope_theta": None,
            "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        }
    },
    "a size that is left out": {"config": {"num_experts": None}},
    "padding": {
        "tokenizer": {"padding": {"pad_id": 3}, "truncation": {"max_length": 512}},
        "tokenizer_config": {"padding_side": "left", "model_max_length": 512},
    },
    "merges as pairs": {"tokenizer": bpe(merges=[["a", "b"]])},
    "empty members": {
        "tokenizer": bpe(ignore_merges=False, unk_token=None, fuse_unk=False)
    },
    "a token as an object": {
        "tokenizer_config": {"eos_token": {"content": "<|im_end|>", "lstrip": False}}
    },
    "comments in the template": {"template": "{# of Qwen #}" + TEMPLATE},
    "white space within tags": {
        "template": TEMPLATE.replace("{%- if ", "{%-   if ").replace(
            "message.content +", "message.content  + "
        )
    },
    "indentation that no prompt has": {"template": TEMPLATE.replace("    {%-", "{%-")},
    "no newline at the end": {"template": TEMPLATE.rstrip("\n")},
    "what the model writes is marked": {
        "template": TEMPLATE.replace(
            "{{-", "{%- generation %}{{-"
        ).replace("{%- endif", "{%- endgeneration %}\n    {%- endif")
    },
}  # fmt: skip


@pytest.mark.parametrize("changes", SAME.values(), ids=SAME)
def test_what_changes_no_token_does_not_count(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Files that another release has written, or a quantizer has changed, are those of the same model."""
    own = checkpoint(tmp_path / "own", **changes)
    other = checkpoint(tmp_path / "other")
    assert said(own, other) == []
    assert said(other, own) == []
    check_alike({FAST: own, PRECISE: other})
    assert prompt_identity(read_files(own)) == prompt_identity(read_files(other))


DIFFERENT = {
    "architecture": (
        {"config": {"architectures": ["Qwen3ForCausalLM"]}},
        ("architectures", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
    ),
    "layers": (
        {"config": {"num_hidden_layers": 36}},
        ("num_hidden_layers", "36", "48"),
    ),
    "positions": (
        {"config": {"rope_theta": 1e7}},
        ("rope_theta", "10000000.0", "1000000.0"),
    ),
    "vocabulary": (
        {"tokenizer": bpe(vocab={"a": 0, "b": 1, "ab": 2, "c": 4})},
        ("the vocabulary", "4 entries, 'c' is token 4", "3 entries, 'c' is none"),
    ),
    "number of a token": (
        {"tokenizer": bpe(vocab={"a": 1, "b": 0, "ab": 2})},
        (
            "the vocabulary",
            "3 entries, 'b' is token 0",
            "3 entries, 'b' is token 1",
        ),
    ),
    "merges": (
        {"tokenizer": bpe(merges=[])},
        (
            "the list of merges",
            "0 entries, number 1 is none",
            '1 entries, number 1 is ["a", "b"]',
        ),
    ),
    "added token": (
        {"tokenizer": {"added_tokens": []}},
        (
            "added token 3",
            "none",
            '{"content": "<|im_end|>", "special": true, "normalized": false, "lstri ...',
        ),
    ),
    "normalizer": (
        {"tokenizer": {"normalizer": None}},
        ("tokenizer normalizer", "none", '{"type": "NFC"}'),
    ),
    "end of answers": (
        {"tokenizer_config": {"eos_token": "<|endoftext|>"}},
        ("eos_token", "<|endoftext|>", "<|im_end|>"),
    ),
    "first token": (
        {"tokenizer_config": {"add_bos_token": True}},
        ("add_bos_token", "true", "false"),
    ),
    "words of the template": (
        {"template": TEMPLATE.replace("im_start", "start")},
        (
            "line 3 of the chat template",
            "\"        {{- '<|start|>user\"",
            "\"        {{- '<|im_start|>user\"",
        ),
    ),
    "white space in prompts": (
        {"template": TEMPLATE.replace("user\n'", "user \n'")},
        (
            "line 3 of the chat template",
            "\"        {{- '<|im_start|>user \"",
            "\"        {{- '<|im_start|>user\"",
        ),
    ),
    "no template": ({"template": ""}, ("the chat template", "none", "168 characters long")),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "difference"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_makes_another_model_is_said_with_both_values(
    tmp_path: Path, changes: dict[str, Any], difference: tuple[str, str, str]
) -> None:
    own = checkpoint(tmp_path / "own", **changes)
    other = checkpoint(tmp_path / "other")
    assert said(own, other) == [difference]
    with pytest.raises(ModelMismatchError) as caught:
        check_alike({FAST: own, PRECISE: other})
    field, own_value, other_value = difference
    assert f"  fast: {field} is {own_value}; in precise it is {other_value}" in str(
        caught.value
    )


def test_the_text_part_of_a_model_that_sees_is_compared(tmp_path: Path) -> None:
    text = {"hidden_size": 2048, "num_hidden_layers": 36}
    own = checkpoint(tmp_path / "own", config={"text_config": text})
    other = checkpoint(
        tmp_path / "other", config={"text_config": {**text, "num_hidden_layers": 28}}
    )
    assert said(own, other) == [("num_hidden_layers", "36", "28")]


def test_only_what_changes_tokens_tells_who_may_continue_whom(tmp_path: Path) -> None:
    """Another size makes another model, which reads the same prompts; another template does not."""
    base = checkpoint(tmp_path / "base")
    smaller = checkpoint(tmp_path / "smaller", config={"hidden_size": 1024})
    reworded = checkpoint(tmp_path / "reworded", template="{{ messages }}")
    identities = [
        prompt_identity(read_files(path)) for path in (base, smaller, reworded)
    ]
    assert identities[0] == identities[1]
    assert identities[0] != identities[2]


def test_an_error_names_folders_tiers_and_what_to_do(tmp_path: Path) -> None:
    """All tiers that differ, each with the differences that fit on the screen."""
    precise = checkpoint(tmp_path / "precise")
    small = dict.fromkeys(
        ("hidden_size", "num_hidden_layers", "num_experts", "vocab_size"), 8
    )
    fast = checkpoint(tmp_path / "fast", config={**small, "rope_theta": 1.0})
    balanced = checkpoint(tmp_path / "balanced", template="{{ messages }}")
    with pytest.raises(ModelMismatchError) as caught:
        check_alike({FAST: fast, BALANCED: balanced, PRECISE: precise})
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        f"the tiers are not one model (fast is {fast}, balanced is {balanced}, precise is {precise}):"
    )
    assert [line.split(":")[0].strip() for line in lines[1:-1]] == ["fast"] * 5 + [
        "balanced"
    ]
    assert lines[5] == "  fast: 1 more"
    assert "--allow-different, or model.allow_different = true" in lines[-1]


def test_without_precise_the_last_tier_is_compared_with(tmp_path: Path) -> None:
    fast = checkpoint(tmp_path / "fast", config={"hidden_size": 1})
    balanced = checkpoint(tmp_path / "balanced")
    with pytest.raises(
        ModelMismatchError, match="fast: hidden_size is 1; in balanced it is 2048"
    ):
        check_alike({FAST: fast, BALANCED: balanced})
    check_alike({FAST: fast, BALANCED: fast})
    check_alike({})


def test_other_tokenizers_than_json_are_compared_as_files(tmp_path: Path) -> None:
    """A sentencepiece model, for one; against a tokenizer.json nothing can be told."""
    paths = []
    for name, content in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        path = checkpoint(tmp_path / name)
        (path / "tokenizer.json").rename(path / "tokenizer.model")
        (path / "tokenizer.model").write_bytes(content)
        paths.append(path)
    same, as_same, other = paths
    assert said(same, as_same) == []
    ((field, own_file, _),) = said(same, other)
    assert field == "tokenizer"
    assert own_file.startswith("tokenizer.model with digest ")
    assert said(same, checkpoint(tmp_path / "json"))[0][0] == "tokenizer"


def test_templates_with_names_are_compared_each(tmp_path: Path) -> None:
    paths = []
    for name, tool_template in (("a", "{{ tools }}"), ("b", "{{ messages }}")):
        path = checkpoint(tmp_path / name)
        (path / "chat_template.jinja").unlink()
        templates = [
            {"name": "default", "template": TEMPLATE},
            {"name": "tool_use", "template": tool_template},
        ]
        (path / "tokenizer_config.json").write_text(
            json.dumps({"chat_template": templates})
        )
        paths.append(path)
    assert [field for field, _, _ in said(*paths)] == [
        "line 1 of the chat template 'tool_use'"
    ]


def test_a_template_that_cannot_be_parsed_is_compared_as_a_text(tmp_path: Path) -> None:
    own = checkpoint(tmp_path / "own", template="{% unknown %}")
    other = checkpoint(tmp_path / "other", template="{% unknown %} ")
    assert len(said(own, other)) == 1
    assert said(own, own) == []


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", None, "not a model folder"),
        ("tokenizer.json", "{", "is not JSON"),
        ("config.json", None, "cannot be read"),
        ("config.json", "[]", "must be a JSON object"),
        ("tokenizer_config.json", "[1", "is not JSON"),
    ],
)
def test_a_folder_that_is_no_models_is_named(
    tmp_path: Path, file: str, content: str | None, words: str
) -> None:
    folder = checkpoint(tmp_path / "own")
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    with pytest.raises(CheckpointError, match=f"{folder}.*{words}"):
        check_alike({FAST: folder})


def test_a_base_and_what_is_made_of_it_are_alike(tmp_path: Path) -> None:
    """Key order and white space do not count, content does."""
    left = model(tmp_path / "a")
    right = model(tmp_path / "b")
    (right / "tokenizer.json").write_text('{"version":"1",  "model":{"vocab":1}}')
    check_alike({FAST: left, PRECISE: right})
    with pytest.raises(
        ModelMismatchError, match="the vocabulary is 2; in precise it is 1"
    ):
        check_alike({FAST: model(tmp_path / "c", vocabulary=2), PRECISE: right})


@pytest.mark.parametrize(
    ("own", "other", "fields"),
    [
        ("qwen3-30b-a3b-fp8", "qwen3-30b-a3b", []),
        ("gemma-4-26b-a4b-nvfp4", "gemma-4-26b-a4b", []),
        ("gpt-oss-20b", "gpt-oss-120b", ["num_hidden_layers", "num_local_experts"]),
        ("deepseek-v3.1-nvfp4", "deepseek-v3.2", ["architectures", "model_type"]),
    ],
)
def test_published_checkpoints_are_told_apart_by_their_configurations(
    tmp_path: Path, own: str, other: str, fields: list[str]
) -> None:
    """What makers and quantizers wrote: the same model in another format, and models of one family."""
    folders = []
    for name in (own, other):
        folder = checkpoint(tmp_path / name)
        published = json.loads((PUBLISHED / f"{name}.json").read_bytes())
        (folder / "config.json").write_text(json.dumps(published["config"]))
        folders.append(folder)
    assert [field for field, _, _ in said(*folders)] == fields
