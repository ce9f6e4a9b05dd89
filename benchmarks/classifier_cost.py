"""Print what the classifier costs by length of prompt, next to what counting tokens with ``tokenizers`` alone costs.

    python benchmarks/classifier_cost.py --tokenizer DIR/tokenizer.json

Every prompt is another text, read once, so that no cache of the processor or of the libraries flatters the figures. The
ratio, of two things measured in one run, is what to compare between machines.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from classifier import ModelTokenCounter, extract

if TYPE_CHECKING:
    from collections.abc import Callable

LENGTHS = (100, 400, 2000, 4000, 16_000)
PROSE = (
    "The harbour was quiet when the first boats came in.",
    "Could you explain why the price of tin rose so sharply in that decade?",
    "She counted 14 crates, of which 3 (the smallest) were empty.",
    "Summarise the passage below, and name the two people who disagree.",
    "Las calles estaban vacías y nadie sabía por qué.",
    "Please keep the tone friendly, but do not promise a refund.",
    "A train leaves at 10:45 and arrives 2.5 hours later; how far does it go at 80 km/h?",
    "In the end the council voted 7 to 4 against the bridge.",
)
CODE = (
    "def total(items):\n    return sum(item.price * item.count for item in items)\n",
    "for (int i = 0; i < n; i++) {\n    sum += values[i];\n}\n",
    "const names = users.map((user) => user.name);\n",
    "SELECT name, COUNT(*) FROM orders WHERE paid = 1 GROUP BY name;\n",
    "if err != nil {\n    return nil, err\n}\n",
)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="a model's tokenizer.json"
    )
    parser.add_argument(
        "--prompts", type=int, default=200, help="prompts of each length (default: 200)"
    )
    options = parser.parse_args()
    counter = ModelTokenCounter.from_file(options.tokenizer)
    reference = Tokenizer.from_file(str(options.tokenizer))
    print(
        f"counting with {counter.backend}; microseconds a prompt: median / 95th percentile"
    )
    print(
        f"{'chars':>6} {'classify, with count':>21} {'count alone':>19} {'tokenizers alone':>19} {'ratio':>6}"
    )
    for length in LENGTHS:
        prompts = make_prompts(length, options.prompts)
        whole = measure(lambda text: extract(text, counter), prompts)
        alone = measure(counter.count, prompts)
        slow = measure(
            lambda text: len(reference.encode(text, add_special_tokens=False).ids),
            prompts,
        )
        print(
            f"{length:>6} {show(whole):>21} {show(alone):>19} {show(slow):>19} {median(whole) / median(slow):>6.2f}"
        )
    print(
        "ratio: classify with count, to counting with tokenizers alone (medians; below 1 the whole classifier is cheaper)"
    )


def make_prompts(length: int, count: int) -> list[str]:
    """Return prompts of a length in characters: prose, and in one of four also code."""
    source = random.Random(length)
    prompts = []
    for number in range(count):
        pieces = PROSE if number % 4 else (*PROSE, *CODE, *CODE)
        text = f"Prompt {number}. "
        while len(text) < length:
            text += source.choice(pieces) + source.choice((" ", " ", "\n", "\n\n"))
        prompts.append(text[:length])
    return prompts


def measure(work: Callable[[str], object], prompts: list[str]) -> list[float]:
    """Return the time that each prompt takes, in microseconds."""
    work(prompts[0])
    times = []
    for prompt in prompts:
        start = time.perf_counter()
        work(prompt)
        times.append((time.perf_counter() - start) * 1e6)
    return times


def show(times: list[float]) -> str:
    """Return median and 95th percentile as text."""
    return f"{median(times):.0f} / {quantiles(times, n=20)[-1]:.0f}"


if __name__ == "__main__":
    main()
