"""Fine-tune the classifier's second look from labelled prompts, and write it as an ONNX model of eight bits.

    python scripts/train_second_look.py --base FOLDER [--data FOLDER] [--output FILE] [--without SOURCE ...]

Needs torch, transformers, onnx and onnxruntime. ``--base`` is a BERT encoder such as
sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0). ``--data`` has JSON lines as
``scripts/train_classifier.py`` reads them. ``--without`` leaves sources out, and prints how good the model is on them.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy
from transformers import AutoModel, AutoTokenizer

from classifier.kinds import JUDGED, Complexity, PromptClass
from classifier.model import ASKS, BEYOND_TRIVIAL, COMPLEX, CONTAINS, HAS
from classifier.second_look import (
    FOLDER,
    KNOWN_OUTPUTS,
    MAX_TOKENS,
    MODEL,
    TOKENIZER,
    excerpt,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    Prompt = dict[str, Any]

CLASSES = COMPLEX + 1  # where the classes' outputs start in ``KNOWN_OUTPUTS``
EPOCHS, BATCH, WARM_STEPS = 2, 32, 60
ENCODER_RATE, HEAD_RATE = 8e-5, 1e-3
REPORT_STEPS = 100


class Net(torch.nn.Module):
    """The encoder's mean over tokens, and a linear layer to log-odds."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = torch.nn.Linear(encoder.config.hidden_size, len(KNOWN_OUTPUTS))

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        """Return log-odds of the outputs, one row a prompt."""
        found = self.encoder(
            input_ids=input_ids, attention_mask=attention_mask
        ).last_hidden_state
        mask = attention_mask.unsqueeze(-1).float()
        return self.head((found * mask).sum(1) / mask.sum(1))


def main() -> None:
    """Train, report, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", required=True, help="folder or name of the encoder")
    parser.add_argument("--data", type=Path, default=Path("classifier/data"))
    parser.add_argument(
        "--output", type=Path, default=FOLDER, help="folder (default: the package's)"
    )
    parser.add_argument("--without", nargs="*", default=[], metavar="SOURCE")
    options = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    files = sorted(options.data.glob("written*.jsonl"))
    prompts = [
        json.loads(line)
        for file in files
        for line in file.read_text("utf-8").split("\n")
        if line
    ]
    left_out = [prompt for prompt in prompts if prompt["source"] in options.without]
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    encoder = AutoModel.from_pretrained(options.base, attn_implementation="eager")
    encoder.pooler = None  # unused
    net = Net(encoder)
    train(
        net,
        tokenizer,
        [prompt for prompt in prompts if prompt["source"] not in options.without],
    )
    if left_out:
        report(net, tokenizer, left_out)
    write(net, tokenizer, options.output)


def targets(prompt: Prompt) -> tuple[list[float], list[float]]:
    """Return each output's label, and whether it is known."""
    truth, known = [0.0] * len(KNOWN_OUTPUTS), [0.0] * len(KNOWN_OUTPUTS)
    contains, asks = bool(prompt["contains_code"]), bool(prompt["asks_for_code"])
    for output, label in ((HAS, contains or asks), (ASKS, asks), (CONTAINS, contains)):
        truth[output], known[output] = float(label), 1.0
    if prompt.get("complexity"):
        degree = list(Complexity).index(Complexity(prompt["complexity"]))
        truth[BEYOND_TRIVIAL], truth[COMPLEX] = float(degree > 0), float(degree > 1)
        known[BEYOND_TRIVIAL] = known[COMPLEX] = 1.0
    if not (contains or asks) and prompt["class"] in JUDGED:
        truth[CLASSES + JUDGED.index(PromptClass(prompt["class"]))] = 1.0
        known[CLASSES:] = [1.0] * len(JUDGED)
    return truth, known


def batches(prompts: Sequence[Prompt]) -> list[list[Prompt]]:
    """Return shuffled batches of prompts of like length."""
    order, made = random.sample(list(prompts), len(prompts)), []
    for begin in range(0, len(order), BATCH * 40):
        part = sorted(
            order[begin : begin + BATCH * 40], key=lambda prompt: len(prompt["text"])
        )
        made += [part[at : at + BATCH] for at in range(0, len(part), BATCH)]
    return random.sample(made, len(made))


def encode(tokenizer: Any, prompts: Sequence[Prompt]) -> tuple[Any, Any]:
    """Return token ids and mask as the second look makes them."""
    texts = [excerpt(prompt["text"]) for prompt in prompts]
    found = tokenizer(
        texts, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
    )
    return found["input_ids"], found["attention_mask"]


def train(net: Net, tokenizer: Any, prompts: Sequence[Prompt]) -> None:
    """Fit all weights: AdamW, the rate rising first, then falling to zero."""
    rates = ENCODER_RATE, HEAD_RATE
    parts = [{"params": net.encoder.parameters()}, {"params": net.head.parameters()}]
    optimizer = torch.optim.AdamW(parts, lr=ENCODER_RATE, weight_decay=0.01)
    plan = [batch for _ in range(EPOCHS) for batch in batches(prompts)]
    began, losses = time.monotonic(), []
    net.train()
    for step, batch in enumerate(plan):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = (
                rate * min(1, (step + 1) / WARM_STEPS) * (1 - step / len(plan))
            )
        truth, known = (
            torch.tensor(column) for column in zip(*map(targets, batch), strict=True)
        )
        loss = (
            cross_entropy(
                net(*encode(tokenizer, batch)), truth, weight=known, reduction="sum"
            )
            / known.sum()
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % REPORT_STEPS == 0:
            mean, spent = np.mean(losses[-REPORT_STEPS:]), time.monotonic() - began
            print(
                f"step {step} of {len(plan)}, loss {mean:.4f}, {spent:.0f} s",
                flush=True,
            )


def report(net: Net, tokenizer: Any, prompts: Sequence[Prompt]) -> None:
    """Print F1 of each yes or no."""
    net.eval()
    with torch.no_grad():
        odds = np.concatenate(
            [
                net(*encode(tokenizer, prompts[at : at + 64])).numpy()
                for at in range(0, len(prompts), 64)
            ]
        )
    truth, known = (
        np.array(column) > 0 for column in zip(*map(targets, prompts), strict=True)
    )
    for output in range(CLASSES):
        rows = known[:, output]
        found, right = odds[rows, output] >= 0, truth[rows, output]
        f1 = 2 * (found & right).sum() / max(found.sum() + right.sum(), 1)
        print(f"F1 {KNOWN_OUTPUTS[output]}: {f1:.3f}, {rows.sum()} prompts")


def write(net: Net, tokenizer: Any, folder: Path) -> None:
    """Write model and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.backend_tokenizer.save(str(folder / TOKENIZER))
    net.eval()
    ids = torch.ones((2, 16), dtype=torch.int64)
    names = ["input_ids", "attention_mask"]
    axes = {name: {0: "prompts", 1: "tokens"} for name in names}
    with TemporaryDirectory() as place:
        whole = Path(place) / MODEL
        torch.onnx.export(
            net,
            (ids, torch.ones_like(ids)),
            str(whole),
            input_names=names,
            output_names=["odds"],
            dynamic_axes=axes,
            opset_version=17,
            dynamo=False,
        )
        quantize_dynamic(
            whole, folder / MODEL, weight_type=QuantType.QInt8, per_channel=True
        )
    print(f"wrote {folder / MODEL}, {(folder / MODEL).stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
