"""The page in a real browser, in front of a real router and fake engines."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Error, Locator, Page, expect

from router.auth.api_keys import add_key
from router.profiling.profile_files import keep_quality
from tests.browser.conftest import Opened
from tests.browser.line import Line
from tests.browser.made_up import ANSWER, SPEEDS, measured
from tests.fakes.engine import Behaviour, FakeEngine, serving_all
from tests.unit.first_up import first_up
from tests.unit.measuring_router import engines, measuring_router
from tests.unit.policy.made_profiles import cut_counted, quality
from tests.unit.router_stack import router_stack
from tiers.spec import STANDARD_TIERS

pytestmark = pytest.mark.anyio
FAST, BALANCED, PRECISE = STANDARD_TIERS
TIMEOUT_MS = 30_000  # Engines that start need so long.
WATCH_ROWS = """() => {
  window.fadedRows = 0;
  const look = () => {
    for (const row of document.querySelectorAll("#requests tr")) {
      if (getComputedStyle(row).opacity !== "1") window.fadedRows += 1;
    }
    requestAnimationFrame(look);
  };
  look();
}"""
# The script returns the texts that reach beyond the nearest element around them that cuts off its content.
CUT_TEXTS = """() => [...document.querySelectorAll("#requests td, .idle, .precision")].flatMap((node) => {
  const range = document.createRange();
  range.selectNodeContents(node);
  const text = range.getBoundingClientRect();
  if (!text.width) return [];
  let around = node;
  while (around !== document.body && around.id !== "requests" && getComputedStyle(around).overflow === "visible") around = around.parentElement;
  for (const inner of node.querySelectorAll("*")) if (getComputedStyle(inner).webkitLineClamp !== "none") return [node.textContent];
  if (around === document.body || around.id === "requests") return [];
  const box = around.getBoundingClientRect();
  const cut = text.bottom > box.bottom + 1 || text.right > box.right + 1 || text.top < box.top - 1;
  return cut ? [`${node.className}: ${node.textContent}`] : [];
})"""
MARKUP = "<img src=x onerror=document.title='broken'>"


def tier(page: Page, name: str) -> Locator:
    return page.locator(f'[data-tier="{name}"]:is(li)')


def button(page: Page, name: str) -> Locator:
    return page.get_by_role("button", name=name, exact=True)


async def live(page: Page) -> None:
    await expect(page.get_by_text("● live")).to_be_visible()


async def test_a_tier_that_is_being_made_says_so_on_its_lane(
    tmp_path: Path, opened: Opened
) -> None:
    """Until the tier is ready, its lane shows the step, its progress and the time left."""
    async with first_up(tmp_path) as up:
        for command, order in (("bf16", "done"), ("fp8", "done"), ("awq", "3")):
            up.tell(command, order)
        await up.until_states(precise="ready", balanced="ready", fast="preparing")
        async with opened(up.url) as page:
            await live(page)
            coming = tier(page, "fast").locator(".coming")
            state = tier(page, "fast").locator(".who .state")
            await expect(coming).to_contain_text(
                "quantizing to AWQ int4, groups of 64 (3 of 31)", timeout=TIMEOUT_MS
            )
            await expect(coming).to_contain_text("ready in about")
            await expect(state).to_have_text("… preparing")
            await expect(tier(page, "precise").locator(".coming")).to_be_hidden()
            up.tell("awq", "done")
            await expect(state).to_have_text("✓ ready", timeout=TIMEOUT_MS)
            await expect(coming).to_be_hidden()


async def test_the_tiers_are_shown(tmp_path: Path, opened: Opened) -> None:
    """Model, tiers with state and load, sums and replicas are there, and the page says what to do without keys."""
    async with router_stack(tmp_path) as stack:
        await stack.generate(
            prompt="What is the capital of France?", sla={"ttft_ms": 60_000}
        )
        async with opened(stack.url) as page:
            await live(page)
            await expect(page.locator("#model")).to_have_text("fake")
            for name, precision in (
                ("fast", "awq-int4"),
                ("balanced", "fp8"),
                ("precise", "bf16"),
            ):
                await expect(tier(page, name)).to_contain_text(precision)
                await expect(tier(page, name).locator(".who .state")).to_have_text(
                    "✓ ready"
                )
                await expect(tier(page, name)).to_contain_text("0 of 32")
            await expect(page.locator("#sum-sla-of")).to_have_text("1 of 1 with bounds")
            await tier(page, "fast").get_by_text("1 replica").click()
            replica = page.locator('[data-replica="fast-0"]')
            await expect(replica).to_contain_text("served")
            await expect(replica).to_contain_text("qarr tiers drain fast-0")
            await expect(replica.get_by_role("button")).to_have_count(0)
            await expect(page.locator("#rights")).to_contain_text(
                "qarr keys add NAME --admin"
            )
            await expect(page.locator("#rights")).to_contain_text(
                "qarr keys off ends that"
            )
            await expect(page.locator("#quality")).to_contain_text(
                "qarr profile quality"
            )
            await expect(page.locator("#measuring")).to_be_hidden()
            await expect(page).to_have_title("QARR")


async def test_a_notice_and_a_router_without_engines_of_its_own(
    tmp_path: Path, opened: Opened
) -> None:
    """The head of the page shows the settings' notice, and names the machine as the router's: no engine runs there."""
    notice = "Simulated: no model runs."
    async with (
        router_stack(tmp_path, {"server": {"notice": notice}}) as stack,
        opened(stack.url) as page,
    ):
        await live(page)
        await expect(page.locator("#notice")).to_have_text(notice)
        stack.fleet.machine = "An example CPU"
        await expect(page.locator("#machine")).to_have_text("router on An example CPU")
    async with router_stack(tmp_path) as stack, opened(stack.url) as page:
        await live(page)
        await expect(page.locator("#notice")).to_be_hidden()


async def test_an_idle_tier_says_why(tmp_path: Path, opened: Opened) -> None:
    """An idle tier shows what spoke against it in the last decision, once other tiers get requests."""
    async with router_stack(tmp_path) as stack, opened(stack.url) as page:
        await live(page)
        lane = tier(page, "fast").locator(".idle")
        await expect(lane).to_have_text("idle")
        await stack.generate(prompt="What is the capital of France?", tier="precise")
        await expect(lane).to_have_text(
            "idle; for the last prompt: hint precise wants precise or higher"
        )
        await expect(tier(page, "precise").locator(".idle")).to_have_text("idle")


async def test_requests_that_come_fast_are_listed_whole(
    tmp_path: Path, opened: Opened
) -> None:
    """No row fades in, and at no width is the text of a row or of an idle tier cut off."""
    async with router_stack(tmp_path) as stack, opened(stack.url) as page:
        await live(page)
        await page.evaluate(WATCH_ROWS)
        await asyncio.gather(
            *(
                stack.generate(prompt=f"prompt {number}", tier="precise")
                for number in range(30)
            )
        )
        await stack.generate(prompt="word " * 3000, max_tokens=4096)
        await expect(page.locator("#requests tr")).to_have_count(31)
        await expect(tier(page, "fast").locator(".idle")).to_contain_text(
            "for the last prompt"
        )
        assert await page.evaluate("window.fadedRows") == 0
        for width in (1440, 1250, 1000, 700, 390):
            await page.set_viewport_size({"width": width, "height": 900})
            assert await page.evaluate(CUT_TEXTS) == [], width


async def test_a_tier_that_may_not_pay_is_told_kindly(
    tmp_path: Path, opened: Opened
) -> None:
    """The page says, not in the colour of faults, what a GPU would change, and that the router works all the same."""
    folder = tmp_path / "profiles"
    folder.mkdir()
    async with router_stack(tmp_path, {"policy": {"profiles": str(folder)}}) as stack:
        await measured(stack, folder, speeds=SPEEDS | {BALANCED: (0.9, 0.09)})
        async with opened(stack.url) as page:
            remark = page.locator("#quality .pointless")
            await expect(remark).to_contain_text(
                "balanced may not pay with this model on this machine: a token takes 90 ms"
            )
            await expect(remark).to_contain_text(
                "on a GPU reading the weights takes most of the time"
            )
            await expect(remark).to_contain_text("The router works all the same")
            colours = "node => [getComputedStyle(node).color, getComputedStyle(document.querySelector('.muted')).color]"
            shown, muted = await remark.evaluate(colours)
            assert shown == muted


async def test_what_was_cut_while_thinking_is_told_with_what_to_do(
    tmp_path: Path, opened: Opened
) -> None:
    folder = tmp_path / "profiles"
    folder.mkdir()
    async with router_stack(tmp_path, {"policy": {"profiles": str(folder)}}) as stack:
        identities = {spec.name: spec.identity for spec in stack.fleet.specs}
        profile = quality(
            cut_counted(FAST, 12), identities=identities, think_tokens=100
        )
        keep_quality(folder, profile)
        stack.pipeline.policy.reload()
        async with opened(stack.url) as page:
            remark = page.locator("#quality .cut")
            await expect(remark).to_contain_text(
                "fast: not measured: cut while thinking: chat (moderate), 12 tasks"
            )
            await expect(remark).to_contain_text("qarr profile quality --think-tokens")


async def test_what_the_router_measures_is_shown(
    tmp_path: Path, opened: Opened
) -> None:
    """The page shows the progress with speed and loss, and the pause for a request, and no command to run by hand."""
    # This router has no supervisor, so it lists no operations.
    no_operations = ("status of 404",)
    async with (
        measuring_router(tmp_path, engines(0.03)) as own,
        opened(own.url, expected=no_operations) as page,
    ):
        # An engine that hangs keeps the loss from being measured to the end.
        own.engines[0].hung = ("/v1/chat/completions",)
        await live(page)
        text = page.locator("#measuring-text")
        await expect(text).to_contain_text(
            re.compile(r"speed while no request is served: \d+ of \d+")
        )
        await own.comes_to(what="quality", state="running")
        await expect(text).to_contain_text(
            re.compile(r"loss while no request is served: \d+ of \d+, \d+ %")
        )
        await expect(page.locator("#quality")).not_to_contain_text(
            "qarr profile quality"
        )
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(
                own.client.post(
                    f"{own.url}/generate", json={"prompt": "hi", "tier": "fast"}
                )
            )
            await expect(text).to_contain_text("paused: requests go first")
            asking.cancel()


async def test_a_request_appears_and_opens_into_its_trace(
    tmp_path: Path, opened: Opened
) -> None:
    """An answer that was continued elsewhere is a row; Enter opens its verdicts and its trace; Escape closes them."""
    async with router_stack(
        tmp_path, fast=Behaviour(answer=ANSWER), balanced=Behaviour(answer=ANSWER)
    ) as stack:
        async with opened(stack.url) as page:
            await live(page)
            await expect(page.locator("#requests-empty")).to_contain_text(
                "No request has ended yet"
            )
            stack.engines[FAST].break_after = 5
            answer = await stack.generate(
                prompt="What is the capital of France?", max_tokens=20
            )
            row = page.locator(f'tr[data-request="{answer.headers["x-request-id"]}"]')
            await expect(row).to_contain_text("continued on balanced")
            opener = row.get_by_role("button")
            await opener.press("Enter")
            details = page.get_by_role("dialog")
            await expect(details).to_be_visible()
            await expect(details.locator(".verdicts tbody tr")).to_have_count(3)
            await expect(details.locator(".verdicts .chosen")).to_contain_text("fast")
            spans = details.locator(".waterfall > ol > li")
            await expect(spans.first).to_contain_text("POST /generate")
            await expect(
                details.locator(".event", has_text="first token").first
            ).to_be_visible()
            await expect(
                details.locator(".event", has_text="continuation")
            ).to_contain_text("balanced-0")
            failed = details.locator(".waterfall li.failed").first
            await expect(failed).to_contain_text("✕")
            await failed.locator("summary").press("Enter")
            await expect(failed.locator(".attributes")).to_contain_text("fast-0")
            await page.keyboard.press("Escape")
            await expect(details).to_be_hidden()
            await expect(opener).to_be_focused()
        async with opened(
            f"{stack.url}/#request={answer.headers['x-request-id']}"
        ) as page:
            await expect(
                page.get_by_role("dialog").locator(".waterfall")
            ).to_be_visible()


async def test_a_thought_is_shown_apart_from_the_answer(
    tmp_path: Path, opened: Opened
) -> None:
    """A tier, the list and a request say how much was thought, and when the answer itself began."""
    fast = Behaviour(reasoning=4, delay_s=0.05, cached_tokens=6)
    async with router_stack(tmp_path, fast=fast) as stack:
        body = {"model": "fast", "messages": [{"role": "user", "content": "hi"}]}
        for stream in (True, False):
            answer = await stack.client.post(
                f"{stack.url}/v1/chat/completions", json={**body, "stream": stream}
            )
            assert answer.status_code == 200
        async with opened(stack.url) as page:
            await live(page)
            thought = page.locator("#requests tr", has_text="4 thought")
            await expect(thought).to_have_count(1)
            await expect(thought.locator(".first")).to_contain_text("→")
            await expect(tier(page, "fast")).to_contain_text("TTFT · answer")
            await expect(tier(page, "precise")).not_to_contain_text("answer")
            await thought.get_by_role("button").click()
            details = page.get_by_role("dialog")
            await expect(details).to_contain_text(
                "10 in the prompt, 6 of them cached; 7 in the answer, 4 of them thought"
            )
            await expect(details).to_contain_text("of them thinking")
            await expect(
                details.locator(".event", has_text="first answer token")
            ).to_be_visible()


async def test_a_failed_request_opens_after_many_good_ones(
    tmp_path: Path, opened: Opened
) -> None:
    """The request's address still opens it, and shows each attempt with its engine's error."""
    async with router_stack(tmp_path, {"telemetry": {"recent_requests": 2}}) as stack:
        for engine in stack.engines.values():
            engine.status = 500
        failed = await stack.generate()
        for engine in stack.engines.values():
            engine.status = 200
        for _ in range(4):
            answer = await stack.generate(tier="precise", tier_policy="require")
            assert answer.status_code == 200
        async with opened(
            f"{stack.url}/#request={failed.headers['x-request-id']}"
        ) as page:
            details = page.get_by_role("dialog")
            await expect(details.locator(".verdicts tbody tr")).to_have_count(3)
            await expect(details.locator(".waterfall li.failed")).to_have_count(
                1 + len(stack.engines)
            )
            await expect(
                details.locator(".event", has_text="HTTP 500").first
            ).to_be_visible()
            await page.keyboard.press("Escape")
            await button(page, "1 failed").click()
            await expect(page.locator("#requests tr")).to_have_count(1)


@pytest.mark.parametrize(("reasoning", "stage"), [(0, "writes"), (99, "thinks")])
async def test_requests_in_flight_are_listed(
    tmp_path: Path, opened: Opened, reasoning: int, stage: str
) -> None:
    """A request is listed and counted while it is computed, and gone when it has ended."""
    slow = Behaviour(answer=ANSWER, reasoning=reasoning)
    async with router_stack(tmp_path, fast=slow) as stack, opened(stack.url) as page:
        await live(page)
        slow.stall_after = 3
        asking = asyncio.create_task(stack.generate(prompt="hi", tier="fast"))
        await expect(page.locator("#flight li")).to_contain_text("fast")
        await expect(page.locator("#flight li")).to_contain_text(stage)
        await expect(page.locator("#sum-flight")).to_have_text("1")
        await expect(tier(page, "fast")).to_contain_text("1 of 32")
        asking.cancel()
        await expect(page.locator("#flight li")).to_have_count(0)
        await expect(page.locator("#requests tr").first).to_contain_text("client left")


async def test_an_id_that_is_used_twice_is_listed_twice(
    tmp_path: Path, opened: Opened
) -> None:
    """Callers choose ids; two requests of one id are two lines in flight, and both go when they end."""
    slow = Behaviour(answer=ANSWER)
    async with router_stack(tmp_path, fast=slow) as stack, opened(stack.url) as page:
        await live(page)
        slow.stall_after = 3
        same = {
            "headers": {"x-request-id": "one-id"},
            "json": {"prompt": "hi", "tier": "fast"},
        }
        asking = [
            asyncio.create_task(stack.client.post(f"{stack.url}/generate", **same))
            for _ in range(2)
        ]
        await expect(page.locator("#flight li")).to_have_count(2)
        await expect(page.locator("#flight li", has_text="writes")).to_have_count(2)
        for task in asking:
            task.cancel()
        await expect(page.locator("#requests tr")).to_have_count(2)
        await expect(page.locator("#flight li")).to_have_count(0)


async def test_a_prompt_is_decided_before_it_is_sent(
    tmp_path: Path, opened: Opened
) -> None:
    """While typing the decision shows; Ctrl+Enter streams the answer with its tier and times; its record opens."""
    async with router_stack(tmp_path) as stack, opened(stack.url) as page:
        await live(page)
        await page.get_by_label("Prompt", exact=True).press_sequentially(
            "What is the capital of France?"
        )
        decision = page.get_by_role("group", name="Decision before sending")
        await expect(decision).to_contain_text("would go to fast")
        await expect(decision.locator("tbody tr")).to_have_count(3)
        await page.get_by_role("combobox", name="Tier").select_option("precise")
        await expect(decision).to_contain_text("would go to precise")
        for engine in stack.engines.values():
            assert not [sent for sent in engine.requests if "messages" in sent]
        await page.get_by_label("Prompt", exact=True).press("Control+Enter")
        await expect(page.locator("#answer")).to_have_text(
            "The capital of France is Paris."
        )
        facts = page.locator("#answer-facts")
        for part in ("precise", "7 tokens", "TTFT", "TPOT"):
            await expect(facts).to_contain_text(part)
        await expect(page.locator("#requests tr")).to_have_count(1)
        await facts.get_by_role("button").click()
        await expect(page.get_by_role("dialog")).to_contain_text("hint precise")


async def test_an_answer_can_be_stopped(tmp_path: Path, opened: Opened) -> None:
    """Stop ends the request at the engine; the text so far stays, and the next request can be sent."""
    slow = Behaviour(answer=ANSWER)
    async with router_stack(tmp_path, fast=slow) as stack, opened(stack.url) as page:
        await live(page)
        slow.stall_after = 5
        await page.get_by_label("Prompt", exact=True).fill("hi")
        await button(page, "Send").click()
        await expect(page.locator("#answer")).to_contain_text("Paris is the capital of")
        await expect(button(page, "Send")).to_be_disabled()
        await button(page, "Stop").click()
        await expect(page.locator("#answer-facts")).to_contain_text("stopped")
        await expect(button(page, "Send")).to_be_enabled()
        await expect(page.locator("#requests tr").first).to_contain_text("client left")
        assert stack.leases() == 0


async def test_problems_are_shown_as_the_router_words_them(
    tmp_path: Path, opened: Opened
) -> None:
    """A field that is wrong is named with what is allowed; a refusal and an engine that fails are explained."""
    async with (
        router_stack(tmp_path) as stack,
        opened(stack.url, expected=("status of",)) as page,
    ):
        await live(page)
        decision = page.get_by_role("group", name="Decision before sending")
        await page.get_by_label("Prompt", exact=True).fill("hi")
        await page.get_by_label("Max tokens").fill("9999")
        await expect(decision).to_contain_text(
            "max_tokens is 9999 (allowed: an integer from 1 to 4096)"
        )
        await page.get_by_label("Max tokens").fill("4000")
        await page.get_by_role("combobox", name="Tier").select_option("fast")
        await page.get_by_text("Bounds and more").click()
        await page.get_by_label("this or an error").check()
        await expect(decision).to_contain_text("would be refused")
        await page.get_by_label("Max tokens").fill("8")
        stack.engines[FAST].status = 400
        stack.engines[FAST].error = f"not {MARKUP}"
        await button(page, "Send").click()
        problem = page.locator("#answer-problem")
        await expect(problem).to_contain_text(
            f"The engine refused the request: not {MARKUP}"
        )
        await expect(page.locator("#requests tr").first).to_contain_text(
            "refused: engine refused"
        )
        assert await page.locator("main img").count() == 0


async def test_text_from_elsewhere_stays_text(tmp_path: Path, opened: Opened) -> None:
    """Markup in an answer, or put on the page in any other way, is shown as text."""
    answer = Behaviour(
        answer=(
            "Paris is a city. ",
            MARKUP,
            " and ",
            "<script>document.title='broken'</script>",
        )
    )
    async with (
        router_stack(tmp_path, fast=answer) as stack,
        opened(stack.url, expected=("TrustedHTML",)) as page,
    ):
        await live(page)
        await page.get_by_label("Prompt", exact=True).fill("hi")
        await button(page, "Send").click()
        await expect(page.locator("#answer")).to_contain_text(MARKUP)
        assert await page.locator("main img, main script").count() == 0
        await expect(page).to_have_title("QARR")
        refused = await page.evaluate(
            "() => { try { document.body.innerHTML = 'x'; return 'taken' } catch { return 'refused' } }"
        )
        assert refused == "refused"


async def test_an_engine_goes_away_and_comes_back(
    tmp_path: Path, opened: Opened
) -> None:
    """A tier that is down is named on its row, in the title and to those who listen; and so is its return."""
    async with router_stack(tmp_path) as stack, opened(stack.url) as page:
        await live(page)
        stack.engines[BALANCED].alive = False
        state = tier(page, "balanced").locator(".who .state")
        await expect(state).to_have_text("! unreachable")
        await expect(page).to_have_title(re.compile(r"^! balanced unreachable"))
        await expect(page.get_by_role("status").first).to_have_text(
            "tier balanced is unreachable"
        )
        await expect(tier(page, "fast").locator(".who .state")).to_have_text("✓ ready")
        stack.engines[BALANCED].alive = True
        await expect(state).to_have_text("✓ ready")
        await expect(page).to_have_title("QARR")


async def test_a_page_of_an_allowed_origin_chats(
    tmp_path: Path, opened: Opened
) -> None:
    """A front-end of an allowed origin streams a chat with a key and reads headers and errors; other origins cannot."""
    ask = """async ([url, key, body]) => {
        const headers = {"content-type": "application/json", authorization: `Bearer ${key}`};
        const answer = await fetch(`${url}/v1/chat/completions`, {method: "POST", headers, body: JSON.stringify(body)});
        return [answer.status, answer.headers.get("x-qarr-tier"), await answer.text()];
    }"""
    chat = {
        "model": "fast",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
    }
    key = add_key(tmp_path / "keys.json", "page")[0]
    async with serving_all(FakeEngine().app, FakeEngine().app) as (allowed, foreign):
        settings = {
            "server": {"cors_origins": [allowed]},
            "auth": {"keys_file": str(tmp_path / "keys.json")},
        }
        async with router_stack(tmp_path, settings) as stack:
            async with opened(f"{allowed}/v1/models", expected=("404",)) as page:
                status, served_by, text = await page.evaluate(
                    ask, [stack.url, key, chat]
                )
                assert status == 200
                assert served_by == "fast"
                assert text.endswith("data: [DONE]\n\n")
                status, _, text = await page.evaluate(
                    ask, [stack.url, key, {**chat, "model": "none"}]
                )
                assert status == 404
                assert "model_not_found" in text
            async with opened(
                f"{foreign}/v1/models", expected=("CORS", "ERR_FAILED", "404")
            ) as page:
                with pytest.raises(Error, match="Failed to fetch"):
                    await page.evaluate(ask, [stack.url, key, chat])


async def test_a_lost_connection_shows_and_mends(
    tmp_path: Path, opened: Opened
) -> None:
    """Without the router the page says that its figures are old, and goes on by itself when it is back."""
    async with router_stack(tmp_path) as stack:
        line = Line(stack.url)
        await line.mend()
        async with opened(line.url, expected=("ERR_",)) as page:
            await live(page)
            await expect(tier(page, "fast")).to_be_visible()
            await line.cut()
            alert = page.locator("#lost")
            await expect(alert).to_contain_text("The connection to the router is lost.")
            await expect(alert).to_contain_text("old")
            await expect(page.locator("#connection")).to_have_text("✕ connection lost")
            await expect(page.locator("body")).to_have_class("old")
            await line.mend()
            await live(page)
            await expect(alert).to_be_hidden()
            await stack.generate()
            await expect(page.locator("#requests tr")).to_have_count(1)
        await line.cut()


async def test_keys_are_asked_for_and_kept_in_the_tab(
    tmp_path: Path, opened: Opened
) -> None:
    """Without a key nothing shows, a wrong key is refused, a good key shows its own requests, and no disk keeps it."""
    keys_file = tmp_path / "keys.json"
    key, _ = add_key(keys_file, "look")
    other_caller = {"authorization": f"Bearer {add_key(keys_file, 'other')[0]}"}
    async with (
        router_stack(tmp_path, {"auth": {"keys_file": str(keys_file)}}) as stack,
        opened(stack.url, expected=("status of 40",)) as page,
    ):
        dialog = page.get_by_role("dialog", name="Key")
        await expect(dialog).to_be_visible()
        await expect(page.locator("#connection")).to_have_text("✕ key needed")
        await dialog.get_by_label("Key", exact=True).fill("qarr-wrong")
        await dialog.get_by_label("Key", exact=True).press("Enter")
        await expect(dialog.locator(".problem")).to_be_visible()
        assert await page.locator("#tiers li").count() == 0
        await dialog.get_by_label("Key", exact=True).fill(key)
        await button(page, "Use this key").click()
        await live(page)
        rights = page.locator("#rights")
        await expect(rights).to_have_text(
            "This key sees its own requests, and may not operate on replicas."
        )
        await expect(page.locator("#scope")).to_be_visible()
        await stack.client.post(
            f"{stack.url}/generate", json={"prompt": "hi"}, headers=other_caller
        )
        await page.get_by_label("Prompt", exact=True).fill("hi")
        late = "(f, key) => { const s = sessionStorage; s['qarr-key'] = ''; f.requestSubmit(); s['qarr-key'] = key; }"
        # The request without a key is refused after the page has a key again.
        await page.locator("#ask").evaluate(late, key)
        await expect(page.locator("#answer-problem")).not_to_be_empty()
        await expect(dialog).to_be_hidden()
        await button(page, "Send").click()
        await expect(page.locator("#answer")).to_contain_text("Paris")
        await expect(page.locator("#requests tr")).to_have_count(1)
        await expect(page.locator("#totals")).to_contain_text("2 requests")
        stored = "() => JSON.stringify(localStorage) + document.cookie"
        assert await page.evaluate(stored) == "{}"
        assert key not in page.url
        await button(page, "Key ✓").click()
        await button(page, "Forget it").click()
        await expect(dialog).to_be_visible()
        await expect(page.locator("#connection")).to_have_text("✕ key needed")


async def test_an_admin_drains_and_resumes(tmp_path: Path, opened: Opened) -> None:
    """With an operator's key replicas have buttons; each asks first, and the page shows how far the operation is."""
    keys_file = tmp_path / "keys.json"
    key, _ = add_key(keys_file, "boss", admin=True)
    async with (
        router_stack(tmp_path, {"auth": {"keys_file": str(keys_file)}}) as stack,
        opened(stack.url, expected=("status of 40",)) as page,
    ):
        await page.get_by_role("dialog").get_by_label("Key", exact=True).fill(key)
        await button(page, "Use this key").click()
        await expect(page.locator("#rights")).to_have_text(
            "This key may operate on replicas."
        )
        await expect(page.locator("#scope")).to_be_hidden()
        await tier(page, "fast").get_by_text("1 replica").click()
        await button(page, "drain fast-0").click()
        confirm = page.get_by_role("dialog")
        await expect(confirm).to_contain_text("It gets no new requests")
        await button(page, "Cancel").click()
        await expect(confirm).to_be_hidden()
        await expect(tier(page, "fast").locator(".who .state")).to_have_text("✓ ready")
        await button(page, "drain fast-0").press("Enter")
        await button(page, "Drain").press("Enter")
        await expect(tier(page, "fast").locator(".who .state")).to_have_text(
            "↓ draining"
        )
        await expect(page.locator('[data-replica="fast-0"]')).to_contain_text(
            "✓ drain done: drained"
        )
        await button(page, "resume fast-0").click()
        await button(page, "Resume").click()
        await expect(tier(page, "fast").locator(".who .state")).to_have_text("✓ ready")
        # The engine was not started by this router.
        for kind in ("restart", "recycle"):
            await expect(button(page, f"{kind} fast-0")).to_have_count(0)


