"""A change of the key file: its owner, links to it, what an error leaves behind, and keys that are switched off."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from router.auth.access import KeyStore
from router.auth.api_keys import (
    KeysError,
    add_key,
    read_key_file,
    read_keys,
    revoke_key,
    switch_keys,
)
from router.deployment.listening import ListenError, open_keys
from router.settings import load_settings

SERVICE_UID = 65534
as_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can give a file to another user"
)
ADD = "from pathlib import Path; from router.auth.api_keys import add_key; import sys; add_key(Path(sys.argv[1]), sys.argv[2])"


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture(autouse=True)
def _look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.auth.access.RELOAD_S", 0.0)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_changed_file_keeps_its_mode(keys_file: Path) -> None:
    """A group may read it, and still may when a key was added."""
    add_key(keys_file, "one")
    keys_file.chmod(0o640)
    add_key(keys_file, "two")
    assert stat.S_IMODE(keys_file.stat().st_mode) == 0o640
    assert names(keys_file.parent) == {"keys.json", "keys.json.lock"}


@as_root
def test_root_changes_keys_for_the_routers_user(tmp_path: Path) -> None:
    """File, lock and folders that root makes or replaces are the service user's, so that the router can read them."""
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, SERVICE_UID, SERVICE_UID)
    path = home / "new/folder/keys.json"
    add_key(path, "one")
    add_key(path, "two")
    revoke_key(path, "one")
    for made in (
        path,
        path.with_name("keys.json.lock"),
        path.parent,
        path.parent.parent,
    ):
        assert made.stat().st_uid == SERVICE_UID, made
        assert made.stat().st_gid == SERVICE_UID, made
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    # The file's group is now another one than its folder's.
    os.chown(path, SERVICE_UID, 0)
    revoke_key(path, "two")
    assert path.stat().st_uid == SERVICE_UID
    assert path.stat().st_gid == 0


@as_root
def test_a_user_who_cannot_keep_the_owner_is_refused(
    tmp_path: Path, keys_file: Path
) -> None:
    """A user who may write to the folder, but is neither the file's owner nor root, is told whose it is and changes nothing."""
    add_key(keys_file, "one")
    before = keys_file.read_bytes()
    keys_file.chmod(0o644)
    keys_file.with_name("keys.json.lock").chmod(0o644)
    with (
        acting_as(SERVICE_UID, tmp_path),
        pytest.raises(KeysError, match="belongs to root"),
    ):
        add_key(keys_file, "two")
    assert keys_file.read_bytes() == before
    assert names(tmp_path) == {"keys.json", "keys.json.lock"}


@contextmanager
def acting_as(uid: int, folder: Path) -> Iterator[None]:
    """Let this process act as another user, who may write to a folder and pass those above it."""
    above = [
        parent for parent in folder.parents if not parent.stat().st_mode & stat.S_IXOTH
    ]
    modes = {path: path.stat().st_mode for path in [folder, *above]}
    for path in above:
        path.chmod(modes[path] | stat.S_IXOTH)
    folder.chmod(0o777)
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)
        for path, mode in modes.items():
            path.chmod(mode)


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    """Routers that name the file and routers that name a link to it have the same keys, even if the link dangled at first."""
    (tmp_path / "shared").mkdir()
    real = tmp_path / "shared/keys.json"
    link = tmp_path / "keys.json"
    link.symlink_to(real)
    first, _ = add_key(link, "one")
    second, _ = add_key(link, "two")
    assert link.is_symlink()
    for path in (real, link):
        by_path = KeyStore(path)
        assert by_path.find(first).name == "one", path
        assert by_path.find(second).name == "two", path
    store = KeyStore(link)
    revoke_key(real, "one")
    assert [caller.name for caller in store.callers] == ["two"]
    assert names(tmp_path) == {"keys.json", "shared"}


