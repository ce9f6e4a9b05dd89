"""What an engine says is scored by an engine, not compared with words.

A small model often finds two tokens nearly as likely. Which one it says depends on the processor, the batch and the kernel,
and with it every word that follows. What does not depend on them is how likely the engine finds a given text: each token of
a greedy answer is the engine's own first choice, or nearly as likely as that. The difference of the two log-probabilities is
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

# nats: a token of a greedy answer is at most this much less likely than the first choice
NEAR_TIE = 0.5
# nats a token: an engine's greedy answer has less under the same weights, whatever the kernel
OWN_REGRET = 0.2
# nats a token: a precision's greedy answer has less under another precision of the same model
OTHER_REGRET = 1.0
# nats a token: the tokens of an answer in another order have more
SHUFFLED_REGRET = 2.0
SPECIAL_TOKEN = re.compile(r"<\|\w+\|>")
FEW_TOKENS = 5  # of so few different tokens, some other orders are as likely


@dataclass(frozen=True, slots=True)
class Scorer:
    """Asks an engine how likely it finds a text."""

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
        """Return the tokens of a chat (a text: of a user's message) up to where its answer begins."""
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
        """Return for each token of an answer the log-probabilities of the first choice there and of the token itself."""
        ids = [*prompt, *answer]
        whole = self.post(
            "/v1/completions",
            prompt=ids,
            max_tokens=1,
            temperature=0,
            prompt_logprobs=1,
        )
        places = whole["choices"][0]["prompt_logprobs"][len(prompt) :]
        return [
            {token: found["logprob"] for token, found in place.items()}
            for place in places
        ]

    def check_answer(
        self, messages: str | Sequence[Any], text: str, *, most: float = OWN_REGRET
    ) -> None:
        """Check that a text is a greedy answer of this engine to a chat, or the beginning of one."""
        self.check_tokens(self.prompt_ids(messages), self.text_ids(text), most=most)

    def check_tokens(
        self, prompt: Sequence[int], answer: Sequence[int], *, most: float = OWN_REGRET
    ) -> None:
        """Check that tokens are a greedy answer of this engine to a prompt, or the beginning of one.

        The check can tell: the same tokens in another order are far less likely.

        Args:
            prompt: Tokens of the prompt.
            answer: Tokens of the answer.
            most: The mean regret that the answer may have, in nats a token.
        """
        assert answer, "the answer has no text"
        regret = mean(self.regrets(prompt, answer))
        assert regret <= most, (
            f"{self.text_of(answer)!r} has a regret of {regret:.3f} nats a token"
        )
        if len(set(answer)) > FEW_TOKENS:
            shuffled = random.Random(len(answer)).sample(answer, len(answer))
            assert mean(self.regrets(prompt, shuffled)) >= SHUFFLED_REGRET


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
