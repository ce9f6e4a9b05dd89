"""``qarr demo`` as a person runs it: started, looked at, stopped."""

import json
import os
import random
import shlex
import signal
from pathlib import Path
from subprocess import PIPE, Popen, run

import httpx
import psutil
import pytest

from router.section import PROJECT
from tests.ports import reserved_ports
from tests.unit.cli.stub_router import qarr
from tests.unit.own_router import QARR
from tests.waiting import call_within, wait_until
from tiers.simulated.demo import (
    GPU,
    LOAD,
    PLAN,
    SEQUENCES,
    demo_hardware,
    roofline_speed,
    some_request,
)
from tiers.simulated.gpu import Job, Scheduler
from tiers.spec import PRECISIONS, STANDARD_TIERS

PROMPTS = 60
MIN_SHARE = 0.1  # each tier serves at least this share of the requests


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_the_demo_says_that_it_is_simulated_and_leaves_nothing_running(
    tmp_path: Path, ending: signal.Signals
) -> None:
    """In the terminal, on the page and in the answer. A second one on its port, or with a load that is none, has an error."""
    (port,) = reserved_ports()
    env = {
        **os.environ,
        "QARR_CACHE_DIR": str(tmp_path),
        "XDG_RUNTIME_DIR": str(tmp_path),
        "TMPDIR": str(tmp_path),
    }
    argv = [QARR, "demo", "--port", str(port), "--load"]
    with Popen([*argv, "0"], stderr=PIPE, env=env, text=True) as process:
        try:
            assert process.stderr is not None
            first_line = call_within(
                process.stderr.readline, "the demo's first line"
            ).strip()
            assert first_line.startswith(
                "Simulated: no model runs. Each tier takes the time that Llama 3.1 8B would take on an L4"
            )
            assert PLAN in call_within(
                process.stderr.readline, "the demo's second line"
            )
            lines = process.stderr
            assert call_within(
                lambda: any("all tiers ready" in line for line in lines),
                "all tiers to be ready",
            )
            with httpx.Client(
                base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=20
            ) as client:
                assert _shown(client) == ("Llama 3.1 8B", first_line)
                _assert_that_each_tier_has_a_use(client)
                answer = client.post(
                    "/generate", json={"prompt": "hi", "stream": False}
                )
            assert answer.json()["text"].startswith("This is simulated text")
            for wrong, why in (
                ("0", f"cannot listen on 127.0.0.1:{port}"),
                ("2/m", "0 to 100 requests a second"),
            ):
                assert (
                    why
                    in run(
                        [*argv, wrong],
                        capture_output=True,
                        text=True,
                        check=False,
                        env=env,
                        timeout=60,
                    ).stderr
                )
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(ending)
            assert process.wait(30) == (0 if ending is signal.SIGINT else -ending)
            assert len(children) == 1
            assert psutil.wait_procs(children, timeout=10)[1] == []
        finally:
            process.kill()
    assert ending is signal.SIGKILL or [*tmp_path.glob("qarr-demo-*")] == []


def test_the_demo_keeps_to_its_own_settings(tmp_path: Path) -> None:
    """Where keys, Redis and an overflow of a real router are set, its load runs all the same, and it warns of nothing.

    ``qarr doctor`` does not ask to measure what is simulated.
    """
    (port,) = reserved_ports()
    keys = tmp_path / "config/qarr/keys.json"
    env = {
        **os.environ,
        "QARR_CACHE_DIR": str(tmp_path),
        "XDG_RUNTIME_DIR": str(tmp_path),
        "TMPDIR": str(tmp_path),
    }
    env["XDG_CONFIG_HOME"] = str(tmp_path / "config")
    run(
        [QARR, "keys", "add", "me"],
        env=env | {"QARR_AUTH__KEYS_FILE": str(keys), "QARR_SERVER__PORT": str(port)},
        check=True,
        timeout=60,
    )
    strange = {
        "QARR_AUTH__KEYS_FILE": str(keys), "QARR_STATE__REDIS_URL": "redis://127.0.0.1:9/0",
        "QARR_OVERFLOW__URL": "http://127.0.0.1:9/v1", "QARR_OVERFLOW__MODEL": "m", "QARR_SERVER__PORT": str(port),
    }  # fmt: skip
    with Popen(
        [QARR, "demo", "--load", "20"], stderr=PIPE, env=env | strange, text=True
    ) as process:
        try:
            assert process.stderr is not None
            lines: list[str] = []
            for line in iter(
                lambda: call_within(process.stderr.readline, "the demo's start"), ""
            ):  # type: ignore[union-attr]
                lines.append(line)
                if "all tiers ready" in line:
                    break
            assert lines[2].startswith(
                "The demo has its own settings; left out: QARR_AUTH__KEYS_FILE, "
            )
            assert "QARR_SERVER__PORT" not in lines[2]
            assert not [
                line for line in lines if "WARNING" in line or "tokenizer" in line
            ]
            with httpx.Client(
                base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=20
            ) as client:
                wait_until(
                    lambda: client.get("/requests").json()["requests"],
                    "a request of its load",
                )
            doctor_result = run(
                [QARR, "doctor", "--json"], env=env | {"QARR_SERVER__PORT": str(port)}, capture_output=True, text=True,
                check=False, timeout=60,
            )  # fmt: skip
            running = [
                each
                for each in json.loads(doctor_result.stdout)["checks"]
                if each["group"] == "running"
            ]
            assert [each for each in running if each["health"] != "ok"] == []
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=30)


