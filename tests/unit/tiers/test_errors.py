"""The tree of errors."""

from __future__ import annotations

import inspect
import re

from tiers import errors


def test_the_drawn_tree_is_the_real_one() -> None:
    """Each class is drawn once, one level below its base."""
    drawn: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(
            r"([│├└─ ]*)(\w+(?:Error|InUse|Died|Hung|Slow|Failed|Refused|Mismatch|Replica|Possible))\b",
            line,
        )
        if found:
            level = len(found[1]) // 4
            path[level:] = [found[2]]
            assert found[2] not in drawn
            drawn[found[2]] = path[level - 1] if level else "Exception"
    real = {
        name: kind.__bases__[0].__name__
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, Exception)
    }
    assert drawn == real
