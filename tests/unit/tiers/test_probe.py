"""What an engine may answer that is not as vLLM answers: each is an error that says what was wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from starlette.responses import StreamingResponse

from tests.fakes.engine import Behaviour, FakeEngine, serving
from tests.unit.tiers.metrics_pages import GAUGES
from tiers.errors import ProbeError, RefusedError
from tiers.probe import CHAT, COMPLETIONS, Counters, EngineProbe
from tiers.snapshot import Gauges
from tiers.spec import Adapter

pytestmark = pytest.mark.anyio
MODELS = "/v1/models"
TOKENIZE = "/tokenize"
METRICS = "/metrics"
DEEP = "[" * 100_000
ODD = [
    (
        MODELS,
        '{"object": "list", "data": []}',
        "data: Tuple should have at least 1 item",
    ),
    (MODELS, '{"error": {"message": "loading"}}', "answers with an error: loading"),
    (MODELS, '{"data": [{"id": "m"}]}', "max_model_len: Field required"),
    (
        MODELS,
        '{"data": [{"id": "m", "max_model_len": NaN}]}',
        "max_model_len: Input should be a finite number",
    ),
    (MODELS, '{"data": {"id": "m"}}', "data: Input should be a valid tuple"),
    (MODELS, "[]", "the answer: Input should be a valid dictionary"),
    (MODELS, "<html>", "does not answer JSON"),
    (MODELS, DEEP, "does not answer JSON"),
    (TOKENIZE, '{"error": "loading"}', "answers with an error: loading"),
    (TOKENIZE, '{"tokens": null}', "tokens: Input should be a valid tuple"),
    (TOKENIZE, '{"tokens": [1, "x"]}', "tokens.1: Input should be a valid integer"),
    (CHAT, 'data: {"choi\n\n', "does not answer JSON"),
    (
        CHAT,
        "data: []\n\ndata: [DONE]\n\n",
        "the answer: Input should be a valid dictionary",
    ),
    (
        CHAT,
        'data: {"choices": [{"delta": "x"}]}\n\ndata: [DONE]\n\n',
        "choices.0.delta: Input should be",
    ),
    (
        CHAT,
        'data: {"choices": null}\n\ndata: [DONE]\n\n',
        "choices: Input should be a valid tuple",
    ),
    (
        CHAT,
        'data: {"usage": {"completion_tokens": -1}}\n\ndata: [DONE]\n\n',
        "usage.prompt_tokens: Field required",
    ),
    (
        CHAT,
        'data: {"error": {"message": "engine died"}}\n\n',
        "answers with an error: engine died",
    ),
    (CHAT, 'data: {"choices": []}\n\n', "the stream ends without [DONE]"),
    (CHAT, "", "the stream ends without [DONE]"),
    (
        COMPLETIONS,
        '{"choices": [{"index": 0, "text": "x"}]}',
        "gives no log-probabilities with token ids",
    ),
    (COMPLETIONS, '{"choices": []}', "gives 0 answers to one prompt"),
    (METRICS, "", "has no vLLM gauges"),
    (METRICS, GAUGES.format("NaN", 0), "vllm:num_requests_running is NaN"),
    (METRICS, GAUGES.format(0, "+Inf"), "vllm:kv_cache_usage_perc is +Inf"),
    (METRICS, GAUGES.format(-1, 0), "vllm:num_requests_running is -1"),
    (METRICS, GAUGES.format("many", 0), "vllm:num_requests_running is many"),
    (
        METRICS,
        GAUGES.format(0, 0) + "vllm:prompt_tokens_total NaN\n",
        "vllm:prompt_tokens_total is NaN",
    ),
]
ASKED: dict[str, Callable[[EngineProbe], Awaitable[Any]]] = {
    MODELS: lambda probe: probe.model(),
    TOKENIZE: lambda probe: probe.text_tokens("m", "hello"),
    CHAT: lambda probe: probe.generate(CHAT, {"model": "m", "messages": []}, 10),
    COMPLETIONS: lambda probe: probe.continuation("m", (1, 2), 2, 10),
    METRICS: lambda probe: probe.readings(),
}


@pytest.mark.parametrize(
    ("path", "content", "said"), ODD, ids=[f"{path} {said}" for path, _, said in ODD]
)
async def test_what_is_no_answer_of_vllms(path: str, content: str, said: str) -> None:
    """Every malformed answer of status 200 is a ProbeError with the address and what is wrong, on every path."""
    async with (
        serving(FakeEngine(Behaviour(instead={path: content})).app) as url,
        httpx.AsyncClient() as client,
    ):
        with pytest.raises(ProbeError) as caught:
            await ASKED[path](EngineProbe(client, url, ""))
    assert str(caught.value).startswith(url + path)
    assert said in str(caught.value)


async def test_what_vllm_answers_is_read() -> None:
    async with serving(FakeEngine().app) as url, httpx.AsyncClient() as client:
        probe = EngineProbe(client, url, "")
        assert await probe.model() == ("fake", 8192, "fake", (), False)
        assert await probe.text_tokens("m", "a bb") == [1, 2]
        answer = await ASKED[CHAT](probe)
        assert answer.text == "The capital of France is Paris."
        assert answer.completion_tokens == 7
        assert await ASKED[COMPLETIONS](probe) == ((0, 1), (-0.1, -0.1))
        gauges, counters = await probe.readings()
        assert gauges.running == 0
        assert gauges.kv_cache_usage == 0.25
        assert counters.output_tokens == 7


async def test_scores_samples_and_messages_are_read() -> None:
    async with serving(FakeEngine().app) as url, httpx.AsyncClient() as client:
        probe = EngineProbe(client, url, "")
        scores = await probe.token_scores("m", (5, 6, 7), 10)
        assert [score.logprob for score in scores] == [-0.1, -0.1]
        assert [score.rank for score in scores] == [1, 1]
        assert await probe.detokenize("m", (1, 2)) == "x xx"
        body = {"model": "m", "prompt": [5, 6], "max_tokens": 2}
        (sample,) = await probe.sample(body, 10)
        assert sample.text == "The capital"
        assert sample.logprobs == (-0.1, -0.1)
        assert sample.finish_reason == "length"
        message = await probe.chat({"model": "m", "messages": []}, 10)
        assert message["content"] == "The capital of France is Paris."
        (model,) = await probe.models()
        assert model.name == "fake"


async def test_ranked_scores_of_other_tokens_are_an_error() -> None:
    scored = (
        '{"choices": [{"prompt_logprobs": [null, {"9": {"logprob": -1, "rank": 1}}]}]}'
    )
    behaviour = Behaviour(instead={COMPLETIONS: scored})
    async with serving(FakeEngine(behaviour).app) as url, httpx.AsyncClient() as client:
        with pytest.raises(ProbeError, match="scores other tokens than those"):
            await EngineProbe(client, url, "").token_scores("m", (5, 6), 10)


async def test_a_chat_without_a_message_is_an_error() -> None:
    behaviour = Behaviour(instead={CHAT: '{"choices": [{"text": "x"}]}'})
    async with serving(FakeEngine(behaviour).app) as url, httpx.AsyncClient() as client:
        with pytest.raises(ProbeError, match="answers without a message"):
            await EngineProbe(client, url, "").chat({"model": "m"}, 10)


async def test_a_refusal_is_told_from_other_errors() -> None:
    """HTTP 400 means that the engine does not take such a request; its text is in the error."""
    behaviour = Behaviour(status=400, error="no such field")
    async with serving(FakeEngine(behaviour).app) as url, httpx.AsyncClient() as client:
        probe = EngineProbe(client, url, "")
        with pytest.raises(RefusedError, match=r"HTTP 400: .*no such field"):
            await ASKED[CHAT](probe)
        behaviour.status = 500
        with pytest.raises(ProbeError, match="HTTP 500") as caught:
            await ASKED[COMPLETIONS](probe)
        assert not isinstance(caught.value, RefusedError)


async def test_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that never ends, or that trickles for ever, does not hold its watcher up."""

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 10_000
            await asyncio.sleep(0)

    async def trickle() -> AsyncIterator[bytes]:
        while True:
            yield b"x"
            await asyncio.sleep(0.01)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] in {"http", "lifespan"}
        if scope["type"] == "http":
            parts = trickle() if scope["path"] in {MODELS, "/health"} else endless()
            await StreamingResponse(parts)(scope, receive, send)

    monkeypatch.setattr("tiers.probe.MAX_BYTES", 1_000_000)
    monkeypatch.setattr("tiers.probe.ANSWER_S", 0.5)
    async with serving(app) as url, httpx.AsyncClient() as client:
        probe = EngineProbe(client, url, "")
        assert not await probe.alive()
        with pytest.raises(ProbeError, match=r"no complete answer within 0\.5 s"):
            await probe.model()
        monkeypatch.setattr("tiers.probe.ANSWER_S", 30.0)
        for path in (METRICS, TOKENIZE, CHAT):
            with pytest.raises(ProbeError, match="answers more than 1000000 bytes"):
                await ASKED[path](probe)


