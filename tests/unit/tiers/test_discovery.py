"""Engines that a file and DNS names name, and what happens while these cannot be read."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from router.api.bodies import health_of
from tests.fakes.engine import FakeEngine, serving_all
from tests.ports import reserved_ports
from tests.unit.tiers.rosters import ids, watched
from tests.waiting import until
from tiers.errors import DiscoveryError
from tiers.lifecycle.discovery import (
    MAX_FILE_BYTES,
    DiscoveryOptions,
    at_address,
    parse_file,
    read_file,
    resolve,
)
from tiers.lifecycle.supervisor import Supervisor
from tiers.spec import ReplicaStatus, TierName

pytestmark = pytest.mark.anyio
FAST = TierName.FAST
PRECISE = TierName.PRECISE
TIERS = (FAST, PRECISE)
READY = ReplicaStatus.READY
WAITING = ReplicaStatus.WAITING
ABSENT = ReplicaStatus.ABSENT
A = "http://10.0.0.5:8000"
B = "http://10.0.0.6:8000"


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiers.lifecycle.watching.POLL_S", 0.02)
    monkeypatch.setattr("tiers.lifecycle.operations.POLL_S", 0.02)
    monkeypatch.setattr("tiers.lifecycle.roster.RETRY_S", 0.02)


def write(path: Path, named: Any) -> None:
    """Replace the file in one step, as its writers are to."""
    part = path.with_suffix(".part")
    part.write_text(named if isinstance(named, str) else json.dumps(named))
    part.replace(path)


def states(supervisor: Supervisor) -> list[str]:
    return [tier.status.value for tier in supervisor.fleet.snapshot().tiers]


def reasons(supervisor: Supervisor) -> list[str]:
    fleet = supervisor.fleet
    found: list[str] = health_of(fleet.snapshot(), fleet.notes.values(), serves=True)[
        "reasons"
    ]
    return [reason for reason in found if "stay" in reason]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("{", "it is not JSON: "),
        ("\udcff", "it is not JSON: "),
        ('["http://e"]', "it is no object such as "),
        ('{"slow": []}', "it names an unknown tier: 'slow'; allowed: fast, precise"),
        ('{"fast": "http://e"}', "fast is no list of addresses"),
        ('{"fast": [1]}', "fast is no list of addresses"),
        (
            '{"fast": ["ftp://e"]}',
            "fast has an address that cannot be used: 'ftp://e': not an address with http",
        ),
        (
            '{"fast": ["http://e/v1"]}',
            "fast has an address that cannot be used: 'http://e/v1': the address ends with",
        ),
        (
            '{"fast": ["http://u:secret@e"]}',
            "fast has an address that cannot be used: 'e': user and password",
        ),
        ('{"fast": ["http://e", "http://E/"]}', "it names an engine twice: http://E/"),
        (
            '{"fast": ["http://e"], "precise": ["http://e"]}',
            "it names an engine twice: http://e",
        ),
    ],
)
def test_a_file_that_cannot_be_used_says_why(text: str, wrong: str) -> None:
    """Operators see what is wrong; the short form, which others see, has no address."""
    with pytest.raises(DiscoveryError) as raised:
        parse_file(text.encode("utf-8", "surrogateescape"), TIERS)
    assert str(raised.value).startswith(wrong)
    assert not ({"http://e", "http://E/", "secret"} & set(raised.value.brief.split()))


def test_a_file_names_engines_by_tier() -> None:
    """A tier that it names without engines is there as well; one that it does not name is not."""
    assert parse_file(b'{"precise": [], "fast": ["http://10.0.0.5:8000"]}', TIERS) == {
        PRECISE: (),
        FAST: (A,),
    }
    assert parse_file(b"{}", TIERS) == {}


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    """A pipe would be waited for; something endless would fill the memory."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "big").write_bytes(b" " * (MAX_FILE_BYTES + 1))
    for name, wrong in (
        ("none", "missing"),
        ("pipe", "not a regular file"),
        ("big", "more than 1048576 bytes"),
    ):
        with pytest.raises(DiscoveryError, match=wrong):
            read_file(tmp_path / name)


