"""Measure how clear the answers to the documents' examples are: a clear one begins alike on any processor.

    .venv-quantizer/bin/python -P scripts/check_examples.py CHECKPOINT... [--question TEXT]...

For each question that README.md and docs/ ask, transformers computes with each checkpoint, in FP32, the margin of the first
token: how many nats it is likelier than the second. Rounding moves log-probabilities by some hundredths. Below 1 nat on any
checkpoint the script exits with 1: another example is needed. It prints the answers' beginnings too.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "docs/api.md", "docs/openai.md")
QUESTION = re.compile(
    r"""(?:content|input|prompt)"?: "([^"]+\?)"|stream\("([^"]+)"\)"""
)
BLOCK = re.compile(r"^```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
LEAST_MARGIN = 1.0  # nats
SHOWN_TOKENS = 10


def questions() -> list[str]:
    """Return what the documents' examples ask, each once; an answer to a schema has the schema's words."""
    found: list[str] = []
    for document in DOCUMENTS:
        text = (ROOT / document).read_text("utf-8")
        for block in BLOCK.findall(text):
            if "schema" not in block:
                found += ["".join(groups) for groups in QUESTION.findall(block)]
    return list(dict.fromkeys(found))


def measure(checkpoint: Path, asked: list[str]) -> list[tuple[float, str]]:
    """Return the first token's margin and the beginning of the answer to each question."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    results = []
    for question in asked:
        chat = [{"role": "user", "content": question}]
        rendered = tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True
        )
        inputs = tokenizer(rendered, add_special_tokens=False, return_tensors="pt")
        output = model.generate(
            **inputs,
            max_new_tokens=SHOWN_TOKENS,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        best, second = (
            torch.log_softmax(output.scores[0][0], dim=-1).topk(2).values.tolist()
        )
        answer = tokenizer.decode(
            output.sequences[0, inputs.input_ids.shape[1] :], skip_special_tokens=True
        )
        results.append((best - second, answer))
    return results


def main() -> None:
    """Measure all and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, nargs="+")
    parser.add_argument(
        "--question", action="append", help="in the place of the documents' questions"
    )
    args = parser.parse_args()
    asked = args.question or questions()
    is_clear = True
    for checkpoint in args.checkpoint:
        for question, (margin, answer) in zip(
            asked, measure(checkpoint, asked), strict=True
        ):
            is_clear &= margin >= LEAST_MARGIN
            print(f"{checkpoint.name:16} {margin:6.2f} nats  {question}  {answer!r}")
    sys.exit(0 if is_clear else 1)


if __name__ == "__main__":
    main()