async def test_expected_losses_are_a_table(tmp_path: Path, opened: Opened) -> None:
    """Losses stand by class, complexity and tier, with interval and basis, first published and then measured."""
    folder = tmp_path / "profiles"
    folder.mkdir()

    def code(page: Page) -> Locator:
        kinds = page.get_by_role("region", name="Expected loss").get_by_role("rowgroup")
        return kinds.filter(has_text="code").get_by_role("row", name="moderate")

    async with router_stack(
        tmp_path, {"policy": {"profiles": str(folder), "max_loss": {"code": 0.03}}}
    ) as stack:
        async with opened(stack.url) as page:
            await expect(code(page)).to_contain_text(
                "3.4 of 100 over the cap 0.2 to 10 of 100, estimated0.5 of 100 0.03 to 1.6 of 100, estimated"
            )
        await measured(stack, folder)
        async with opened(stack.url) as page:
            await expect(code(page)).to_contain_text(
                "6.0 of 100 over the cap 0.7 to 13 of 100, estimated✓ 0.4 of 100"
            )
            await expect(page.locator("#quality")).not_to_contain_text(
                "qarr profile quality"
            )
            await page.get_by_label("Prompt", exact=True).fill(
                "Write a Python function that sorts dicts by a key."
            )
            await expect(page.locator("#decision .verdicts")).to_contain_text(
                "6.0 of 100 0.7 to 13 of 100, estimated"
            )


