"""Tell what the installed vLLM says to argument lists, without starting it. Runs in the engines' environment.

It is vLLM's own server that reads them: its parser and its checks come before its event loop, which is replaced. Standard
input has a JSON list of argument lists; the last line of standard output has, for each, what vLLM says against it, or null.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine


class _AcceptedError(Exception):
    """The arguments were read and checked: the server would start now."""


def _would_start(server: Coroutine[Any, Any, None], **_: Any) -> None:
    server.close()
    raise _AcceptedError


def refusal(args: list[str]) -> str | None:
    """Return what vLLM says against arguments; None: nothing."""
    said = io.StringIO()
    sys.argv = ["vllm", *args]
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            runpy.run_module(
                "vllm.entrypoints.openai.api_server",
                run_name="__main__",
                alter_sys=False,
            )
    except _AcceptedError:
        return None
    except SystemExit:  # the parser's way out, after it has said why
        return said.getvalue().strip().rpartition("error: ")[2]
    except ImportError:  # no vLLM, or a broken one: nothing can be said of arguments
        raise
    except Exception as error:  # noqa: BLE001  whatever its checks raise
        return str(error) or type(error).__name__
    return None


if __name__ == "__main__":
    import uvloop

    uvloop.run = _would_start  # type: ignore[assignment]
    print(json.dumps([refusal(args) for args in json.load(sys.stdin)]))
