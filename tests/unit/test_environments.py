"""How environments are made: from locks with hashes, by uv with pip's settings."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCKS = sorted(
    path
    for path in (ROOT / "requirements").glob("*.txt")
    if path.name != "overrides.txt"
)
# The variable is read before a fixture removes it from the tests' environment.
CACHE = os.environ.get("QARR_CACHE_DIR") or ""


def uv_script() -> Any:
    spec = importlib.util.spec_from_file_location("uv_script", ROOT / "scripts/uv.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_locks_have_versions_and_hashes_and_no_addresses(lock: Path) -> None:
    """Every line names one version with the hashes of its files; nothing says where files come from."""
    text = lock.read_text("utf-8").replace("\\\n", "")
    for line in text.splitlines():
        assert re.fullmatch(
            r"[\w.-]+(\[[\w,-]+\])?==\S+( ; [^@]+?)?(\s+--hash=sha256:[0-9a-f]{64})+ *",
            line,
        ), line
    names = {source.stem for source in (ROOT / "requirements").glob("*.in")}
    assert lock.stem in names


def test_the_lock_of_portkey_has_versions_and_hashes_and_no_addresses() -> None:
    """Every package from npm has one version and the hash of its file; nothing says where files come from."""
    folder = ROOT / "requirements/portkey"
    wanted = json.loads((folder / "package.json").read_text("utf-8"))["dependencies"]
    locked = json.loads((folder / "package-lock.json").read_text("utf-8"))["packages"]
    assert locked.pop("")["dependencies"] == wanted
    assert (
        locked["node_modules/@portkey-ai/gateway"]["version"]
        == wanted["@portkey-ai/gateway"]
    )
    for name, package in locked.items():
        assert re.fullmatch(r"\d+\.\d+\.\d+\S*", package["version"]), name
        assert package["integrity"].startswith("sha512-"), name
        assert "resolved" not in package, name


def test_pip_is_told_by_files_and_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file's section for installations overrides its global section, and a variable overrides both."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = http://global.test/simple\ntimeout = 7\nfind-links =\n    /a\n    /b\n"
        "[install]\nindex-url = http://install.test/simple\n[list]\nformat = json\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_TIMEOUT", "9")
    pip = uv_script().pip_settings(Path(sys.executable))
    assert pip["index-url"] == "http://install.test/simple"
    assert pip["timeout"] == "9"
    assert pip["find-links"].split() == ["/a", "/b"]
    assert "format" not in pip


def test_uv_is_told_what_pip_is_told() -> None:
    """pip's settings become uv's variables; variables of uv that are set already stay."""
    translate = uv_script().uv_settings
    pip = {
        "index-url": "http://a.test/simple",
        "extra-index-url": "http://b.test/simple\nhttp://c.test/simple",
        "find-links": "/a /b",
        "trusted-host": "a.test b.test",
        "cert": "/etc/ca.pem",
        "timeout": "60",
        "proxy": "http://proxy.test:3128",
        "quiet": "1",
    }
    assert translate(pip, {}) == {
        "UV_DEFAULT_INDEX": "http://a.test/simple",
        "UV_INDEX": "http://b.test/simple http://c.test/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/a,/b",
        "UV_INSECURE_HOST": "a.test b.test",
        "SSL_CERT_FILE": "/etc/ca.pem",
        "UV_HTTP_TIMEOUT": "60",
        "ALL_PROXY": "http://proxy.test:3128",
    }
    own = {
        "UV_INDEX_URL": "http://mine.test",
        "UV_INDEX": "",
        "SSL_CERT_FILE": "/m.pem",
        "UV_HTTP_TIMEOUT": "1",
    }
    assert set(translate(pip, own)) == {
        "UV_FIND_LINKS",
        "UV_INSECURE_HOST",
        "ALL_PROXY",
    }


def test_uv_finds_torchs_cpu_build_unless_it_is_told_where_packages_are() -> None:
    """The backend is chosen only for a lock that has it, and never against a variable or an option."""
    backend = uv_script().torch_backend
    argv = ["pip", "install", "-r", "requirements/engine-cpu.txt"]
    assert backend(argv, {"UV_CACHE_DIR": "/c", "UV_INDEX": ""}) == [
        "--torch-backend",
        "cpu",
    ]
    for environment in (
        {"UV_FIND_LINKS": "/wheels"},
        {"UV_DEFAULT_INDEX": "http://a.test"},
        {"UV_TORCH_BACKEND": "auto"},
    ):
        assert backend(argv, environment) == []
    assert backend([*argv, "--no-index"], {}) == []
    assert backend([*argv, "--find-links=/w"], {}) == []
    assert backend(["pip", "install", "-r", "requirements/engine-cuda.txt"], {}) == []
    assert backend(["pip", "compile", "requirements/engine-cpu.txt"], {}) == []


@pytest.mark.parametrize("right", [True, False], ids=["right hash", "another hash"])
def test_only_files_with_the_locked_hash_are_installed(
    tmp_path: Path, *, right: bool
) -> None:
    """A wheel is installed from the folder in PIP_FIND_LINKS, without an index, only if its hash is the locked one."""
    wheel = _wheel(tmp_path / "wheels")
    digest = hashlib.sha256(wheel.read_bytes() if right else b"").hexdigest()
    (tmp_path / "lock.txt").write_text(f"qarr-sample==1.0+cpu --hash=sha256:{digest}\n")
    env = {**os.environ, **({"QARR_CACHE_DIR": CACHE} if CACHE else {})}
    venv = _uv(env, ["venv", "--python", sys.executable, str(tmp_path / "env")])
    assert venv.returncode == 0, venv.stderr
    env |= {
        "PIP_FIND_LINKS": str(wheel.parent),
        "PIP_NO_INDEX": "1",
        "UV_CACHE_DIR": str(tmp_path / "uv"),
    }
    python = str(tmp_path / "env/bin/python")
    lock = str(tmp_path / "lock.txt")
    install = _uv(
        env, ["pip", "install", "--python", python, "--require-hashes", "-r", lock]
    )
    assert (install.returncode == 0) is right, install.stderr
    assert right or "Hash mismatch" in install.stderr
    assert bool(list((tmp_path / "env").rglob("qarr_sample.py"))) is right


def _uv(env: dict[str, str], arguments: list[str]) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, ROOT / "scripts/uv.py", *arguments]
    return subprocess.run(
        argv, env=env, capture_output=True, text=True, check=False, timeout=100
    )


def _wheel(folder: Path) -> Path:
    folder.mkdir()
    path = folder / "qarr_sample-1.0+cpu-py3-none-any.whl"
    info = "qarr_sample-1.0+cpu.dist-info"
    files = {
        "qarr_sample.py": b"",
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: qarr-sample\nVersion: 1.0+cpu\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
        record.append(f"{name},sha256={digest.rstrip(b'=').decode()},{len(data)}")
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", "\n".join([*record, f"{info}/RECORD,,", ""]))
    return path