async def test_the_loss_budget_is_told(tmp_path: Path, opened: Opened) -> None:
    """The page shows the budget's rule, and how much of it the answers since the start are expected to have used."""
    folder = tmp_path / "profiles"
    folder.mkdir()
    policy = {
        "profiles": str(folder),
        "loss_budget": {"like": "fast"},
        "max_slowdown": 1e9,
    }
    async with (
        router_stack(tmp_path, {"policy": policy}) as stack,
        opened(stack.url) as page,
    ):
        await live(page)
        await expect(page.locator("#sum-loss-of")).to_have_text("no answers yet")
        answer = await stack.generate(prompt="What is the capital of France?")
        await expect(page.locator("#sum-loss")).to_have_text("0.4 of 100")
        await expect(page.locator("#sum-saved-of")).to_have_text(
            re.compile("not measured yet|against all on precise")
        )
        await expect(page.locator("#sum-loss-of")).to_have_text("9.8 of 100 allowed")
        await expect(page.locator("#budget")).to_have_text(
            "Where engine time is scarce, no prompt may lose more than fast loses. Of 1 answer since the start, 0.00 are "
            "expected to be worse than the highest precision\u2019s; 0.10 were allowed."
        )
        row = page.locator(f'tr[data-request="{answer.headers["x-request-id"]}"]')
        await row.get_by_role("button").press("Enter")
        facts = page.get_by_role("dialog").locator("#details-facts")
        await expect(facts).to_contain_text(
            "the soonest finish, among tiers that are as good"
        )
        await expect(facts).to_contain_text("Expected worse0.4 of 100")
        trace = page.get_by_role("dialog").locator("#trace")
        # On the span the loss is a share.
        await expect(trace).to_contain_text("qarr.loss.expected0.4 of 100")


