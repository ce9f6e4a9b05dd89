# ruff: noqa: RUF001
"""The parsers of tool calls and reasoning that an engine gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiers.checkpoints.parsers import STRICT, parser_args

# What the published templates of these families say of calls and of reasoning.
FAMILIES = {
    "SmolLM2": ("<|im_start|>assistant\n", "hermes", None),
    "Qwen2.5": ('<tool_call>\n{"name": ', "hermes", None),
    "Qwen3": (
        "<tool_call>\n{%- if enable_thinking %}<think>\n\n</think>",
        "hermes",
        "qwen3",
    ),
    "Qwen3-Coder": (
        "<tool_call>\n<function=example>\n<parameter=a>",
        "qwen3_coder",
        None,
    ),
    "Llama-3.1": ("Environment: ipython\n<|python_tag|>", "llama3_json", None),
    "Llama-4": ("<|header_start|>system Environment: ipython", "llama4_pythonic", None),
    "Mistral": ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral", None),
    "gpt-oss": (
        "<|start|>assistant<|channel|>analysis<|message|>",
        "openai",
        "openai_gptoss",
    ),
    "DeepSeek-R1": ("<｜Assistant｜><think>\n", "hermes", "deepseek_r1"),
    "GLM-4.5": (
        "<tool_call>{name}<arg_key></arg_key><think></think>",
        "glm45",
        "glm45",
    ),
    "Phi-4-mini": ("<|tool|><|/tool|><|tool_call|>", "phi4_mini_json", None),
}


@pytest.mark.parametrize(
    "where", ["chat_template.jinja", "tokenizer_config.json", "named templates"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_template_tells_the_parsers(
    tmp_path: Path, family: str, where: str
) -> None:
    """Wherever it stands; one that shows neither calls nor reasoning gets the most usual parser of calls."""
    template, tools, reasoning = FAMILIES[family]
    if where == "chat_template.jinja":
        (tmp_path / where).write_text(template)
    else:
        named = (
            template
            if where != "named templates"
            else [{"name": "default", "template": template}]
        )
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"chat_template": named})
        )
    thinks = ["--reasoning-parser", reasoning] if reasoning else []
    assert [*parser_args(tmp_path, ())] == [
        "--enable-auto-tool-choice",
        "--tool-call-parser",
        tools,
        *STRICT,
        *thinks,
    ]


@pytest.mark.parametrize(
    "given", [("--tool-call-parser", "xlam"), ("--tool_call_parser=xlam",)]
)
def test_a_parser_that_a_person_gave_counts(
    tmp_path: Path, given: tuple[str, ...]
) -> None:
    """Its calls are held to their schemas all the same, unless the person says otherwise."""
    assert parser_args(tmp_path, given) == STRICT
    assert parser_args(tmp_path, (*given, "--tool-strict-level=auto")) == ()