async def test_an_address_that_is_none() -> None:
    """Nothing can be asked there, and that is said like every other fault."""
    async with httpx.AsyncClient() as client:
        for url in ("http://[", "nowhere", "http://127.0.0.1:1"):
            probe = EngineProbe(client, url, "")
            assert not await probe.alive()
            for ask in ASKED.values():
                with pytest.raises(ProbeError):
                    await ask(probe)


def test_counters_are_added_and_subtracted_field_by_field() -> None:
    one = Counters(10, 20, ttft_s=3, first_tokens=4, cache_hits=5, cache_queries=6)
    other = Counters(1, 2, ttft_s=3, first_tokens=4, cache_hits=5, cache_queries=6)
    assert one.since(other) == Counters(
        9, 18, ttft_s=0, first_tokens=0, cache_hits=0, cache_queries=0
    )
    assert one.since(other).plus(other) == one


async def readings(page: str) -> tuple[Gauges, Counters]:
    async with (
        serving(FakeEngine(Behaviour(instead={METRICS: page})).app) as url,
        httpx.AsyncClient() as client,
    ):
        return await EngineProbe(client, url, "").readings()


async def test_counters_are_summed_over_their_labels() -> None:
    """One line for each engine of a data-parallel server; those of other metrics are not taken for them."""
    page = GAUGES.format(0, 0) + "".join(
        f'vllm:prompt_tokens_total{{engine="{n}",model_name="m"}} {100 * n}\n'
        for n in (1, 2)
    )
    page += "vllm:prompt_tokens_total_created 7\nvllm:prefix_cache_hits_total 1.5e1\n# vllm:prefix_cache_hits_total 9\n"
    _, counters = await readings(page)
    assert counters == Counters(prompt_tokens=300, cache_hits=15)


