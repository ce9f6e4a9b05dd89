"""Settings whose constants a test turns: times and sizes that no operator sets."""

from __future__ import annotations

from typing import Any

from router.settings import Settings, load_settings


def turned(overrides: dict[str, Any]) -> Settings:
    """Return the settings with values over their defaults, by section; a section's constants may be among them."""
    given = {}
    fixed = {}
    for name, own in overrides.items():
        known: set[str] = getattr(
            Settings.model_fields[name].annotation, "__class_vars__", set()
        )
        given[name] = {key: value for key, value in own.items() if key not in known}
        fixed[name] = {key: value for key, value in own.items() if key in known}
    settings = load_settings(None, given)
    update = {}
    for name, constants in fixed.items():
        section = getattr(settings, name)
        kind: Any = type(
            section.__class__.__name__,
            (section.__class__,),
            {"__module__": __name__, **constants},
        )
        update[name] = kind.model_construct(**dict(section)) if constants else section
    return settings.model_copy(update=update)
