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
# Most models write a call in its form: JSON between <tool_call> and </tool_call>.
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
# Parsers of reasoning; a template without any of these marks is of a model that does not show its reasoning.
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


def parser_args(folder: Path, persons_args: tuple[str, ...]) -> tuple[str, ...]:
    """Return vLLM's arguments that let a model's answers have tool calls and reasoning of their own.

    Args:
        folder: Of the checkpoint.
        persons_args: Arguments that a person gave; what these name is left to them.

    Raises:
        CheckpointError: The folder has no readable chat template.
    """
    template = str(chat_template(folder))
    args: list[str] = []
    if not _is_named("--tool-call-parser", persons_args):
        tool_parser = _matching_parser(TOOLS, template) or HERMES
        args += ["--enable-auto-tool-choice", "--tool-call-parser", tool_parser]
    if not _is_named(STRICT[0], persons_args):
        args += STRICT
    reasoning_parser = _matching_parser(REASONING, template)
    if reasoning_parser is not None and not _is_named(
        "--reasoning-parser", persons_args
    ):
        args += ["--reasoning-parser", reasoning_parser]
    return tuple(args)


def _matching_parser(
    parsers: tuple[tuple[str, tuple[str, ...]], ...], template: str
) -> str | None:
    """Return the first parser all of whose marks are in a chat template; None: there is none."""
    for parser, marks in parsers:
        if all(mark in template for mark in marks):
            return parser
    return None


def _is_named(option: str, args: tuple[str, ...]) -> bool:
    """Tell whether arguments name an option, written with underscores or dashes."""
    return any(argument.split("=")[0].replace("_", "-") == option for argument in args)
