"""Headless Chromium, Debian's own, driven by Playwright."""

from __future__ import annotations

import shutil

from playwright.async_api import Browser, Playwright

ARGUMENTS = [
    "--no-sandbox",  # tests may run as root
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
]


async def launched(tool: Playwright) -> Browser:
    program = shutil.which("chromium")
    assert program, (
        "chromium is not installed: scripts/setup services, or apt-get install chromium"
    )
    return await tool.chromium.launch(executable_path=program, args=ARGUMENTS)