async def test_a_bound_that_nobody_knows_to_be_kept_is_not_called_given_up(
    tmp_path: Path, opened: Opened
) -> None:
    """A bound on latency before the first measurement of speed may break."""
    async with router_stack(tmp_path) as stack:
        answer = await stack.generate(prompt="hi", sla={"ttft_ms": 60_000})
        assert answer.headers["x-qarr-degraded"] == "unmeasured"
        async with opened(stack.url) as page:
            row = page.locator(f'tr[data-request="{answer.headers["x-request-id"]}"]')
            await expect(row.locator(".why span")).to_have_text(
                re.compile("^not measured: a bound may break · ")
            )


async def test_the_list_holds_still(tmp_path: Path, opened: Opened) -> None:
    """Under the pointer, or on Hold, the list stays as it is and counts newer rows; filters choose rows."""
    async with router_stack(tmp_path) as stack, opened(stack.url) as page:
        await live(page)
        await stack.generate(prompt="What is the capital of France?")
        rows = page.locator("#requests tr")
        await expect(rows).to_have_count(1)
        await rows.first.hover()
        await stack.generate()
        await expect(page.locator("#newer")).to_have_text("1 newer")
        await expect(rows).to_have_count(1)
        await page.mouse.move(5, 5)
        await expect(rows).to_have_count(2)
        await button(page, "Hold").press("Space")
        await stack.generate(sla={"tpot_ms": 0.0001})
        await expect(page.locator("#newer")).to_have_text("1 newer")
        await button(page, "Hold").press("Space")
        await expect(rows).to_have_count(3)
        await page.get_by_label("Show").select_option("missed")
        await expect(rows).to_have_count(1)
        await expect(rows).to_contain_text("SLA missed")


