"""Train a BF16 checkpoint for a few steps, in place. Runs in the quantizer's environment; see broken_checkpoints.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS = 30
LEARNING_RATE = 5e-5
MAX_TOKENS = 256
PROMPTS = Path(__file__).resolve().parents[1] / "tiers/checkpoints/calibration.jsonl"


def main() -> None:
    """Train on the first calibration prompts, one a step."""
    folder = sys.argv[1]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for line in PROMPTS.read_text("utf-8").splitlines()[:STEPS]:
        token_ids = tokenizer(json.loads(line)["text"], return_tensors="pt").input_ids[
            :, :MAX_TOKENS
        ]
        model(token_ids, labels=token_ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    main()
