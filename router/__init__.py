"""The router: HTTP in and out. Composes the classifier and the fleet."""

import logging
import os
from importlib.metadata import entry_points


def drop_empty() -> None:
    """Remove OpenTelemetry's variables that are set and empty, which its specification equates with not set.

    Its libraries do not do so for all of them: with an empty ``OTEL_PROPAGATORS`` they cannot be imported.
    """
    for name, value in list(os.environ.items()):
        if name.startswith("OTEL_") and not value:
            del os.environ[name]


def leave_out_unknown(variable: str, group: str) -> None:
    """Leave out of a variable what is not installed: the import of OpenTelemetry, which reads it, would fail."""
    setting = os.environ.get(variable)
    if not setting:
        return
    installed_names = entry_points(group=group).names | {"none"}
    listed_names = [name.strip() for name in setting.split(",")]
    unknown_names = [name for name in listed_names if name not in installed_names]
    if not unknown_names:
        return
    usable_names = [name for name in listed_names if name in installed_names]
    os.environ[variable] = ",".join(usable_names)
    logging.getLogger(f"qarr.{__name__}").warning(
        "%s=%s: %s is not installed and left out; installed: %s",
        variable,
        setting,
        ", ".join(unknown_names),
        ", ".join(sorted(installed_names)),
    )


drop_empty()
leave_out_unknown("OTEL_PROPAGATORS", "opentelemetry_propagator")
leave_out_unknown("OTEL_PYTHON_CONTEXT", "opentelemetry_context")
