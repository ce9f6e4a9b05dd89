"""Make a checkpoint whose chat template opens a thought, as those of DeepSeek-R1 and Qwen3 do, of one that does not think.

The weights are the same. Two tokens that no text has become the tags, and another one the end of a turn. The model never learned
them, so it goes on within its thought until the engine ends that (``thinking_token_budget``) or a limit comes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

END_OF_TURN = "<file_sep>"
TAG_NAMES = {"<gh_stars>": "<think>", "<issue_start>": "</think>"}
GENERATION_PROMPT = "{{ '<|im_start|>assistant\n' }}"
OPENED = (
    "{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% else %}{{ '<think>\n' }}{% endif %}"
)


def make_thinking(source: Path, target: Path) -> None:
    """Write the checkpoint's folder; its weights are a link to those of the source."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix == ".safetensors":
            (target / path.name).symlink_to(path)
        elif path.suffix in {".json", ".jinja"}:
            shutil.copy(path, target)
    template = (source / "chat_template.jinja").read_text("utf-8")
    assert GENERATION_PROMPT in template
    (target / "chat_template.jinja").write_text(
        template.replace(GENERATION_PROMPT, GENERATION_PROMPT + OPENED)
    )
    tokenizer = json.loads((source / "tokenizer.json").read_text("utf-8"))
    (target / "tokenizer.json").write_text(json.dumps(_with_tags(tokenizer)))
    end_id = tokenizer["model"]["vocab"][END_OF_TURN]
    _edit(target / "tokenizer_config.json", eos_token=END_OF_TURN, eos_token_id=end_id)
    _edit(target / "generation_config.json", eos_token_id=end_id)
    _edit(target / "config.json", eos_token_id=end_id)


def _edit(path: Path, **fields: Any) -> None:
    """Replace fields of a JSON file."""
    content = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**content, **fields}))


def _with_tags(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer in which two tokens are the tags of thoughts, which are shown in text."""
    vocabulary = {
        TAG_NAMES.get(word, word): token_id
        for word, token_id in tokenizer["model"]["vocab"].items()
    }
    added = []
    for token in tokenizer["added_tokens"]:
        name = TAG_NAMES.get(token["content"])
        added.append(
            token if name is None else {**token, "content": name, "special": False}
        )
    assert {token["content"] for token in added} >= set(TAG_NAMES.values())
    model = {**tokenizer["model"], "vocab": vocabulary}
    return {**tokenizer, "model": model, "added_tokens": added}
