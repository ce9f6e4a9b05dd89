"""Failover: if an engine fails within an answer, another replica or tier continues it from the last token sent.

The tiers share one tokenizer, so the ids of the prompt and of what was sent are a prompt for any of them; where they need
not (``model.allow_different``), only tiers that read prompts as the first one does are asked. There are two ways:

- Plain text is continued as a completion of these ids, by any engine. What the first engine had computed but not sent (half
  of a character, or the start of a possible stop string) is computed again, or sent first.
- Any other answer (reasoning, tool calls, structured output, events of other APIs) is resumed: an engine that knows how to
  (``Replica.resumes``) is sent the caller's own request with the ids of the output so far. It begins its stream anew, of
  which a ``Splicer`` passes on what the caller lacks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from typing import NamedTuple, Protocol

from msgspec.structs import replace
from pydantic_core import to_json

from router.policy.decision import Decision
from router.policy.table import PolicyStore
from router.telemetry.tracing import Telemetry
from router.upstream.engine_request import EngineRequest, ResumePoint
from router.upstream.engine_stream import Drain, EngineStream, ReceiveChunks
from router.upstream.errors import (
    EngineBrokeError,
    EngineStalledError,
    NoSlotError,
    SeamError,
    UpstreamError,
    without_trace,
)
from router.upstream.json_object import read_json
from router.upstream.progress import AnswerProgress, ContinuationTerms, StopToken
from router.upstream.splicing import Sent, Splicer
from router.upstream.sse import Chunk
from router.upstream.upstream import Upstream
from tiers.fleet import Fleet
from tiers.replica import Replica
from tiers.spec import ReplicaStatus, TierName

DETOKENIZE = "/detokenize"
BROKEN_CHARACTER = "\ufffd"
# sent along before those whose text is wanted: a token's text may depend on those before it
CONTEXT_TOKENS = 8
# The search for the end of the known text drops fewer tokens than this: a character may be spread over as many tokens as
# it has bytes, at most four.
MAX_DROPPED_TOKENS = 8
DETOKENIZE_TIMEOUT_S = 5.0
# what is raised if an engine does not answer, or not with a text
CANNOT_TELL = (UpstreamError, TimeoutError, ValueError, LookupError, TypeError)
log = logging.getLogger(f"qarr.{__name__}")


class _StopMatch(NamedTuple):
    """A complete stop string. The least match counts: the first to be complete, then the first in the request, as in vLLM.

    ``end`` and ``start`` are positions in the joined text, ``number`` is the string's place in the request.
    """

    end: int
    number: int
    start: int


class StopStringJoiner:
    """Finds stop strings that begin in one engine's text and end in the next one's; an engine finds them in its own only.

    The earlier text is what was ``sent``, and what was computed besides and is still ``held``. With ``include`` the answer
    includes the string that ends it.
    """

    def __init__(
        self, sent: str, held: str, stops: Sequence[str], *, include: bool
    ) -> None:
        longest = max(map(len, stops), default=0)
        context = ""
        if include and longest > 1:
            context = sent[-(longest - 1) :]
        self._stops = stops
        self._includes_stop = include
        self._context_length = len(context)
        # emptied once no stop string that begins in it can be completed
        self._earlier = context + held
        self._later = ""  # the next engine's text so far
        self._passed_on = len(context)  # characters of both texts that were sent
        self.passed_over = any(stop in self._earlier for stop in stops)
        self.stopped: str | None = None
        # Where ``stopped`` ends: characters after the end of ``sent``, the text that the caller had before.
        self.end = 0

    def pass_on(self, text: str, *, last: bool, ended_by: str = "") -> str:
        """Take more of the next engine's text, and return what may be sent; set ``stopped`` once a stop string is complete.

        ``ended_by`` is the stop string that ended the text and is not in it.
        """
        if not self._earlier:
            return text
        self._later += text
        joined = self._earlier + self._later
        match = self._first_match(joined + ended_by)
        if match is not None and self._precedes_engines_stop(
            match, len(joined + ended_by), ended_by
        ):
            self.stopped = self._stops[match.number]
            self.end = match.end - self._context_length
            answer_end = match.end if self._includes_stop else match.start
            return joined[self._passed_on : answer_end]
        unfinished_start = None if last else self._unfinished_start(joined)
        if unfinished_start is None:
            self._earlier = ""
        safe_end = len(joined)
        if unfinished_start is not None and not self._includes_stop:
            safe_end = unfinished_start
        released = joined[self._passed_on : safe_end]
        self._passed_on = safe_end
        return released

    def _first_match(self, text: str) -> _StopMatch | None:
        """Find the stop string that counts among those that begin in the earlier text."""
        matches = []
        for number, stop in enumerate(self._stops):
            start = text.find(stop, 0, len(self._earlier) + len(stop) - 1)
            if start >= 0:
                matches.append(
                    _StopMatch(end=start + len(stop), number=number, start=start)
                )
        return min(matches, default=None)

    def _precedes_engines_stop(
        self, match: _StopMatch, text_end: int, ended_by: str
    ) -> bool:
        """Tell whether a match counts rather than the stop string that the engine has found at the end of its text."""
        if ended_by not in self._stops:
            return True
        return (match.end, match.number) < (text_end, self._stops.index(ended_by))

    def _unfinished_start(self, joined: str) -> int | None:
        """Return where the first stop string begins in the earlier text that further text may complete."""
        for start in range(len(self._earlier)):
            tail = joined[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return None


class _Seam(Protocol):
    """Where one engine's part of an answer is joined to what came before it.

    Attributes:
        sent: Characters of the answer's text so far.
        has_ended: Whether the answer has ended before the engine's stream.
    """

    sent: int

    @property
    def has_ended(self) -> bool: ...

    def receive(self, chunks: Sequence[Chunk]) -> bool:
        """Pass on what the part adds to the answer; tell whether it may send more now."""


@dataclass(slots=True)
class _TextSeam:
    """Where the text that an engine completes is joined to the text before it."""

    joiner: StopStringJoiner
    progress: AnswerProgress
    terms: ContinuationTerms
    out: ReceiveChunks
    begins: int  # characters of the answer before it
    sent: int  # characters of the answer so far

    @property
    def has_ended(self) -> bool:
        return self.joiner.stopped is not None

    def receive(self, chunks: Sequence[Chunk]) -> bool:
        joiner = self.joiner
        joined_chunks = []
        for chunk in chunks:
            if not chunk.choice:
                continue
            finish_reason = chunk.finish_reason
            stop_reason = chunk.stop_reason
            ended_by = ""
            if isinstance(stop_reason, str) and not self.terms.includes_stop:
                ended_by = stop_reason
            text = joiner.pass_on(
                chunk.text, last=finish_reason is not None, ended_by=ended_by
            )
            self.progress.note((chunk,))
            self.sent += len(text)
            if joiner.stopped is not None:
                finish_reason = "stop"
                stop_reason = joiner.stopped
            joined_chunks.append(
                Chunk(
                    text=text,
                    token_ids=chunk.token_ids,
                    finish_reason=finish_reason,
                    stop_reason=stop_reason,
                )
            )
            if joiner.stopped is not None:
                text_so_far = self.progress.text + ended_by
                self.progress.stop_at(text_so_far[: self.begins + joiner.end])
                break
        return self.out(joined_chunks) and joiner.stopped is None


@dataclass(slots=True)
class _ResumeSeam:
    """Where the stream of an engine that resumes an answer is joined to what its caller has."""

    splicer: Splicer
    progress: AnswerProgress
    out: ReceiveChunks
    sent: int
    has_ended: bool = False  # the engine sees the end of the answer itself

    def receive(self, chunks: Sequence[Chunk]) -> bool:
        unsent_chunks = []
        for chunk in chunks:
            unsent = self.splicer.splice(chunk)
            if unsent is None:
                continue
            self.progress.note((unsent,))
            self.sent += len(unsent.text)
            unsent_chunks.append(unsent)
        return self.out(unsent_chunks)


class _KnownText(NamedTuple):
    """A point of an answer at which no character is cut, and the answer's text up to it."""

    tokens: int
    text: str