async def test_labels_may_hold_braces() -> None:
    """Prometheus escapes line breaks and quotes in labels, and no braces."""
    page = GAUGES.format(0, 0) + (
        'vllm:cache_config_info{block_size="16",extra="{}",kv_cache_size_tokens="512"} 1.0\n'
        'vllm:prompt_tokens_total{model_name="{m}"} 7\n'
    )
    gauges, counters = await readings(page)
    assert gauges.kv_block_tokens == 16
    assert gauges.kv_cache_tokens == 512
    assert counters.prompt_tokens == 7


async def test_drafts_are_counted() -> None:
    """Those proposed, and those accepted; the counters by position in a draft are others."""
    page = (
        GAUGES.format(0, 0)
        + "vllm:spec_decode_num_draft_tokens_total 36\nvllm:spec_decode_num_accepted_tokens_total 27\n"
    )
    page += 'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 12\nvllm:spec_decode_num_drafts_total 12\n'
    gauges, _ = await readings(page)
    assert gauges.drafted == 36
    assert gauges.accepted == 27
    assert gauges.acceptance == 0.75
    gauges, _ = await readings(GAUGES.format(0, 0))
    assert gauges.acceptance is None


async def test_older_engines_name_the_cache_gauge_otherwise() -> None:
    """The new name wins where both are there; the cache's size is read of the labels of its configuration."""
    page = "vllm:num_requests_running 1\nvllm:gpu_cache_usage_perc 0.5\n"
    gauges, _ = await readings(page)
    assert gauges == Gauges(running=1, waiting=0, kv_cache_usage=0.5)
    page += 'vllm:kv_cache_usage_perc 0.25\nvllm:cache_config_info{block_size="16",kv_cache_size_tokens="4096"} 1\n'
    gauges, _ = await readings(page)
    assert gauges.kv_cache_usage == 0.25
    assert gauges.kv_cache_tokens == 4096


async def test_the_cores_of_a_data_parallel_engine_are_one_replica() -> None:
    page = "".join(
        f'vllm:num_requests_running{{engine="{core}",model_name="m"}} {running}\n'
        f'vllm:num_requests_waiting{{engine="{core}",model_name="m"}} {waiting}\n'
        f'vllm:kv_cache_usage_perc{{engine="{core}",model_name="m"}} {usage}\n'
        f'vllm:generation_tokens_total{{engine="{core}",model_name="m"}} 5\n'
        f'vllm:cache_config_info{{block_size="16",engine="{core}",kv_cache_size_tokens="4096"}} 1\n'
        for core, running, waiting, usage in ((0, 7, 2, 0.75), (1, 0, 0, 0.25))
    )
    gauges, counters = await readings(page)
    assert (gauges.running, gauges.waiting) == (7, 2)
    assert gauges.kv_cache_usage == 0.5
    assert gauges.kv_cache_tokens == 8192
    assert gauges.kv_block_tokens == 16
    assert counters.output_tokens == 10


async def test_the_tokens_of_a_prompt_are_scored() -> None:
    """Each but the first, in their order."""
    async with (
        serving(FakeEngine(Behaviour(first_id=1)).app) as url,
        httpx.AsyncClient() as client,
    ):
        assert await EngineProbe(client, url, "").prompt_logprobs(
            "m", (7, 8, 9), 10
        ) == (-0.2, -0.2)