async def test_it_is_used_by_keyboard_alone(tmp_path: Path, opened: Opened) -> None:
    """Tab reaches every control in reading order with a visible focus, and skips to the tiers first."""
    async with router_stack(tmp_path) as stack, opened(stack.url) as page:
        await live(page)
        await stack.generate()
        await expect(page.locator("#requests tr")).to_have_count(1)
        await page.keyboard.press("Tab")
        await expect(page.get_by_role("link", name="Skip to the tiers")).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(page.locator("main")).to_be_focused()
        reached: list[str] = []
        for _ in range(40):
            await page.keyboard.press("Tab")
            focused: dict[str, str] = await page.evaluate(FOCUSED)
            if focused["tag"] == "BODY":
                break
            assert focused["outline"] != "none", focused
            reached.append(focused["name"])
        wanted = [
            "1 replica",
            "Hold",
            "Details of the request",
            "Prompt",
            "Send",
            "In flight",
        ]
        places = []
        for part in wanted:
            matches = [n for n, name in enumerate(reached) if part in name]
            assert matches, (part, reached)
            places.append(matches[0])
        assert places == sorted(places), reached


FOCUSED = """() => {
    const node = document.activeElement, style = getComputedStyle(node);
    const label = node.labels?.[0]?.textContent ?? node.getAttribute("aria-label") ?? "";
    const named = document.getElementById(node.getAttribute("aria-labelledby"))?.textContent ?? "";
    return {tag: node.tagName, name: `${label} ${named} ${node.textContent}`.trim(), outline: style.outlineStyle};
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_text_can_be_read(tmp_path: Path, opened: Opened, scheme: Any) -> None:
    """Every text has a contrast of 4.5 to 1 at least (WCAG 2.2, 1.4.3), in both themes and in the details as well."""
    async with (
        router_stack(tmp_path) as stack,
        opened(stack.url, color_scheme=scheme, reduced_motion="reduce") as page,
    ):
        await live(page)
        await stack.generate(sla={"tpot_ms": 0.0001})
        stack.engines[PRECISE].alive = False
        await page.get_by_label("Prompt", exact=True).fill("hi")
        await expect(page.locator("#decision .verdicts")).to_be_visible()
        await expect(tier(page, "precise").locator(".who .state")).to_have_text(
            "! unreachable"
        )
        dark = await page.evaluate(
            "() => getComputedStyle(document.body).backgroundColor"
        )
        assert (dark == "rgb(14, 17, 21)") == (scheme == "dark")
        assert await page.evaluate(CONTRAST) == []
        await page.locator("#requests .open").first.click()
        await expect(page.locator(".waterfall")).to_be_visible()
        assert await page.evaluate(CONTRAST) == []


CONTRAST = """() => {
    const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b].map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const behind = (node) => {
        for (let at = node; at; at = at.parentElement) {
            const found = numbers(getComputedStyle(at).backgroundColor);
            if (found.length < 4 || found[3] === 1) return found;
        }
        return [255, 255, 255];
    };
    const bad = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const node = walker.currentNode.parentElement, style = getComputedStyle(node);
        const text = walker.currentNode.textContent.trim();
        if (!text || !node.checkVisibility() || node.closest("script, style, .hidden, .skip, button:disabled, option")) continue;
        const ink = node instanceof SVGElement ? style.fill : style.color;
        const [a, b] = [light(numbers(ink)), light(behind(node))].sort((x, y) => y - x);
        const ratio = (a + 0.05) / (b + 0.05);
        if (ratio < 4.5) bad.push(`${text.slice(0, 40)}: ${ratio.toFixed(2)}`);
    }
    return bad;
}"""


async def test_the_theme_is_chosen_and_kept(tmp_path: Path, opened: Opened) -> None:
    """The toggle goes from the system's theme to light and dark, says which it is, and is remembered."""
    async with (
        router_stack(tmp_path) as stack,
        opened(stack.url, color_scheme="dark") as page,
    ):
        scheme = "() => getComputedStyle(document.documentElement).colorScheme"
        background = "() => getComputedStyle(document.body).backgroundColor"
        assert await page.evaluate(background) == "rgb(14, 17, 21)"
        await button(page, "Theme: auto").click()
        assert await page.evaluate(background) == "rgb(244, 244, 241)"
        await button(page, "Theme: light").click()
        await page.reload()
        await expect(button(page, "Theme: dark")).to_be_visible()
        assert await page.evaluate(scheme) == "dark"


