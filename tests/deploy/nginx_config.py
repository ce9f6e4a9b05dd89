"""A configuration of nginx around the files of deploy/nginx."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from tests.deploy.services import DEPLOY

if TYPE_CHECKING:
    from pathlib import Path


def router_lines(ports: list[int]) -> str:
    """Return the file that lists the routers, with two ports in place of its own."""
    text = (DEPLOY / "nginx/qarr-routers.inc").read_text("utf-8")
    listed = re.findall(r"^server 127\.0\.0\.1:(\d+)", text, re.MULTILINE)
    assert listed == ["8080", "8081"]
    return text.replace(":8080", f":{ports[0]}").replace(":8081", f":{ports[1]}")


def configure(folder: Path, port: int, routers: str) -> None:
    """Write a configuration around deploy/nginx, in which only the port and the place of the log are other ones."""
    folder.mkdir()
    text = (DEPLOY / "nginx/qarr.conf").read_text("utf-8")
    for old, new in (
        ("listen 8000;", f"listen 127.0.0.1:{port};"),
        ("/var/log/nginx/qarr.log", str(folder / "access.log")),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / "qarr.conf").write_text(text)
    (folder / "qarr-routers.inc").write_text(routers)
    # Other users may not enter the folders of this test.
    user = "user root;" if os.getuid() == 0 else ""
    places = "".join(
        f"{kind}_temp_path {folder}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"{user} daemon off; worker_processes 1; pid {folder}/pid; error_log stderr;\n"
        f"events {{}}\nhttp {{ {places} include qarr.conf; }}\n"
    )
