"""Which prompts a replica's prefix cache is likely to hold: a memory of those that this router has sent to it.

A prompt is cut into blocks of its text, and each block's hash covers all text before it: two prompts share a prefix exactly
as far as their hashes are the same. Text stands for tokens: the same text is the same tokens, it needs no tokenizer, and
hashing it takes less time than making an array of ids. The tokens of a prefix are estimated from the counts of the parts.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence  # noqa: TC003  msgspec reads it for the decision log
from hashlib import blake2b
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterable

# about 64 tokens of English; vLLM's own blocks have 16 (GPU) or 128 (CPU) tokens
BLOCK_BYTES = 256
BLOCK_TOKENS = 64
_BLOCK = struct.Struct(f"{BLOCK_BYTES}s")
# remembered where an engine does not report the size of its KV cache: 65,536 tokens
UNKNOWN_BLOCKS = 1024
MAX_BLOCKS = 16_384  # about 2 MB for each replica, whatever its KV cache holds
LONGEST_BLOCKS = 4096  # per prompt: 1 MB of text; what follows counts as not cached
# Tokens by which less of a prompt may count as cached than was sent: a block of the memory, and the largest of vLLM's.
BLOCK_SLACK = BLOCK_TOKENS + 128


class Part(Struct, frozen=True):
    """A part of a prompt, such as a message.

    Attributes:
        text: Its text, with whatever sets it apart, such as its role.
        tokens: Its tokens; an estimate where there is no tokenizer.
        role: Who wrote it, as the request says; empty: it is no message.
    """

    text: str
    tokens: int
    role: str = ""


class Prefix(Struct, frozen=True):
    """A prompt as prefix caches see it. It holds no text.

    Attributes:
        blocks: The hash of each whole block with all text before it. Python's own hash is keyed anew in each process. They
            are an array, to save memory: the last requests are kept.
        ends: Bytes and tokens up to the end of each part.
        session: What the prompt's caller names its conversation by; empty: nothing.
        turn_tokens: A replica that holds so many tokens of it holds this conversation, and not only a system prompt that it
            shares with others; 0: the conversation begins with this prompt, or is too short to tell.
    """

    blocks: Sequence[int]
    ends: tuple[tuple[int, float], ...]
    session: str = ""
    turn_tokens: int = 0

    @classmethod
    def of(
        cls, parts: Sequence[Part], *, added: int = 0, salt: str = "", session: str = ""
    ) -> Prefix | None:
        """Return the prefix of a prompt; None: it is shorter than a block.

        Args:
            parts: The prompt's parts, in the order in which the model reads them.
            added: Tokens that the chat template adds, taken to be spread over the parts evenly.
            salt: What keeps caches apart besides the text, such as the adapter.
            session: See ``Prefix``.
        """
        texts = [part.text.encode("utf-8", "surrogatepass") for part in parts]
        ends = []
        byte_count = 0
        token_count = 0.0
        for part, text in zip(parts, texts, strict=True):
            byte_count += len(text)
            token_count = token_count + part.tokens + added / len(parts)
            ends.append((byte_count, token_count))
        if byte_count < BLOCK_BYTES:
            return None
        return cls(
            _hash_blocks(b"".join(texts), salt),
            tuple(ends),
            session,
            turn_tokens=_turn_tokens(parts, ends),
        )

    def tokens(self, blocks: int) -> int:
        """Return the tokens of the first blocks, as if the tokens of a part were spread over its text evenly."""
        if not blocks:
            return 0
        byte_count = blocks * BLOCK_BYTES
        part = bisect_left(self.ends, (byte_count, 0.0))
        part_end, tokens_to_end = self.ends[part]
        part_start = 0
        tokens_to_start = 0.0
        if part:
            part_start, tokens_to_start = self.ends[part - 1]
        part_tokens = tokens_to_end - tokens_to_start
        bytes_within = byte_count - part_start
        return int(
            tokens_to_start + part_tokens * bytes_within / (part_end - part_start)
        )

    def home(self, replicas: Sequence[str]) -> int:
        """Return the position of the session's own replica; -1: there is no session.

        It is the same in every process. When replicas come or go, only those sessions move that have to (rendezvous
        hashing; Thaler and Ravishankar 1998).

        Args:
            replicas: Their ids.
        """
        if not self.session or not replicas:
            return -1
        key = self.session.encode("utf-8", "surrogatepass")
        ranks = [
            blake2b(b"%b\0%b" % (key, replica.encode()), digest_size=8).digest()
            for replica in replicas
        ]
        return ranks.index(max(ranks))


def _turn_tokens(parts: Sequence[Part], ends: Sequence[tuple[int, float]]) -> int:
    """Return ``Prefix.turn_tokens``: the middle between what a conversation begins with and the prompt of its turn before.

    A replica that computed the turn before holds all of that turn's prompt, unless it has evicted its end. One that computed
    another conversation holds at most what stands before the user's first words: the system prompt and the tools.
    """
    roles = [part.role for part in parts]
    before_turn = start_of_turn(roles)
    if not before_turn:
        return 0
    first_answer = roles.index("assistant")
    if not first_answer:
        return 0
    opening_tokens = ends[first_answer - 1][1]
    tokens_before = ends[before_turn - 1][1]
    middle = (opening_tokens + tokens_before) / 2
    return max(int(middle) - BLOCK_SLACK, 0)


def start_of_turn(roles: Sequence[str]) -> int:
    """Return how many of a prompt's first parts were the prompt of the turn before; 0: there was none.

    What follows them is the model's last answer, of one part or several, and what is new in this turn.
    """
    is_answer = False
    for position in range(len(roles) - 1, -1, -1):
        if roles[position] == "assistant":
            is_answer = True
        elif is_answer:
            return position + 1
    return 0


def _hash_blocks(data: bytes, salt: str) -> array[int]:
    """Return a hash of each whole block with the salt and all text before it."""
    block_count = min(len(data) // BLOCK_BYTES, LONGEST_BLOCKS)
    whole_blocks = memoryview(data)[: block_count * BLOCK_BYTES]
    chained_hashes = []
    chained_hash = hash(salt)
    # Hashing each block by itself, and only its hash with the one before, takes half the time.
    for block_hash in map(hash, _BLOCK.iter_unpack(whole_blocks)):
        chained_hash = hash((chained_hash, block_hash))
        chained_hashes.append(chained_hash)
    return array("q", chained_hashes)


class PrefixMemory:
    """The blocks of prompts that were sent to one replica, as many as its KV cache may hold.

    The least recently used are forgotten first, and of one prompt the last blocks first, as vLLM evicts them.
    """

    __slots__ = ("_clock", "_used")

    def __init__(self) -> None:
        # when each was last used, in calls of ``note``
        self._used: OrderedDict[int, int] = OrderedDict()
        self._clock = 0

    def __len__(self) -> int:
        return len(self._used)

    def matching(self, prefix: Prefix) -> int:
        """Return the number of a prompt's first blocks that are remembered."""
        for position, block in enumerate(prefix.blocks):
            if block not in self._used:
                return position
        return len(prefix.blocks)

    def last_used(self, prefix: Prefix, blocks: int) -> int:
        """Return when the first blocks of a prompt were last used together, for ``forget_until``."""
        if not blocks:
            return 0
        return self._used.get(prefix.blocks[blocks - 1], 0)

    def note(self, prefix: Prefix, kv_tokens: int) -> None:
        """Note a prompt that is sent.

        Args:
            prefix: The prompt as prefix caches see it.
            kv_tokens: Size of the replica's KV cache; 0: unknown.
        """
        used = self._used
        capacity = min(kv_tokens // BLOCK_TOKENS or UNKNOWN_BLOCKS, MAX_BLOCKS)
        self._clock += 1
        now = self._clock
        for block in reversed(prefix.blocks[:capacity]):
            used[block] = now
            used.move_to_end(block)
        while len(used) > capacity:
            used.popitem(last=False)

    def forget(self, blocks: Iterable[int]) -> None:
        """Forget blocks: they were not computed."""
        for block in blocks:
            self._used.pop(block, None)

    def forget_until(self, used: int) -> None:
        """Forget what was last used at a time or before: a replica that has evicted something of then has nothing older."""
        while self._used and next(iter(self._used.values())) <= used:
            self._used.popitem(last=False)

    def clear(self) -> None:
        """Forget everything: the replica was started anew."""
        self._used.clear()
