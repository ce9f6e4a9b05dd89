"""Scores of answers by an engine, which take the place of a comparison with words.

A small model often finds two tokens nearly as likely. Processor, batch and kernel decide which one it chooses, and every
later word depends on it. They do not change how likely the engine finds a text: each token of a greedy answer is the
engine's own first choice, or nearly as likely as that. The difference of the two log-probabilities is
the token's *regret*, in nats.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import httpx
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# A token of a greedy answer is less likely than the first choice by at most so many nats.
NEAR_TIE = 0.5
# Under the same weights a greedy answer has a lower regret, in nats a token, whatever the kernel.
OWN_REGRET = 0.2
# Under another precision of the model a greedy answer has a lower regret, in nats a token.
OTHER_REGRET = 1.0
# The tokens of an answer in another order have a higher regret, in nats a token.
SHUFFLED_REGRET = 2.0
SPECIAL_TOKEN = re.compile(r"<\|\w+\|>")
FEW_TOKENS = 5  # Some other orders of so few different tokens are as likely.


@dataclass(frozen=True, slots=True)
class Scorer:
    """A client that asks an engine how likely it finds a text."""

    url: str
    key: str
    model: str

    @classmethod
    def of(cls, url: str, key: str) -> Scorer:
        """Ask an engine for its model's name."""
        headers = {"authorization": f"Bearer {key}"}
        models = (
            httpx.get(f"{url}/v1/models", headers=headers, trust_env=False)
            .raise_for_status()
            .json()
        )
        return cls(url=url, key=key, model=models["data"][0]["id"])

    def post(self, path: str, **body: Any) -> Any:
        headers = {"authorization": f"Bearer {self.key}"}
        body = {"model": self.model, **body}
        answer = httpx.post(
            f"{self.url}{path}",
            json=body,
            headers=headers,
            timeout=300,
            trust_env=False,
        )
        return answer.raise_for_status().json()

    def prompt_ids(self, messages: str | Sequence[Any]) -> list[int]:
        """Return the tokens of a chat up to where its answer begins; a text is a user's only message."""
        chat = (
            [{"role": "user", "content": messages}]
            if isinstance(messages, str)
            else messages
        )
        ids: list[int] = self.post(
            "/tokenize", messages=chat, add_generation_prompt=True
        )["tokens"]
        return ids

    def text_ids(self, text: str) -> list[int]:
        ids: list[int] = self.post("/tokenize", prompt=text, add_special_tokens=False)[
            "tokens"
        ]
        return ids

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of tokens as answers show it: without the special ones."""
        return SPECIAL_TOKEN.sub(
            "", self.post("/detokenize", tokens=list(ids))["prompt"]
        )

    def log_probabilities(
        self, prompt: Sequence[int], answer: Sequence[int]
    ) -> list[float]:
        """Return the log-probability of each token of an answer."""
        return [
            place[str(token)]
            for token, place in zip(answer, self._places(prompt, answer), strict=True)
        ]

    def regrets(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        """Return how many nats less likely each token of an answer is than the first choice in its place."""
        places = self._places(prompt, answer)
        return [
            max(place.values()) - place[str(token)]
            for token, place in zip(answer, places, strict=True)
        ]

    def _places(
        self, prompt: Sequence[int], answer: Sequence[int]
    ) -> list[dict[str, float]]:
        """Return the log-probabilities of the first choice and of the answer's token in each place of an answer."""
        ids = [*prompt, *answer]
        whole = self.post(
            "/v1/completions",
            prompt=ids,
            max_tokens=1,
            temperature=0,
            prompt_logprobs=1,
        )
        places = whole["choices"][0]["prompt_logprobs"][len(prompt) :]
        return [_logprobs_in(place) for place in places]

    def check_answer(
        self,
        messages: str | Sequence[Any],
        text: str,
        *,
        max_regret: float = OWN_REGRET,
    ) -> None:
        """Check that a text is a greedy answer of this engine to a chat, or the beginning of one."""
        self.check_tokens(
            self.prompt_ids(messages), self.text_ids(text), max_regret=max_regret
        )

    def check_tokens(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        *,
        max_regret: float = OWN_REGRET,
    ) -> None:
        """Check that tokens are a greedy answer of this engine to a prompt, or the beginning of one.

        The check can tell: the same tokens in another order are far less likely.

        Args:
            prompt: Tokens of the prompt.
            answer: Tokens of the answer.
            max_regret: The mean regret that the answer may have, in nats a token.
        """
        assert answer, "the answer has no text"
        regret = mean(self.regrets(prompt, answer))
        assert regret <= max_regret, (
            f"{self.text_of(answer)!r} has a regret of {regret:.3f} nats a token"
        )
        if len(set(answer)) > FEW_TOKENS:
            shuffled = random.Random(len(answer)).sample(answer, len(answer))
            assert mean(self.regrets(prompt, shuffled)) >= SHUFFLED_REGRET


def _logprobs_in(place: dict[str, Any]) -> dict[str, float]:
    return {token: candidate["logprob"] for token, candidate in place.items()}


def forbid_whitespace(checkpoint: str | Path) -> dict[str, float]:
    """Return a logit_bias without which a model may write white space between the parts of JSON for ever."""
    return _forbid(checkpoint, lambda text: text.isspace())


def forbid_tool_calls(checkpoint: str | Path) -> dict[str, float]:
    """Return a logit_bias that keeps a model from calling a tool by itself: a call begins with ``<tool_call>``."""
    return _forbid(checkpoint, lambda text: "<" in text)


def _forbid(
    checkpoint: str | Path, is_forbidden: Callable[[str], bool]
) -> dict[str, float]:
    tokenizer = Tokenizer.from_file(str(Path(checkpoint, "tokenizer.json")))
    texts = {
        token: tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())
    }
    return {str(token): -100.0 for token, text in texts.items() if is_forbidden(text)}