class _Remainder(NamedTuple):
    """What is left to compute of an answer when its engine has failed."""

    tokens_to_read: int  # the prompt and the output so far
    output_tokens: int  # of those, the output so far
    # output tokens that may follow; None: as many as the context leaves
    tokens_left: int | None
    number: int  # the number of the continuation, from 1


class _Plan(NamedTuple):
    """How the next engine is to go on with an answer.

    Attributes:
        joiner: Joins the text that it completes to the text before it; None: it is to resume the answer.
        request_for: Returns the request, given the output tokens that may follow.
    """

    remainder: _Remainder
    joiner: StopStringJoiner | None
    request_for: Callable[[int], EngineRequest]


@dataclass(frozen=True, slots=True)
class Failover:
    fleet: Fleet
    policy: PolicyStore
    upstream: Upstream
    telemetry: Telemetry
    attempts: int  # the most continuations of one answer
    # a tier's context must leave so many tokens for a request without a limit of its own
    default_max_tokens: int


@dataclass(frozen=True, slots=True)
class Continuation:
    failover: Failover
    decision: Decision
    request: EngineRequest
    terms: ContinuationTerms | None  # those of plain text; None: only by resuming it
    progress: AnswerProgress

    async def relay(
        self,
        answer: EngineStream,
        broken: EngineBrokeError,
        receive: ReceiveChunks,
        drain: Drain,
    ) -> None:
        """Let ``receive`` have the rest of an answer; raise ``broken``, or what broke last, if nobody can continue it.

        Of an answer that ends with a stop string over a break, tokens after that string do not count.
        """
        await self._relay_rest(answer, broken, receive, drain)
        if self.progress.stop_token is not None:
            await self._end_with_stop_token(self.progress.stop_token, answer.parts[-1])

    async def _relay_rest(
        self,
        answer: EngineStream,
        broken: EngineBrokeError,
        receive: ReceiveChunks,
        drain: Drain,
    ) -> None:
        progress = self.progress
        failing = answer
        failed_replica_ids = set[str]()
        sent_characters = progress.received_characters
        for number in count(1):
            log.warning(
                "request %s: %s on %s",
                self.request.request_id,
                broken,
                failing.replica_id,
            )
            await failing.aclose(broken)
            if self._lacks_only_its_end(answer):
                return
            failed_replica_ids.add(failing.replica_id)
            plan = None
            if number <= self.failover.attempts:
                plan = await self._plan(sent_characters, failing, number)
            if plan is None:
                raise broken
            if plan.joiner is not None and plan.remainder.tokens_left == 0:
                _end_at_length(progress, plan.joiner, receive)
                return
            exclusions = self._exclusions(
                failed_replica_ids, failing.replica_id, broken
            )
            part = await self._next_part(plan, answer.tier, exclusions, broken)
            answer.parts.append(part)
            self.failover.telemetry.record_continuation(
                failing.replica_id, part.replica_id, len(progress.output_ids), broken
            )
            seam = self._seam(
                plan, receive, sent_characters, first_event=answer.first_event
            )
            failing = part
            try:
                await _flow(part, seam, drain)
            except SeamError:
                raise
            except EngineBrokeError as error:
                broken = without_trace(error)
                sent_characters = seam.sent
            else:
                return

    def _lacks_only_its_end(self, answer: EngineStream) -> bool:
        """Tell whether all of an answer has come, but for events that the router writes itself.

        Where its caller wants token counts that did not come and that nobody has counted, an engine that resumes the answer
        tells them.
        """
        progress = self.progress
        if progress.finish_reason is None:
            return False
        if not self.request.wants_usage or not progress.can_be_resumed:
            return True
        counts_by_engine = (answer.usage, *(part.answer_usage for part in answer.parts))
        return bool(progress.usage) or any(counts_by_engine)

    async def _plan(
        self, sent_characters: int, failing: EngineStream, number: int
    ) -> _Plan | None:
        """Return how the next engine is to go on, as plain text if that is safe; None: none can."""
        if self.terms is not None and self.progress.finish_reason is None:
            joiner = await self._joiner(self.terms, sent_characters, failing)
            if joiner is not None:
                remainder = self._remainder(self.terms.max_tokens, number)
                request_for = partial(
                    _request_to_continue,
                    self.request,
                    self.terms,
                    self.progress,
                    remainder,
                )
                return _Plan(remainder, joiner, request_for)
        if not self.progress.can_be_resumed:
            return None
        remainder = self._remainder(self.request.output_limit, number)
        point = ResumePoint(
            token_ids=self.progress.output_ids,
            finish_reason=_engines_finish_reason(self.progress.finish_reason),
        )
        request = self.request.resumed_at(point, number)
        return _Plan(remainder, None, lambda _max_tokens: request)

    def _seam(
        self, plan: _Plan, out: ReceiveChunks, sent: int, *, first_event: bytes
    ) -> _Seam:
        """Return what joins the next part to the answer, of which so many characters of text were sent."""
        progress = self.progress
        if plan.joiner is not None:
            assert self.terms is not None
            return _TextSeam(
                joiner=plan.joiner,
                progress=progress,
                terms=self.terms,
                out=out,
                begins=sent,
                sent=sent,
            )
        splicer = progress.splicer
        assert splicer is not None
        splicer.begin(
            Sent(
                first_event,
                text=progress.text[:sent],
                has_finish_reason=progress.finish_reason is not None,
            )
        )
        progress.tokens_come_apart = True
        return _ResumeSeam(splicer=splicer, progress=progress, out=out, sent=sent)

    async def _joiner(
        self, terms: ContinuationTerms, sent_characters: int, failing: EngineStream
    ) -> StopStringJoiner | None:
        """Go to where the next part begins, and return what joins it to the answer; None if that is not safe."""
        if not await self._go_to_known_text(terms, sent_characters, failing):
            return None
        text = self.progress.text
        joiner = StopStringJoiner(
            text[:sent_characters],
            text[sent_characters:],
            terms.stops,
            include=terms.includes_stop,
        )
        if joiner.passed_over and terms.min_tokens:
            # with min_tokens, nobody knows whether a stop string that was passed over counts
            return None
        return joiner

    def _exclusions(
        self, failed_ids: Collection[str], failing_id: str, broken: EngineBrokeError
    ) -> list[Collection[str]]:
        """Return the ids of the replicas to leave out, round by round; each replica is asked in one round at most.

        In the first round replicas are asked that have not failed this answer, in the second those that failed it earlier.
        The one that has just failed is asked in the last round, because only its connection may have failed. If it stalled
        there is no such round: it would stall again.
        """
        all_ids = {replica.id for replica in self.failover.fleet.replicas}
        failed_earlier_ids = set(failed_ids) - {failing_id}
        all_but_failed_earlier = all_ids - failed_earlier_ids
        exclusions: list[Collection[str]] = [failed_ids, all_but_failed_earlier]
        if not isinstance(broken, EngineStalledError):
            all_but_failing = all_ids - {failing_id}
            exclusions.append(all_but_failing)
        return exclusions

    async def _next_part(
        self,
        plan: _Plan,
        first_tier: TierName,
        exclusions: Sequence[Collection[str]],
        broken: EngineBrokeError,
    ) -> EngineStream:
        """Begin the next part on the first tier, or on one that the policy allows now; raise ``broken`` if none could."""
        remainder = plan.remainder
        unfit_ids = set[str]()
        if plan.joiner is None:
            unfit_ids = {
                replica.id
                for replica in self.failover.fleet.replicas
                if not replica.resumes
            }
        # One output token is enough to be a successor: ``_fits`` looks at each tier's own context, of which a request
        # without a limit may use less than it asked for.
        query = replace(
            self.decision.query, prompt_tokens=remainder.tokens_to_read, max_tokens=1
        )
        tiers = (first_tier, *self.failover.policy.successors(first_tier, query))
        cause: UpstreamError | None = None
        for excluded_ids, tier in product(exclusions, tiers):
            if not self._reads_alike(first_tier, tier):
                continue
            if not self._fits(remainder, tier, is_first=tier is first_tier):
                continue
            try:
                return await self._open_part(plan, tier, {*excluded_ids, *unfit_ids})
            except UpstreamError as error:
                # That nobody has a slot left says less than why an attempt failed before.
                if cause is None or not isinstance(error, NoSlotError):
                    cause = without_trace(error)
        raise broken from cause

    def _remainder(self, max_tokens: int | None, number: int) -> _Remainder:
        progress = self.progress
        # Of an API whose events have no ids of the prompt, its length is what was estimated.
        prompt_tokens = len(progress.prompt_ids) or self.decision.query.prompt_tokens
        output_tokens = len(progress.output_ids)
        tokens_left = None
        if max_tokens is not None:
            tokens_left = max(max_tokens - output_tokens, 0)
        return _Remainder(
            tokens_to_read=prompt_tokens + output_tokens,
            output_tokens=output_tokens,
            tokens_left=tokens_left,
            number=number,
        )

    def _reads_alike(self, first_tier: TierName, tier: TierName) -> bool:
        """Tell whether the tokens of a tier's prompts and answers mean the same to another tier."""
        fleet = self.failover.fleet
        return (
            fleet.spec(first_tier).prompt_identity == fleet.spec(tier).prompt_identity
        )

    def _fits(self, remainder: _Remainder, tier: TierName, *, is_first: bool) -> bool:
        """Tell whether a tier's context has room for what is left of an answer.

        An answer without a limit of its own may stay on its first tier until that tier's context is full.
        """
        room_needed = remainder.tokens_left
        if room_needed is None:
            room_needed = 1 if is_first else self.failover.default_max_tokens
        return (
            remainder.tokens_to_read + room_needed
            <= self.failover.fleet.spec(tier).max_model_len
        )

    async def _open_part(
        self, plan: _Plan, tier: TierName, excluded_ids: Collection[str]
    ) -> EngineStream:
        failover = self.failover
        remainder = plan.remainder
        room = failover.fleet.spec(tier).max_model_len - remainder.tokens_to_read
        max_tokens = remainder.tokens_left or room
        expected_tokens = min(
            max_tokens, remainder.tokens_left or failover.default_max_tokens
        )
        request = plan.request_for(max_tokens)
        query = replace(
            self.decision.query,
            prompt_tokens=remainder.tokens_to_read,
            max_tokens=max(expected_tokens, 1),
        )
        decision = replace(self.decision, tier=tier, query=query)
        part = await failover.upstream.open(
            decision,
            request,
            exclude=excluded_ids,
            is_continuation=True,
            elsewhere=False,
        )
        assert isinstance(part, EngineStream)
        return part

    async def _go_to_known_text(
        self, terms: ContinuationTerms, sent_characters: int, failing: EngineStream
    ) -> bool:
        """Go to a point of the answer, not before what was sent, where its text is known; False: there is none.

        If the stream does not show such a point, engines are asked for the text. They are asked as well for what a parser
        may have held back at a point that it shows.
        """
        progress = self.progress
        if not self._is_continuable(terms):
            return False
        is_text_known = progress.settled
        if not is_text_known or progress.point != progress.begun:
            for replica in self._replicas_to_ask(failing):
                known = await self._ask_for_text(replica, is_text_known=is_text_known)
                if known is not None and len(known.text) >= sent_characters:
                    progress.rest_at(known.tokens, known.text)
                    return True
        if is_text_known:
            point = progress.point
            progress.rest_at(point.tokens, progress.text[: point.characters])
        return is_text_known

    def _is_continuable(self, terms: ContinuationTerms) -> bool:
        progress = self.progress
        if not progress.is_continuable or not progress.prompt_ids:
            return False
        # Below min_tokens, nobody knows which of the next engine's tokens is the first that may complete a stop string.
        return not terms.stops or terms.min_tokens <= len(progress.output_ids)

    def _replicas_to_ask(self, failing: EngineStream) -> list[Replica]:
        """Return the ready replicas, and last the one that has failed: only its connection may have failed."""
        ready = []
        failed = []
        for replica in self.failover.fleet.replicas:
            if not self._reads_alike(failing.tier, replica.spec.name):
                continue
            if replica.id == failing.replica_id:
                failed.append(replica)
            elif replica.state.status is ReplicaStatus.READY:
                ready.append(replica)
        return ready + failed

    async def _ask_for_text(
        self, replica: Replica, *, is_text_known: bool
    ) -> _KnownText | None:
        """Ask an engine for the answer's text at the last known point, or at one near the end; None: it cannot tell."""
        try:
            async with asyncio.timeout(DETOKENIZE_TIMEOUT_S):
                if is_text_known:
                    return await self._text_at_last_point(replica)
                return await self._text_near_the_end(replica)
        except CANNOT_TELL:
            return None

    async def _text_at_last_point(self, replica: Replica) -> _KnownText | None:
        """Return the text at the last known point, with what a parser in the engine may hold back.

        A parser for reasoning holds back a part of a token's text until it knows that no tag begins there.
        """
        progress = self.progress
        begun = progress.begun
        end = progress.point
        context_ids = progress.output_ids[: begun.tokens][-CONTEXT_TOKENS:]
        context_text = await self._context_text(context_ids, replica)
        ids = [*context_ids, *progress.output_ids[begun.tokens : end.tokens]]
        engine_text = await self._detokenized(ids, replica)
        held_text = _text_beyond(
            progress.text[begun.characters :], engine_text, context_text
        )
        if held_text is None:
            return None
        if held_text:
            text_before = await self._detokenized(ids[:-1], replica)
            if len(held_text) > len(engine_text) - len(text_before):
                # it is more than a part of the last token, such as a special token
                return None
        return _KnownText(end.tokens, progress.text + held_text)

    async def _text_near_the_end(self, replica: Replica) -> _KnownText | None:
        """Return the last point that cuts no character, with the text there, sent or not; None if the engine cannot tell.

        Its text is used if it agrees with what came, and has as many more characters as an engine holds back.
        """
        progress = self.progress
        context_ids = progress.output_ids[: progress.point.tokens][-CONTEXT_TOKENS:]
        context_text = await self._context_text(context_ids, replica)
        known = await self._match_text(replica, context_ids, context_text, hidden=())
        if known is None and progress.silent:
            hidden = await self._special_tokens(replica)
            known = await self._match_text(
                replica, context_ids, context_text, hidden=hidden
            )
        return known

    async def _special_tokens(self, replica: Replica) -> list[int]:
        """Return the numbers of silent tokens that are no part of a character: special ones, which answers leave out."""
        special = []
        for number in self.progress.silent:
            text = await self._detokenized([self.progress.output_ids[number]], replica)
            if BROKEN_CHARACTER not in text:
                special.append(number)
        return special

    async def _match_text(
        self,
        replica: Replica,
        context_ids: Sequence[int],
        context_text: str | None,
        *,
        hidden: Collection[int],
    ) -> _KnownText | None:
        """Match an engine's text of the last tokens against what came, ignoring ``hidden`` tokens, which produce no text."""
        progress = self.progress
        output_ids = progress.output_ids
        start = progress.point
        later_text = progress.text[start.characters :]
        first_end = max(len(output_ids) - MAX_DROPPED_TOKENS, start.tokens)
        for end in range(len(output_ids), first_end, -1):
            ids = [
                output_ids[number]
                for number in range(start.tokens, end)
                if number not in hidden
            ]
            engine_text = await self._detokenized([*context_ids, *ids], replica)
            if engine_text.endswith(BROKEN_CHARACTER):
                continue  # within a character, which the next engine computes again
            for reading in _readings(engine_text, context_text):
                held_back = len(reading) - len(later_text)
                if reading.startswith(later_text) and held_back == progress.held_back:
                    return _KnownText(end, progress.text[: start.characters] + reading)
            return None
        return None

    async def _end_with_stop_token(
        self, stop_token: StopToken, last_part: EngineStream
    ) -> None:
        """Drop the tokens that were computed after the one that completes the answer's stop string.

        There may be many, because the last engine holds text back and does not see a stop string that began before its part.
        Where no engine can tell which token completes the string, only those tokens count that it must have taken.
        """
        progress = self.progress
        tokens = stop_token.fewest
        if stop_token.fewest < stop_token.most:
            for replica in self._replicas_to_ask(last_part):
                tokens_by_engine = await self._ask_for_tokens(replica, stop_token)
                if tokens_by_engine is not None:
                    tokens = tokens_by_engine
                    break
        progress.end_with(tokens)
        last_part.output_tokens = max(tokens - progress.begun.tokens, 0)

    async def _ask_for_tokens(
        self, replica: Replica, stop_token: StopToken
    ) -> int | None:
        """Ask an engine how many tokens an answer with its stop string has; None: it cannot tell."""
        try:
            async with asyncio.timeout(DETOKENIZE_TIMEOUT_S):
                return await self._tokens_to_stop(replica, stop_token)
        except CANNOT_TELL:
            return None

    async def _tokens_to_stop(
        self, replica: Replica, stop_token: StopToken
    ) -> int | None:
        """Return after how many tokens an engine sees the stop string; None if all tokens have another text.

        These are the fewest whose text includes it and does not end within a character: vLLM keeps such text back.
        """
        output_ids = self.progress.output_ids
        start = stop_token.start
        text_after_start = stop_token.text[start.characters :]
        context_ids = output_ids[: start.tokens][-CONTEXT_TOKENS:]
        context_text = await self._context_text(context_ids, replica)

        async def readings_of(tokens: int) -> tuple[str, ...]:
            ids = [*context_ids, *output_ids[start.tokens : tokens]]
            engine_text = await self._detokenized(ids, replica)
            return _readings(engine_text, context_text)

        async def are_enough(tokens: int) -> bool:
            readings = await readings_of(tokens)
            return any(reading.startswith(text_after_start) for reading in readings)

        fewest = stop_token.fewest
        most = stop_token.most
        if not await are_enough(most):
            return None
        while fewest < most:
            middle = (fewest + most) // 2
            if await are_enough(middle):
                most = middle
            else:
                fewest = middle + 1
        while fewest < stop_token.most and _end_within_character(
            await readings_of(fewest)
        ):
            fewest += 1
        return fewest

    async def _context_text(
        self, context_ids: Sequence[int], replica: Replica
    ) -> str | None:
        """Return an engine's text of the tokens before those whose text is wanted; None: there are none."""
        if not context_ids:
            return None
        return await self._detokenized(context_ids, replica)

    async def _detokenized(self, ids: Sequence[int], replica: Replica) -> str:
        if not ids:
            return ""
        body = to_json({"model": replica.model, "tokens": list(ids)})
        _, _, content = await self.failover.upstream.pass_on(
            replica.url, replica.api_key, DETOKENIZE, body
        )
        text = read_json(content)["prompt"]
        if not isinstance(text, str):
            raise TypeError("no text")
        return text


