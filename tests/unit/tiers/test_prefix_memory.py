"""The memory of prompts: what two prompts share, and what is forgotten when."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers.prefix_memory import (
    BLOCK_BYTES,
    BLOCK_SLACK,
    BLOCK_TOKENS,
    LONGEST_BLOCKS,
    MAX_BLOCKS,
    UNKNOWN_BLOCKS,
    Part,
    Prefix,
    PrefixMemory,
    start_of_turn,
)

TEXTS = st.lists(st.text(max_size=600), max_size=4)


def prefix(text: str, *, salt: str = "", session: str = "") -> Prefix:
    """Return the prefix of a text of at least a block, a token for four characters."""
    made = Prefix.of([Part(text, len(text) // 4)], salt=salt, session=session)
    assert made is not None
    return made


def blocks(count: int, name: str = "a") -> str:
    """Return a text of whole blocks, no two of which are the same."""
    return "".join(f"{name}{number}".ljust(BLOCK_BYTES, ".") for number in range(count))


@given(TEXTS, TEXTS, TEXTS)
def test_prompts_share_the_blocks_that_their_texts_share(
    shared: list[str], one: list[str], other: list[str]
) -> None:
    """All whole blocks before the first byte that differs, and none after it, whatever the text."""
    first, second = (
        [Part(text, 1) for text in [*shared, *rest]] for rest in (one, other)
    )
    a = Prefix.of(first)
    b = Prefix.of(second)
    texts = [
        "".join(part.text for part in parts).encode("utf-8", "surrogatepass")
        for parts in (first, second)
    ]
    same = next(
        (n for n, (x, y) in enumerate(zip(*texts, strict=False)) if x != y),
        min(map(len, texts)),
    )
    if a is None or b is None:
        assert min(map(len, texts)) < BLOCK_BYTES
        return
    memory = PrefixMemory()
    memory.note(a, 0)
    assert memory.matching(b) == same // BLOCK_BYTES


def test_a_prompt_shorter_than_a_block_has_no_prefix() -> None:
    assert Prefix.of([Part("x" * (BLOCK_BYTES - 1), 9)]) is None
    assert Prefix.of([]) is None
    assert len(prefix("x" * BLOCK_BYTES).blocks) == 1


def test_a_prompt_that_no_context_holds_is_hashed_up_to_a_bound() -> None:
    """So is what is kept of it: eight bytes a block."""
    made = prefix("x" * (LONGEST_BLOCKS + 2) * BLOCK_BYTES)
    assert len(made.blocks) == LONGEST_BLOCKS
    assert isinstance(made.blocks, array)


def test_a_salt_keeps_prompts_apart() -> None:
    """The same text with another adapter or another caller's salt is not in the cache."""
    memory = PrefixMemory()
    memory.note(prefix(blocks(2)), 0)
    assert memory.matching(prefix(blocks(2))) == 2
    assert memory.matching(prefix(blocks(2), salt="other")) == 0


def test_tokens_are_those_of_the_parts() -> None:
    """Within a part in proportion to its bytes; the chat template's are spread over the parts."""
    parts = [Part("s" * BLOCK_BYTES * 2, 100), Part("u" * BLOCK_BYTES * 2, 20)]
    plain = Prefix.of(parts)
    templated = Prefix.of(parts, added=20)
    assert plain is not None
    assert templated is not None
    assert [plain.tokens(n) for n in range(5)] == [0, 50, 100, 110, 120]
    assert [templated.tokens(n) for n in range(5)] == [0, 55, 110, 125, 140]
    empty_first = Prefix.of([Part("", 0), Part("s" * BLOCK_BYTES, 50)])
    assert empty_first is not None
    assert [empty_first.tokens(n) for n in range(2)] == [0, 50]


@given(
    st.lists(
        st.tuples(st.text(max_size=300), st.integers(0, 400)), min_size=1, max_size=5
    ),
    st.integers(0, 50),
)
def test_more_blocks_are_no_fewer_tokens(
    parts: list[tuple[str, int]], added: int
) -> None:
    made = Prefix.of([Part(*part) for part in parts], added=added)
    if made is not None:
        counts = [made.tokens(n) for n in range(len(made.blocks) + 1)]
        assert counts == sorted(counts)
        assert counts[0] == 0
        assert counts[-1] <= sum(tokens for _, tokens in parts) + added