async def test_engines_come_and_go_with_the_file(tmp_path: Path) -> None:
    """Each change counts, replaced or written in place; a tier without engines waits, one that is not named is absent."""
    path = tmp_path / "fleet.json"
    async with serving_all(FakeEngine().app, FakeEngine().app) as (one, two):
        write(path, {"fast": [one]})
        async with watched(
            tmp_path, discovery=DiscoveryOptions(path, interval_s=0.02)
        ) as supervisor:
            await until(lambda: ids(supervisor) == ["fast-0"])
            assert states(supervisor) == ["ready", "absent"]
            assert supervisor.fleet.sources == {"fast-0": "file"}
            write(path, {"fast": [one], "precise": [two]})
            await until(lambda: ids(supervisor) == ["fast-0", "precise-0"])
            path.write_text(json.dumps({"fast": [], "precise": [two]}))
            await until(lambda: ids(supervisor, None) == ["precise-0"])
            assert states(supervisor) == ["waiting", "ready"]
            write(path, {"fast": [one]})
            await until(lambda: ids(supervisor, None) == ["fast-1"])
            await until(lambda: states(supervisor) == ["ready", "absent"])
            with pytest.raises(
                Exception,
                match=r"fast-1 is named by discovery\.file: take it out there",
            ):
                supervisor.operations.begin("remove", "fast-1")