def _shown(client: httpx.Client) -> tuple[str, str]:
    """Return the model and the notice, as the page reads them; every tier has its precision and its simulated GPU."""
    with client.stream("GET", "/live") as stream:
        data = next(
            line
            for line in stream.iter_lines()
            if line.startswith("data: {") and '"tiers"' in line
        )
    fleet = json.loads(data.removeprefix("data: "))
    assert [tier["precision"] for tier in fleet["tiers"]] == [
        f"{precision} on simulated L4 (stated)" for precision in PRECISIONS.values()
    ]
    assert "fake" not in data
    assert "unknown" not in data
    return fleet["model"], fleet["notice"]


def _have_speeds(client: httpx.Client) -> bool:
    """Tell whether each replica has its speed: the last one that is ready gets it a moment later."""
    tiers = client.get("/tiers").json()["tiers"]
    return all(
        replica["speed_profiled"] and replica["tpot_ms"]
        for tier in tiers
        for replica in tier["replicas"]
    )


def _assert_that_each_tier_has_a_use(client: httpx.Client) -> None:
    """Of the prompts that the demo makes up, some go to each tier, hints aside; fewer bits are faster, from the start on."""
    wait_until(lambda: _have_speeds(client), "the speeds of all tiers")
    chance = random.Random(1)
    chosen = set()
    for _ in range(PROMPTS):
        body = some_request(chance)
        decision = client.post(
            "/route", json={"prompt": body["prompt"], "max_tokens": body["max_tokens"]}
        ).json()
        chosen.add(decision["tier"])
        times = [tier["predicted_tpot_ms"] for tier in decision["tiers"]]
        assert times == sorted(times)
    assert chosen == set(STANDARD_TIERS)


def test_the_load_of_the_demo_is_one_at_which_three_precisions_pay(
    tmp_path: Path,
) -> None:
    """The highest precision alone does not carry it; one engine of each costs as much as the cheapest fleet, and loses little.

    Little is less than a quarter of what the lowest precision alone would lose.
    """
    command, *options = shlex.split(PLAN)
    assert command == "qarr"
    options[options.index("--model") + 1] = str(
        PROJECT / options[options.index("--model") + 1]
    )
    one_of_each = tmp_path / "demo.toml"
    one_of_each.write_text(
        "".join(
            f"[tiers.{tier}]\nmax_num_seqs = {SEQUENCES}\n" for tier in STANDARD_TIERS
        ),
        "utf-8",
    )
    plan_json = json.loads(
        qarr(*options, "--json", "--config", str(one_of_each)).stdout
    )
    assert options[options.index("--load") + 1] == f"{LOAD:g}/s"
    assert options[options.index("--max-num-seqs") + 1] == str(SEQUENCES)
    demo = plan_json["as_set"]
    planned = plan_json["plan"]
    assert len(demo["shares"]) == 3
    assert demo["gpus"] == {GPU: 3}
    assert min(demo["shares"].values()) > MIN_SHARE
    assert demo["cost_per_hour"] == planned["cost_per_hour"]
    assert plan_json["alone"]["precise"] is None
    assert demo["answers_lost"] < plan_json["alone"]["fast"]["answers_lost"] / 4


@pytest.mark.parametrize("prompt_tokens", [20, 400, 1000])
@pytest.mark.parametrize("sequences", [1, 4, 8])
def test_the_speeds_that_the_router_is_given_are_those_of_the_engines(
    prompt_tokens: int, sequences: int
) -> None:
    """Within a fifth and one step of what the scheduler does with so many prompts at once."""
    for tier, runs_on in demo_hardware().items():
        speed = roofline_speed(runs_on)
        scheduler = Scheduler(runs_on, SEQUENCES)
        jobs = [Job(prompt_tokens, 50) for _ in range(sequences)]
        scheduler.waiting.extend(jobs)
        first = scheduler.next_step()
        assert first is not None
        scheduler.finish(first)
        decode_s = 0.0
        while step := scheduler.next_step():
            decode_s += step.duration_s
            scheduler.finish(step)
        predicted = (
            speed.ttft_base_ms + speed.prefill_ms_per_token * prompt_tokens * sequences
        )
        assert first.duration_s * 1000 == pytest.approx(
            predicted, rel=0.2, abs=speed.step_ms(1)
        ), tier
        assert decode_s * 1000 / 49 == pytest.approx(
            speed.step_ms(sequences), rel=0.2
        ), tier