@pytest.mark.parametrize(
    "places",
    [
        "null",
        "[null]",
        '[null, {"9": {"logprob": -1}}]',
        '[null, {"8": {}}]',
        "[null, null, null]",
    ],
)
async def test_scores_of_other_tokens_are_an_error(places: str) -> None:
    answer = f'{{"choices": [{{"index": 0, "text": "", "prompt_logprobs": {places}}}]}}'
    behaviour = Behaviour(instead={COMPLETIONS: answer})
    async with serving(FakeEngine(behaviour).app) as url, httpx.AsyncClient() as client:
        with pytest.raises(ProbeError):
            await EngineProbe(client, url, "").prompt_logprobs("m", (7, 8), 10)


async def test_a_generation_of_one_token_has_no_time_between_tokens() -> None:
    async with (
        serving(FakeEngine(Behaviour(answer=("x",))).app) as url,
        httpx.AsyncClient() as client,
    ):
        answer = await ASKED[CHAT](EngineProbe(client, url, ""))
        assert answer.text == "x"
        assert answer.completion_tokens == 1
        assert answer.tpot_ms is None
        assert answer.ttft_ms > 0


async def test_a_stream_cut_at_any_byte_is_read_the_same() -> None:
    stream = b'data: {"choices": [{"delta": {"content": "a"}}]}\r\n\r\n: ping\n\ndata:[DONE]\n\ndata: {"late": 1}\n\n'

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def parts() -> AsyncIterator[bytes]:
            for n in range(len(stream)):
                yield stream[n : n + 1]

        if scope["type"] == "http":
            await StreamingResponse(parts())(scope, receive, send)

    async with serving(app) as url, httpx.AsyncClient() as client:
        assert (await ASKED[CHAT](EngineProbe(client, url, ""))).text == "a"


async def test_a_generation_has_its_time() -> None:
    """Longer than that, the engine is not waited for; the rest of the stream is not read."""
    async with (
        serving(FakeEngine(Behaviour(stall_after=2)).app) as url,
        httpx.AsyncClient() as client,
    ):
        with pytest.raises(
            ProbeError, match=r"/v1/chat/completions: no complete answer within 0\.1 s"
        ):
            await EngineProbe(client, url, "").generate(
                CHAT, {"model": "m", "messages": []}, 0.1
            )


async def test_the_key_is_sent_wherever_there_is_one() -> None:
    behaviour = Behaviour()
    async with serving(FakeEngine(behaviour).app) as url, httpx.AsyncClient() as client:
        await ASKED[CHAT](EngineProbe(client, url, "secret"))
        await ASKED[CHAT](EngineProbe(client, url, ""))
    assert [headers.get("authorization") for headers in behaviour.headers] == [
        "Bearer secret",
        None,
    ]


async def test_a_request_that_meets_the_close_of_its_connection_is_sent_again() -> None:
    """Servers close idle connections; an adapter is not loaded twice for that."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
    answer = head + b'content-length: 23\r\n\r\n{"tokens": [1, 2, 3]}  '
    requests_by_connection: list[list[str]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests: list[str] = []
        requests_by_connection.append(requests)
        while line := await reader.readline():
            if line.startswith(b"POST"):
                requests.append(line.split()[1].decode())
                length = 0
            if line.lower().startswith(b"content-length"):
                length = int(line.split(b":")[1])
            if line != b"\r\n":
                continue
            await reader.readexactly(length)
            if len(requests) > 1:
                break
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, httpx.AsyncClient() as client:
        probe = EngineProbe(client, f"http://127.0.0.1:{port}", "")
        for _ in range(2):
            assert await probe.text_tokens("m", "x") == [1, 2, 3]
        assert requests_by_connection == [[TOKENIZE, TOKENIZE], [TOKENIZE]]
        with pytest.raises(ProbeError, match="load_lora_adapter: RemoteProtocolError"):
            await probe.load_adapter(Adapter("a", "/a"))
    assert requests_by_connection[1:] == [[TOKENIZE, "/v1/load_lora_adapter"]]


@pytest.mark.parametrize("resumes", [False, True])
async def test_an_engine_says_whether_it_resumes_answers(resumes: bool) -> None:  # noqa: FBT001
    """By a header of each answer: QARR's plugin for vLLM sends it."""
    fake = FakeEngine(Behaviour(resumes=resumes))
    async with serving(fake.app) as url, httpx.AsyncClient() as client:
        served = await EngineProbe(client, url, "").model()
    assert served.resumes is resumes