def test_the_memory_is_as_large_as_the_kv_cache_and_bounded() -> None:
    """Of an engine that does not tell its size, a usual one is assumed."""
    for kv_tokens, most in (
        (0, UNKNOWN_BLOCKS),
        (10 * BLOCK_TOKENS, 10),
        (1 << 40, MAX_BLOCKS),
        (1, UNKNOWN_BLOCKS),
    ):
        memory = PrefixMemory()
        for number in range(6):
            memory.note(prefix(blocks(most // 4 + 1, str(number))), kv_tokens)
        assert len(memory) == most


def test_the_least_recently_used_and_of_a_prompt_the_end_is_forgotten_first() -> None:
    """A prompt that was sent again stays; one that has to make space loses its last blocks first."""
    memory = PrefixMemory()
    kv_tokens = 6 * BLOCK_TOKENS
    one, two, three = (prefix(blocks(3, name)) for name in "abc")
    for sent in (one, two, one, three):
        memory.note(sent, kv_tokens)
    assert [memory.matching(each) for each in (one, two, three)] == [3, 0, 3]
    memory.note(prefix(blocks(1, "d")), kv_tokens)
    assert [memory.matching(each) for each in (one, two, three)] == [2, 0, 3]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=30),
    st.integers(1, 12),
)
def test_a_block_is_never_kept_without_those_before_it(
    sent: list[tuple[int, int]], size: int
) -> None:
    """However prompts come, and however little is kept: the memory holds whole beginnings."""
    memory = PrefixMemory()
    kv_tokens = size * BLOCK_TOKENS
    for name, length in sent:
        memory.note(prefix(blocks(length, "abcd"[name])), kv_tokens)
    assert len(memory) == sum(
        memory.matching(prefix(blocks(5, name))) for name in "abcd"
    )
    assert len(memory) <= size


def test_what_an_engine_has_evicted_is_forgotten_with_all_that_is_older() -> None:
    memory = PrefixMemory()
    old, found_missing, young = (prefix(blocks(2, name)) for name in "abc")
    for sent in (old, found_missing, young):
        memory.note(sent, 0)
    memory.forget_until(memory.last_used(found_missing, 2))
    assert [memory.matching(each) for each in (old, found_missing, young)] == [0, 0, 2]
    memory.forget(young.blocks[1:])
    assert memory.matching(young) == 1
    memory.clear()
    assert len(memory) == 0


@given(
    st.lists(
        st.text("abc", min_size=1, max_size=3), min_size=2, max_size=6, unique=True
    ),
    st.text(min_size=1),
)
def test_a_session_moves_only_if_its_replica_goes(
    replicas: list[str], session: str
) -> None:
    """Its own replica is the same in any order, and when any other is gone."""
    made = prefix(blocks(1), session=session)
    home = replicas[made.home(replicas)]
    assert sorted(replicas)[made.home(sorted(replicas))] == home
    for gone in replicas:
        left = [name for name in replicas if name != gone]
        assert gone == home or left[made.home(left)] == home


def test_sessions_are_spread_over_replicas() -> None:
    """Of many, each replica has some; without a session there is none."""
    names = ["fast-0", "fast-1", "fast-2"]
    homes = [
        prefix(blocks(1), session=f"chat {number}").home(names) for number in range(60)
    ]
    assert min(homes.count(n) for n in range(3)) >= 8
    assert prefix(blocks(1)).home(names) == -1


ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool", "-": ""}


@pytest.mark.parametrize(
    ("roles", "before"),
    [("", 0), ("su", 0), ("a", 0), ("sua", 2), ("suat", 2), ("-suaatt", 3), ("suatatu", 4), ("suatu", 2), ("aau", 0)],
)  # fmt: skip
def test_a_turn_begins_with_the_last_answer(roles: str, before: int) -> None:
    """All before it was the prompt of the turn before; there is none before the first answer."""
    assert start_of_turn([ROLES[role] for role in roles]) == before


def test_a_conversation_is_known_by_more_than_how_it_begins() -> None:
    """Half-way from its opening to the last turn's prompt, less what blocks may hide; at its first turn by nothing."""

    def turn_tokens(roles: str, tokens: int = 1000) -> int:
        parts = [Part(role * 3000, tokens, ROLES[role]) for role in roles]
        made = Prefix.of(parts)
        assert made is not None
        return made.turn_tokens

    assert turn_tokens("su") == 0
    assert turn_tokens("suat") == 2000 - BLOCK_SLACK
    assert turn_tokens("suatat") == 3000 - BLOCK_SLACK
    assert turn_tokens("suat", 90) == 0
    assert turn_tokens("sss") == 0


@given(st.integers(1, 8), st.integers(1, 3000), st.integers(1, 3000))
def test_a_replica_with_the_turn_before_holds_the_conversation(
    turns: int, task: int, result: int
) -> None:
    """Whatever the lengths; and one with another agent's turns does not, where this agent's own words are long enough."""

    def agent(name: str, count: int) -> Prefix:
        parts = [
            Part("s" * 9000, 3000, "system"),
            Part(name * task, -(-task // 3), "user"),
        ]
        for number in range(count):
            parts.append(Part(f"{name}{number}", 2, "assistant"))
            parts.append(Part(f"{number}" * result, -(-result // 3), "tool"))
        made = Prefix.of(parts)
        assert made is not None
        return made

    memory, other = PrefixMemory(), PrefixMemory()
    memory.note(agent("a", turns - 1), 1 << 20)
    other.note(agent("b", turns + 3), 1 << 20)
    prompt = agent("a", turns)
    assert prompt.tokens(memory.matching(prompt)) >= prompt.turn_tokens
    if task >= 3 * BLOCK_SLACK + BLOCK_BYTES:
        assert prompt.tokens(other.matching(prompt)) < prompt.turn_tokens
