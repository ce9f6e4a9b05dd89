# ruff: noqa: RUF001  templates of DeepSeek and Step write fullwidth marks
"""vLLM's parsers of tool calls and of reasoning for a model, by what its chat template shows of its family.

Names and marks are those of vLLM 0.32 (``vllm/tool_parsers``, ``vllm/reasoning``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiers.checkpoints.checkpoint import chat_template

if TYPE_CHECKING:
    from pathlib import Path

# Without it, vLLM holds a call to its envelope alone: the arguments of a required tool may then be a string, unless its
# caller sets ``strict``, which SDKs do not.
STRICT = ("--tool-strict-level", "parameter")
# writes a call as most models do: JSON between <tool_call> and </tool_call>
HERMES = "hermes"
# A parser, and what only the templates of its family have; the first whose marks all occur counts.
TOOLS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseek_v32", ("DSML",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("glm45", ("<arg_key>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("step3", ("<｜tool_calls_begin｜>",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("cohere_command3", ("<|START_ACTION|>",)),
    ("gemma4", ("<|tool_call>",)),
    ("functiongemma", ("<start_function_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama4_pythonic", ("ipython", "<|header_start|>")),
    ("llama3_json", ("ipython",)),
    ("granite", ("<|tool_call|>", "<|start_of_role|>")),
    ("granite4", ("<tool_call>", "<|start_of_role|>")),
    ("phi4_mini_json", ("<|tool_call|>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("internlm", ("<|action_start|>",)),
    ("jamba", ("<tool_calls>", "<|bom|>")),
    ("hunyuan_a13b", ("<tool_calls>",)),
    ("olmo3", ("<function_calls>",)),
)
# The same for reasoning; a template without any of these is of a model that does not show its reasoning.
REASONING: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai_gptoss", ("<|channel|>",)),
    ("mistral", ("[THINK]",)),
    ("glm45", ("<think>", "<arg_key>")),
    ("minimax_m2", ("<think>", "<minimax:tool_call>")),
    ("seed_oss", ("<seed:think>",)),
    ("deepseek_v3", ("<think>", "<｜tool▁calls▁begin｜>", "thinking")),
    ("deepseek_r1", ("<think>", "<｜Assistant｜>")),
    ("qwen3", ("<think>", "enable_thinking")),
)


def parser_args(folder: Path, given: tuple[str, ...]) -> tuple[str, ...]:
    """Return vLLM's arguments that let a model's answers have tool calls and reasoning of their own.

    Args:
        folder: Of the checkpoint.
        given: Arguments that a person gave; what these name is left to them.

    Raises:
        CheckpointError: The folder has no readable chat template.
    """
    template = str(chat_template(folder))
    found: list[str] = []
    if not _named("--tool-call-parser", given):
        found += [
            "--enable-auto-tool-choice",
            "--tool-call-parser",
            _first(TOOLS, template) or HERMES,
        ]
    if not _named(STRICT[0], given):
        found += STRICT
    reasoning = _first(REASONING, template)
    if reasoning is not None and not _named("--reasoning-parser", given):
        found += ["--reasoning-parser", reasoning]
    return tuple(found)


def _first(
    parsers: tuple[tuple[str, tuple[str, ...]], ...], template: str
) -> str | None:
    return next(
        (
            parser
            for parser, marks in parsers
            if all(mark in template for mark in marks)
        ),
        None,
    )


def _named(option: str, given: tuple[str, ...]) -> bool:
    return any(argument.split("=")[0].replace("_", "-") == option for argument in given)
