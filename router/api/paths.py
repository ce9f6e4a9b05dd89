"""Paths of endpoints that several modules name."""

from __future__ import annotations

PAGE = "/"

MOST_LISTED = 1000