async def _flow(part: EngineStream, seam: _Seam, drain: Drain) -> None:
    """Pass on an engine's part of an answer, to its end or to a stop string that begins before it."""
    while not await part.flow(seam.receive) and not seam.has_ended:
        await drain()
    await part.aclose()


def _end_at_length(
    progress: AnswerProgress, joiner: StopStringJoiner, receive: ReceiveChunks
) -> None:
    """End an answer of which every token has come: only its last event is missing."""
    progress.finish_reason = "length"
    last_text = joiner.pass_on("", last=True)
    receive((Chunk(text=last_text, finish_reason="length"),))


def _engines_finish_reason(finish_reason: str | None) -> str | None:
    """Return an answer's finish reason as the engine's core knows it, which knows nothing of tool calls."""
    if finish_reason is None or finish_reason == "length":
        return finish_reason
    return "stop"


def _text_beyond(
    sent_text: str, engine_text: str, context_text: str | None
) -> str | None:
    """Return what an engine's text has beyond what was sent; None: it does not begin with that, or cuts a character."""
    for reading in _readings(engine_text, context_text):
        if not reading.startswith(sent_text):
            continue
        if reading.endswith(BROKEN_CHARACTER):
            return None
        return reading[len(sent_text) :]
    return None


def _end_within_character(readings: Sequence[str]) -> bool:
    return any(reading.endswith(BROKEN_CHARACTER) for reading in readings)