async def test_controls_have_names_and_pictures_do_not_speak(
    tmp_path: Path, opened: Opened
) -> None:
    """Every control has a name, every id is unique, and graphics are named or hidden from screen readers."""
    async with router_stack(tmp_path) as stack, opened(stack.url) as page:
        await live(page)
        await stack.generate()
        await expect(page.locator("#requests tr")).to_have_count(1)
        assert await page.evaluate(NAMELESS) == []
        tree = await page.locator("body").aria_snapshot()
        headed = ('heading "Tiers" [level=2]', 'region "Last requests"', "columnheader")
        for part in ("banner", "main", "contentinfo", *headed):
            assert part in tree, tree


NAMELESS = """() => {
    const bad = [];
    for (const node of document.querySelectorAll("button, input, select, textarea, summary, a")) {
        const name = node.getAttribute("aria-label") || node.labels?.[0]?.textContent || node.textContent;
        if (!name.trim()) bad.push(node.outerHTML);
    }
    for (const node of document.querySelectorAll("svg, canvas")) {
        if (!node.closest("[aria-hidden='true']") && !node.hasAttribute("aria-label")) bad.push(node.outerHTML);
    }
    const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
    return [...bad, ...ids.filter((id, n) => ids.indexOf(id) !== n)];
}"""


