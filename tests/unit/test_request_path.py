"""benchmarks/request_path.py: what it makes of perf's samples and of the files that cProfile names."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from router.section import PROJECT

# Lines of ``perf report --stdio -F overhead,dso,sym``, shares rounded.
REPORT = """\
# Samples: 200  of event 'cpu-clock:pppH'
#
# Overhead  Shared Object                          Symbol
# ........  .....................................  ........................................
#
    30.00%  libpython3.11.so.1.0                   [.] _PyEval_EvalFrameDefault
    10.00%  python3.11                             [.] _PyType_Lookup
     4.00%  libpython3.11.so.1.0                   [.] sre_ucs1_match
     1.00%  libpython3.11.so.1.0                   [.] _sre_SRE_Pattern_findall
     2.50%  [kernel.kallsyms]                      [k] do_syscall_64
     2.50%  libc.so.6                              [.] _int_free
     2.00%  libpython3.11.so.1.0                   [.] _PyObject_Malloc
     1.50%  libc.so.6                              [.] cfree@GLIBC_2.2.5
     1.50%  libpython3.11.so.1.0                   [.] list_dealloc
     1.50%  libpython3.11.so.1.0                   [.] _Py_NewReference@plt
     1.00%  libc.so.6                              [.] unlink_chunk.constprop.0
     3.00%  libc.so.6                              [.] __memmove_avx_unaligned_erms
     2.00%  loop.cpython-311-x86_64-linux-gnu.so   [.] __pyx_f_6uvloop_4loop_11UVStream__try_write
     1.00%  _core.cpython-311-x86_64-linux-gnu.so  [.] mpack_encode
     0.50%  fasttext_pybind.cpython-311.so         [.] fasttext::FastText::getStringNoNewline(std::istream&) const
"""


@pytest.fixture
def request_path(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(PROJECT / "benchmarks"))
    before = set(sys.modules)
    yield import_module("request_path")
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_samples_are_added_up_by_cause(request_path: Any) -> None:
    """Python's allocator and the C library's are one cause, whatever the symbol's version."""
    assert request_path.causes(REPORT) == {
        "interpreter": 40.0,
        "regular expressions": 5.0,
        "kernel": 2.5,
        "allocation": 10.0,
        "C: libc": 3.0,
        "C: uvloop": 2.0,
        "C: msgspec": 1.0,
        "C: fasttext_pybind": 0.5,
    }


@pytest.mark.parametrize(
    ("file", "room"),
    [
        ("router/policy/decide.py", "router/policy"),
        ("router/app.py", "router"),
        ("tiers/fleet.py", "tiers"),
        (".venv/lib/python3.11/site-packages/uvicorn/server.py", "uvicorn"),
        ("/usr/lib/python3.11/asyncio/tasks.py", "asyncio"),
        ("<string>", "others"),
    ],
)
def test_a_file_belongs_to_a_room_or_a_library(
    request_path: Any, tmp_path: Path, file: str, room: str
) -> None:
    name = str(tmp_path / file) if file[0] != "<" else file
    assert request_path.component(name, tmp_path) == room