async def test_a_file_that_vanishes_takes_no_engine_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor one that cannot be read: one warning each, a reason in /health for as long as it lasts, and then it counts."""
    caplog.set_level(logging.INFO, "qarr.tiers.lifecycle.discovery")
    path = tmp_path / "fleet.json"
    async with serving_all(FakeEngine().app) as (url,):
        write(path, {"fast": [url]})
        async with watched(
            tmp_path, discovery=DiscoveryOptions(path, interval_s=0.01)
        ) as supervisor:
            await until(lambda: ids(supervisor) == ["fast-0"])
            path.unlink()
            await until(
                lambda: (
                    reasons(supervisor)
                    == ["discovery.file: it is missing; its last engines stay"]
                )
            )
            write(path, '{"fast": ["nowhere"]}')
            await until(lambda: "cannot be used" in "".join(reasons(supervisor)))
            for _ in range(5):
                await asyncio.sleep(0.02)
            assert ids(supervisor, None) == ["fast-0"]
            assert "nowhere" not in "".join(reasons(supervisor))
            write(path, {"fast": [url]})
            await until(lambda: not reasons(supervisor))
            assert ids(supervisor) == ["fast-0"]
    told = [record.getMessage() for record in caplog.records]
    wrong = "not an address with http:// or https:// and a host; its last engines stay"
    assert told == [
        f"discovery.file {path}: it is missing; its last engines stay",
        f"discovery.file {path}: fast has an address that cannot be used: 'nowhere': {wrong}",
        f"discovery.file {path} is read again",
    ]


async def test_without_a_file_at_the_start_every_tier_waits(tmp_path: Path) -> None:
    """Engines of the settings serve meanwhile; once there is a file, it says which tiers there are."""
    path = tmp_path / "fleet.json"
    async with (
        serving_all(FakeEngine().app) as (url,),
        watched(
            tmp_path, (url,), DiscoveryOptions(path, interval_s=0.02)
        ) as supervisor,
    ):
        await until(lambda: ids(supervisor) == ["fast-0"])
        assert states(supervisor) == ["ready", "waiting"]
        write(path, {"fast": [url]})
        await until(lambda: states(supervisor) == ["ready", "absent"])
        assert supervisor.fleet.sources == {"fast-0": "settings, file"}


async def test_every_address_of_a_name_is_a_replica(tmp_path: Path) -> None:
    """Those that are gone are removed, also the last one; while the name does not resolve the last ones stay."""
    answers: list[list[str] | OSError] = [[]]

    async def asked(host: str, port: int) -> list[str]:
        assert host == "engines.test"
        answer = answers[-1]
        if isinstance(answer, OSError):
            raise answer
        return answer

    async with serving_all(FakeEngine().app) as (url,):
        port = url.rpartition(":")[2]
        options = DiscoveryOptions(
            file=None,
            names={FAST: f"http://engines.test:{port}"},
            interval_s=0.02,
            resolve=asked,
        )
        async with watched(tmp_path, discovery=options) as supervisor:
            assert states(supervisor) == ["waiting", "absent"]
            answers.append(["127.0.0.1", "127.0.0.9"])
            await until(lambda: ids(supervisor) == ["fast-0"])
            assert [r.url for r in supervisor.fleet.replicas] == [
                url,
                f"http://127.0.0.9:{port}",
            ]
            answers.append(
                socket.gaierror(
                    socket.EAI_AGAIN, "Temporary failure in name resolution"
                )
            )
            await until(
                lambda: (
                    reasons(supervisor)
                    == ["tiers.fast.dns: it does not resolve; its last engines stay"]
                )
            )
            assert len(supervisor.fleet.replicas) == 2
            with pytest.raises(
                Exception,
                match=r"fast-0 is named by tiers\.fast\.dns: take it out there",
            ):
                supervisor.operations.begin("remove", "fast-0")
            answers.append(["127.0.0.1"])
            await until(lambda: ids(supervisor, None) == ["fast-0"])
            assert not reasons(supervisor)
            answers.append([])
            await until(lambda: not supervisor.fleet.replicas)
            assert states(supervisor) == ["waiting", "absent"]


@pytest.mark.parametrize("addresses", [["127.0.0.1", "::1"], ["::1", "127.0.0.1"]])
async def test_an_engine_with_an_address_of_each_family_is_one_replica(
    addresses: list[str], tmp_path: Path
) -> None:
    """In the family in which it answers, whichever the system prefers; otherwise it would get twice its requests."""
    answers = [addresses]

    async def asked(_host: str, _port: int) -> list[str]:
        return answers[-1]

    async with serving_all(FakeEngine().app) as (url,):
        options = DiscoveryOptions(
            file=None,
            names={FAST: f"http://engines.test:{url.rpartition(':')[2]}"},
            interval_s=0.02,
            resolve=asked,
        )
        async with watched(tmp_path, discovery=options) as supervisor:
            await until(lambda: ids(supervisor) == ["fast-0"])
            assert [replica.url for replica in supervisor.fleet.replicas] == [url]
            answers.append(["127.0.0.1", "127.0.0.9", "::1", "::2"])
            await until(lambda: len(supervisor.fleet.replicas) == 2)
            assert all(
                "127.0.0" in replica.url for replica in supervisor.fleet.replicas
            )


async def test_before_an_engine_is_up_its_ipv4_address_is_the_replica(
    tmp_path: Path,
) -> None:
    """vLLM listens there by default. Once it answers in the other family, that is its address."""

    async def asked(_host: str, _port: int) -> list[str]:
        return ["::1", "127.0.0.1"]

    (port,) = reserved_ports()
    options = DiscoveryOptions(
        file=None,
        names={FAST: f"http://engines.test:{port}"},
        interval_s=0.02,
        resolve=asked,
    )
    async with watched(tmp_path, discovery=options) as supervisor:
        await until(
            lambda: (
                [r.url for r in supervisor.fleet.replicas]
                == [f"http://127.0.0.1:{port}"]
            )
        )
        async with serving_all(FakeEngine().app, host="::1", port=port) as _:
            await until(
                lambda: (
                    [r.url for r in supervisor.fleet.replicas]
                    == [f"http://[::1]:{port}"]
                )
            )
            await until(lambda: states(supervisor) == ["ready", "absent"])


async def test_names_are_resolved_by_the_system() -> None:
    """Each address once; an unknown name is an error. ``.invalid`` is never a name (RFC 6761)."""
    assert "127.0.0.1" in await resolve("localhost", 8000)
    assert await resolve("10.0.0.5", 8000) == ["10.0.0.5"]
    with pytest.raises(OSError, match=r".+"):
        await resolve("engines.invalid", 8000)


@pytest.mark.parametrize(
    ("name", "address", "url"),
    [
        ("http://engines:8000", "10.0.0.5", A),
        ("http://engines", "10.0.0.5", "http://10.0.0.5"),
        (
            "http://engines:8000/model/",
            "2001:db8::5",
            "http://[2001:db8::5]:8000/model",
        ),
    ],
)
def test_an_address_takes_the_names_place(name: str, address: str, url: str) -> None:
    """Port and path stay; an IPv6 address stands in brackets."""
    assert at_address(name, address) == url
