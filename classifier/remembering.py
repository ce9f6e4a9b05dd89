"""Counts each text once: with every turn a conversation comes again, and only its end is new.

What was counted is known by a hash of the exact text, so an edit anywhere in a conversation makes exactly the edited text
new. No text is kept: only hashes, which are keyed anew in each process, and counts.
"""

from __future__ import annotations

import hashlib
import secrets

from classifier.features import PIECE_CHARS, TokenCounter
from classifier.tokens import ModelTokenCounter, pieces_of

# Counting a shorter text takes little longer than finding its count.
SHORTEST_CHARS = 16
# As many texts are remembered at least, and twice as many at most: 137 bytes each, so 18 MB.
REMEMBERED_TEXTS = 1 << 16
_KEY_BYTES = 32


class RememberingCounter(TokenCounter):
    """Counts as a model's own counter does, and remembers the counts of the texts that were last counted.

    The counts are in two generations. A text that is counted or found goes into the younger one; when that is full, it
    becomes the older one, whose texts were not used for longest and are forgotten. Threads that do this at the same time
    lose a count at worst.
    """

    __slots__ = ("_capacity", "_counter", "_hash", "_older", "_younger")

    def __init__(
        self, counter: ModelTokenCounter, capacity: int = REMEMBERED_TEXTS
    ) -> None:
        self._counter = counter
        self._capacity = capacity
        self._younger: dict[bytes, int] = {}
        self._older: dict[bytes, int] = {}
        # SHA-256 is the fastest of the hashes that nobody can find two texts for: processors compute it. The key keeps
        # whoever sees a hash from trying which text it belongs to.
        self._hash = hashlib.sha256(secrets.token_bytes(_KEY_BYTES))

    @property
    def exact(self) -> bool:
        """Tell whether counts are the model's own."""
        return self._counter.exact

    @property
    def remembered(self) -> int:
        """Return the number of counts that are kept, at most twice the capacity."""
        return len(self._younger) + len(self._older)

    def count(self, text: str) -> int:
        """Return what the model's counter returns for a text; of a long one, each piece is remembered by itself."""
        if len(text) < SHORTEST_CHARS:
            return self._counter.count(text)
        if len(text) <= PIECE_CHARS:
            return self._count_piece(text)
        pieces = pieces_of(text)
        if not pieces:
            return self._counter.count(text)
        return sum([self._count_piece(piece) for piece in pieces])

    def _count_piece(self, piece: str) -> int:
        text_hash = self._hash.copy()
        text_hash.update(piece.encode("utf-8", "surrogatepass"))
        digest = text_hash.digest()
        tokens = self._younger.get(digest)
        if tokens is not None:
            return tokens
        tokens = self._older.get(digest)
        if tokens is None:
            tokens = self._counter.count(piece)
        self._remember(digest, tokens)
        return tokens

    def _remember(self, digest: bytes, tokens: int) -> None:
        if len(self._younger) >= self._capacity:
            self._older = self._younger
            self._younger = {}
        self._younger[digest] = tokens
