"""Which prompts a replica's prefix cache is likely to hold: a memory of those that this router has sent to it.

A prompt is cut into blocks of its text, and each block's hash covers all text before it: two prompts share a prefix exactly
as far as their hashes are the same. Text stands for tokens: the same text is the same tokens, it needs no tokenizer, and
hashing it takes less time than making an array of ids. How many tokens a prefix has is told from the counts of the parts.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence  # noqa: TC003  msgspec reads it for the decision log
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterable

BLOCK_BYTES = 256  # about 64 tokens of English; vLLM's own blocks have 16 (GPU) or 128 (CPU) tokens
BLOCK_TOKENS = 64
UNKNOWN_BLOCKS = 1024  # remembered of an engine that does not tell the size of its KV cache: 65,536 tokens
MOST_BLOCKS = 16_384  # about 2 MB for each replica, whatever its KV cache holds
LONGEST_BLOCKS = 4096  # of one prompt: 1 MB of text; what follows counts as not cached


class Part(NamedTuple):
    """A part of a prompt, such as a message.

    Attributes:
        text: With whatever sets it apart, such as its role.
        tokens: As counted; an estimate where there is no tokenizer.
    """

    text: str
    tokens: int


class Prefix(Struct, frozen=True):
    """A prompt as prefix caches see it. It holds no text.

    Attributes:
        blocks: The hash of each whole block with all before it; Python's own, which is keyed anew in each process. An array,
            as the last requests are kept.
        ends: Bytes and tokens up to the end of each part.
        session: What the prompt's caller names its conversation by; empty: nothing.
    """

    blocks: Sequence[int]
    ends: tuple[tuple[int, float], ...]
    session: str = ""

    @classmethod
    def of(cls, parts: Sequence[Part], *, added: int = 0, salt: str = "", session: str = "") -> Prefix | None:
        """Return the prefix of a prompt; None: it is shorter than a block.

        Args:
            parts: In the order in which the model reads them.
            added: Tokens that the chat template adds, taken to be spread over the parts evenly.
            salt: What keeps caches apart besides the text, such as the adapter.
            session: See ``Prefix``.
        """
        ends, texts, length, counted = [], [], 0, 0.0
        for part in parts:
            texts.append(part.text.encode("utf-8", "surrogatepass"))
            length, counted = length + len(texts[-1]), counted + part.tokens + added / len(parts)
            ends.append((length, counted))
        if length < BLOCK_BYTES:
            return None
        data, last, blocks = b"".join(texts), hash(salt), array("q")
        for start in range(0, min(length // BLOCK_BYTES, LONGEST_BLOCKS) * BLOCK_BYTES, BLOCK_BYTES):
            last = hash((last, data[start : start + BLOCK_BYTES]))
            blocks.append(last)
        return cls(blocks, tuple(ends), session)

    def tokens(self, blocks: int) -> int:
        """Return the tokens of the first blocks."""
        length = blocks * BLOCK_BYTES
        place = bisect_left(self.ends, (length, 0.0))
        (end, counted), (start, before) = self.ends[place], self.ends[place - 1] if place else (0, 0.0)
        return int(before + (counted - before) * (length - start) / (end - start))

    def home(self, replicas: Sequence[str]) -> int:
        """Return the position of the session's own replica; -1: there is no session.

        The same in every process, and of a change in the replicas only those sessions move that have to (rendezvous
        hashing; Thaler and Ravishankar 1998).

        Args:
            replicas: Their ids.
        """
        if not self.session or not replicas:
            return -1
        key = self.session.encode("utf-8", "surrogatepass")
        ranks = [blake2b(b"%b\0%b" % (key, name.encode()), digest_size=8).digest() for name in replicas]
        return ranks.index(max(ranks))


class PrefixMemory:
    """The blocks of prompts that were sent to one replica, as many as its KV cache may hold.

    The least recently used are forgotten first, and of one prompt the last blocks first, as vLLM evicts them.
    """

    __slots__ = ("_clock", "_used")

    def __init__(self) -> None:
        self._used: OrderedDict[int, int] = OrderedDict()  # when each was last used, in calls of ``note``
        self._clock = 0

    def __len__(self) -> int:
        return len(self._used)

    def matching(self, prefix: Prefix) -> int:
        """Return the number of a prompt's first blocks that are remembered."""
        used, count = self._used, 0
        for block in prefix.blocks:
            if block not in used:
                break
            count += 1
        return count

    def last_used(self, prefix: Prefix, blocks: int) -> int:
        """Return when the first blocks of a prompt were last used together, for ``forget_until``."""
        return self._used.get(prefix.blocks[blocks - 1], 0) if blocks else 0

    def note(self, prefix: Prefix, kv_tokens: int) -> None:
        """Note a prompt that is sent.

        Args:
            prefix: Of the prompt.
            kv_tokens: Size of the replica's KV cache; 0: unknown.
        """
        used, most = self._used, min(kv_tokens // BLOCK_TOKENS or UNKNOWN_BLOCKS, MOST_BLOCKS)
        self._clock = now = self._clock + 1
        for block in reversed(prefix.blocks[:most]):
            used[block] = now
            used.move_to_end(block)
        while len(used) > most:
            used.popitem(last=False)

    def forget(self, blocks: Iterable[int]) -> None:
        """Forget blocks: they were not computed."""
        for block in blocks:
            self._used.pop(block, None)

    def forget_until(self, used: int) -> None:
        """Forget what was last used at a time or before: the replica has evicted it, as it has something used then."""
        while self._used and next(iter(self._used.values())) <= used:
            self._used.popitem(last=False)

    def clear(self) -> None:
        """Forget everything: the replica was started anew."""
        self._used.clear()