def _readings(text: str, context_text: str | None) -> tuple[str, ...]:
    """Return what the text of some tokens may be, from an engine's text of context and tokens, and of the context alone."""
    if context_text is None:
        return text, " " + text  # some tokenizers drop a space where a text begins
    if not text.startswith(context_text):
        return ()
    return (text.removeprefix(context_text),)


def _request_to_continue(
    origin: EngineRequest,
    terms: ContinuationTerms,
    progress: AnswerProgress,
    remainder: _Remainder,
    max_tokens: int,
) -> EngineRequest:
    """Return the request to the next engine: to complete the ids of the prompt and of the output so far."""
    sampling = dict(terms.sampling)
    if "min_tokens" in sampling:
        sampling["min_tokens"] = max(terms.min_tokens - remainder.output_tokens, 0)
    prompt_ids = [*progress.prompt_ids, *progress.output_ids]
    return EngineRequest(
        document={**sampling, "prompt": prompt_ids, "max_tokens": max_tokens},
        path="/v1/completions",
        operation="text_completion",
        request_id=f"{origin.request_id}-c{remainder.number}",
        # above new requests of its class: its caller is in the middle of an answer
        priority=terms.priority - 1,
        asks_token_ids=True,
        adapter=origin.adapter,
        continued_tokens=remainder.output_tokens,
    )
