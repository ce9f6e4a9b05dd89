"""What a precision loses with one kernel and with another: two journals of ``qarr profile quality``, over the same prompts.

    VLLM_PLUGINS=none QARR_POLICY__PROFILES=/tmp/vllm .venv/bin/qarr up      # in another terminal, vLLM's own kernels
    QARR_POLICY__PROFILES=/tmp/vllm .venv/bin/qarr profile quality --per-class 6
    QARR_POLICY__PROFILES=/tmp/plugin .venv/bin/qarr up                      # the plugin's
    QARR_POLICY__PROFILES=/tmp/plugin .venv/bin/qarr profile quality --per-class 6
    .venv/bin/python benchmarks/kernel_loss.py /tmp/vllm/quality.journal.jsonl /tmp/plugin/quality.journal.jsonl

All prompts that both judged are taken as one class, as the classes alone have too few; intervals are of 95 %, by bootstrap
over prompts (``router/profiling/quality.py``).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from classifier import PromptClass
from router.profiling.quality import Score, summarise
from tiers.spec import STANDARD_TIERS, TierName

if TYPE_CHECKING:
    from collections.abc import Iterable

    from router.policy.profiles import Interval


def read(journal: Path) -> dict[tuple[TierName, str], Score]:
    """Return a journal's scores of its last setting, by tier and prompt."""
    rows = [json.loads(line) for line in journal.read_text("utf-8").splitlines()]
    scores = [Score.model_validate(row["score"]) for row in rows if row["setting"] == rows[-1]["setting"]]
    return {(score.tier, score.prompt): score for score in scores}


def judged_by_all(scores: Iterable[tuple[TierName, str]]) -> set[str]:
    """Return the prompts that every tier has a score of."""
    known = set(scores)
    return {prompt for _, prompt in known if all((tier, prompt) in known for tier in STANDARD_TIERS)}


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vllm", type=Path, help="journal with vLLM's own kernels")
    parser.add_argument("plugin", type=Path, help="journal with the plugin's")
    args = parser.parse_args()
    journals = {"vLLM's own": read(args.vllm), "plugin": read(args.plugin)}
    prompts = set.intersection(*(judged_by_all(scores) for scores in journals.values()))
    print(f"{len(prompts)} prompts; mean and 95 % interval")
    print(f"{'':24}{'tokens':>7}{'not first choice %':>26}{'KL mean':>26}{'perplexity ratio':>26}")
    for name, scores in journals.items():
        taken = [
            s.model_copy(update={"prompt_class": PromptClass.CHAT}) for s in scores.values() if s.prompt in prompts
        ]
        for loss in summarise(taken):
            shown = (_shown(loss.top1_disagreement, 100, 1), _shown(loss.kl_mean), _shown(loss.perplexity_ratio))
            print(f"{f'{loss.tier}, {name}':24}{loss.tokens:>7}" + "".join(f"{text:>26}" for text in shown))


def _shown(value: Interval, factor: float = 1, digits: int = 3) -> str:
    low, mean, high = (f"{x * factor:.{digits}f}" for x in (value.low, value.mean, value.high))
    return f"{mean} ({low} to {high})"


if __name__ == "__main__":
    main()