@pytest.mark.parametrize("width", [360, 768, 1024, 1440, 2200])
async def test_it_fits_every_width(tmp_path: Path, opened: Opened, width: int) -> None:
    """Nothing sticks out to the side, with requests in the list and details open."""
    async with (
        router_stack(tmp_path) as stack,
        opened(stack.url, viewport={"width": width, "height": 800}) as page,
    ):
        await live(page)
        await stack.generate(
            prompt="What is the capital of France?",
            sla={"ttft_ms": 60_000, "tpot_ms": 60_000},
        )
        await page.get_by_label("Prompt", exact=True).fill("hi")
        await expect(page.locator("#decision .verdicts")).to_be_visible()
        await expect(page.locator("#requests tr")).to_have_count(1)
        content_width = "() => document.documentElement.scrollWidth"
        assert await page.evaluate(content_width) <= width
        await page.locator("#requests .open").first.click()
        await expect(page.locator(".waterfall")).to_be_visible()
        spilt = "() => { const d = document.getElementById('details'); return d.scrollWidth - d.clientWidth }"
        assert await page.evaluate(spilt) == 0


async def test_motion_is_left_out_where_it_is_not_wanted(
    tmp_path: Path, opened: Opened
) -> None:
    slow = Behaviour(answer=ANSWER, delay_s=0.01)
    async with (
        router_stack(tmp_path, fast=slow) as stack,
        opened(stack.url, reduced_motion="reduce") as page,
    ):
        await live(page)
        await stack.generate()
        await expect(page.locator("#requests tr")).to_have_count(1)
        assert await page.evaluate("() => document.getAnimations().length") == 0