def test_a_file_that_is_mounted_alone_is_overwritten(tmp_path: Path) -> None:
    """It cannot be replaced; the operator is told what to mount, and nothing is left beside it."""
    unshare = shutil.which("unshare")
    assert unshare is not None
    source = tmp_path / "source.json"
    add_key(source, "a name that makes the file longer than the next one does")
    revoke_key(source, "a name that makes the file longer than the next one does")
    (tmp_path / "container").mkdir()
    mounted = tmp_path / "container/keys.json"
    mounted.touch()
    root = [] if os.geteuid() == 0 else ["--map-root-user"]
    enter = [unshare, *root, "--mount", "sh", "-c"]
    mount = 'mount --bind "$1" "$2"'
    files = ["sh", str(source), str(mounted)]
    trial = subprocess.run(
        [*enter, mount, *files], capture_output=True, timeout=60, check=False
    )
    if trial.returncode:
        pytest.skip("this user may mount nothing")
    add = [
        *enter,
        mount + ' && exec "$3" -c "$4" "$2" two',
        *files,
        sys.executable,
        ADD,
    ]
    done = subprocess.run(add, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "mounted alone" in done.stderr
    assert "mount its folder" in done.stderr
    assert [key.name for key in read_keys(source) if key.revoked is None] == ["two"]
    assert names(mounted.parent) == {"keys.json", "keys.json.lock"}


def test_an_error_leaves_no_temporary_file(keys_file: Path) -> None:
    """A file system that takes no more: the keys from before stay, and nothing is beside them."""
    key, _ = add_key(keys_file, "one")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
    try:
        with pytest.raises(KeysError, match=os.strerror(errno.EFBIG)):
            add_key(keys_file, "two")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert KeyStore(keys_file).find(key).name == "one"
    assert names(keys_file.parent) == {"keys.json", "keys.json.lock"}


@pytest.mark.parametrize(
    "name",
    [
        "a\nb",
        "\x1b[31mred",
        "right\u202eleft",
        "zero\u200bwidth",
        " a",
        "a ",
        " ",
        "a\x00",
    ],
)
def test_names_are_what_they_look_like(name: str, keys_file: Path) -> None:
    """Control characters, and spaces that nobody sees, are refused; a file of an earlier release is read all the same."""
    with pytest.raises(KeysError, match=r"name: .* printable characters"):
        add_key(keys_file, name)
    assert not keys_file.exists()
    add_key(keys_file, "plain")
    older = keys_file.read_text().replace('"plain"', '"pla\\nin"')
    keys_file.write_text(older)
    assert [key.name for key in read_keys(keys_file)] == ["pla\nin"]


@pytest.mark.parametrize(
    "name", ["Ann Müller", "批处理", "team-7/batch [eu]", "a" * 100]
)
def test_names_may_be_any_text(name: str, keys_file: Path) -> None:
    assert add_key(keys_file, name)[1].name == name


def test_no_key_is_named_like_another_keys_id(keys_file: Path) -> None:
    """A name that is another key's id is refused: a revocation by id might otherwise hit the wrong key."""
    _, record = add_key(keys_file, "one")
    with pytest.raises(KeysError, match="id of another key"):
        add_key(keys_file, record.id)


def test_keys_are_switched_off_and_on(keys_file: Path) -> None:
    """Off, everybody is served and the keys stay; on again, they are in force. A new key does not switch them on."""
    with pytest.raises(KeysError, match="no key in force"):
        switch_keys(keys_file, on=True)
    first, _ = add_key(keys_file, "one")
    store = KeyStore(keys_file)
    switch_keys(keys_file, on=False)
    assert not store.required
    second, _ = add_key(keys_file, "two")
    assert not store.required
    assert read_key_file(keys_file).is_off
    switch_keys(keys_file, on=True)
    assert store.required
    assert [store.find(key).name for key in (first, second)] == ["one", "two"]
    # routers of older releases read it
    assert '"required"' not in keys_file.read_text()


def test_there_is_a_way_back_from_a_file_that_is_gone(keys_file: Path) -> None:
    """Keys of a deleted file stay in force, and the note says how to serve without; off, a deleted file changes nothing."""
    key, _ = add_key(keys_file, "one")
    store = KeyStore(keys_file)
    keys_file.unlink()
    assert store.required
    assert store.find(key).name == "one"
    assert store.notes
    switch_keys(keys_file, on=False)
    assert not store.required
    assert store.notes == []
    keys_file.unlink()
    assert not store.required
    assert store.notes == []


def test_keys_are_not_off_where_others_reach_the_router(
    keys_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless the settings allow it, keys are not switched off at the start nor while it runs; the old keys stay in force."""
    key, _ = add_key(keys_file, "one")
    overrides = {"server": {"host": "0.0.0.0"}, "auth": {"keys_file": str(keys_file)}}
    running = open_keys(load_settings(None, overrides))
    switch_keys(keys_file, on=False)
    assert running.required
    assert running.find(key).name == "one"
    assert "auth.allow_keyless" in caplog.text
    with pytest.raises(ListenError, match="qarr keys on"):
        open_keys(load_settings(None, overrides))
    assert not open_keys(
        load_settings(None, {"auth": {"keys_file": str(keys_file)}})
    ).required
    overrides["auth"]["allow_keyless"] = True  # type: ignore[index]
    assert not open_keys(load_settings(None, overrides)).required
