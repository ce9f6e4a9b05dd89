"""The OpenAPI document: ``openapi.yaml`` beside this file (docs/openapi.yaml), kept by hand and served as JSON."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import yaml

FILE = Path(__file__).with_name("openapi.yaml")


@cache
def document(version: str) -> bytes:
    """Return the document of a version of the router, as JSON; reading it takes a tenth of a second."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    contents = yaml.load(FILE.read_text("utf-8"), loader)  # noqa: S506  a safe loader
    contents["info"]["version"] = version
    return json.dumps(contents).encode()