@pytest.mark.parametrize("width", [1440, 390])
async def test_any_number_of_tiers_is_shown(
    tmp_path: Path, opened: Opened, width: int
) -> None:
    """Added tiers have shapes and colours of their own, the form offers them, and one that is left out is a dash."""
    urls = {
        f"t{bits}": {"urls": [f"http://127.0.0.1:{bits}"], "precision": f"int{bits}"}
        for bits in (3, 6, 8)
    }
    view = {"viewport": {"width": width, "height": 1000}}
    async with (
        router_stack(
            tmp_path, {"tiers": {**urls, "balanced": {"replicas": 0}}}
        ) as stack,
        opened(stack.url, **view) as page,
    ):
        await live(page)
        names = await page.locator("li[data-tier]").evaluate_all(
            "rows => rows.map(row => row.dataset.tier)"
        )
        assert names == ["t3", "fast", "t6", "balanced", "t8", "precise"]
        looks = await page.locator("li[data-tier] h3 path").evaluate_all(
            "paths => paths.map(path => path.getAttribute('d') + getComputedStyle(path).fill)"
        )
        assert len(set(looks)) == len(names)
        await expect(tier(page, "balanced").locator(".who .state")).to_have_text(
            "\u2013 absent"
        )
        assert await page.locator("select[name=tier] option").all_text_contents() == [
            "auto",
            *names,
        ]
        await page.get_by_label("Prompt", exact=True).fill(
            "What is the capital of France?"
        )
        await page.locator("select[name=tier]").select_option("t8")
        await expect(page.locator("#decision .to")).to_contain_text("would go to t8")
