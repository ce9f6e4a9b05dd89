"""Settings with other values for some constants: times and sizes that operators cannot set."""

from __future__ import annotations

from typing import Any

from router.settings import Settings, load_settings


def turned(overrides: dict[str, Any]) -> Settings:
    """Return settings with other values than the defaults, by section; a value may be of a section's constant."""
    own_settings: dict[str, Any] = {}
    own_constants: dict[str, dict[str, Any]] = {}
    for name, values in overrides.items():
        section_class = Settings.model_fields[name].annotation
        constants: set[str] = getattr(section_class, "__class_vars__", set())
        own_settings[name] = {
            key: value for key, value in values.items() if key not in constants
        }
        own_constants[name] = {
            key: value for key, value in values.items() if key in constants
        }
    settings = load_settings(None, own_settings)
    changed_sections = {
        name: _with_constants(getattr(settings, name), constants)
        for name, constants in own_constants.items()
        if constants
    }
    return settings.model_copy(update=changed_sections)


def _with_constants(section: Any, constants: dict[str, Any]) -> Any:
    """Return a section whose class has other values for some constants."""
    section_class = section.__class__
    namespace = {"__module__": __name__, **constants}
    changed: Any = type(section_class.__name__, (section_class,), namespace)
    return changed.model_construct(**dict(section))
