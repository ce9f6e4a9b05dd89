"""The router: HTTP in and out. Composes the classifier and the fleet."""

import logging
import os
from importlib.metadata import entry_points


def drop_empty() -> None:
    """Remove OpenTelemetry's variables that are set and empty, which its specification equates with not set.

    Its libraries do not do so for all of them: with an empty ``OTEL_PROPAGATORS`` they cannot be imported.
    """
    for name in [
        name
        for name, value in os.environ.items()
        if name.startswith("OTEL_") and not value
    ]:
        del os.environ[name]


def leave_out_unknown(variable: str, group: str) -> None:
    """Leave out of a variable what is not installed: the import of OpenTelemetry, which reads it, would fail."""
    if setting := os.environ.get(variable):
        known = entry_points(group=group).names | {"none"}
        named = [name.strip() for name in setting.split(",")]
        if unknown := [name for name in named if name not in known]:
            os.environ[variable] = ",".join(name for name in named if name in known)
            message = "%s=%s: %s is not installed and left out; installed: %s"
            logging.getLogger(f"qarr.{__name__}").warning(
                message, variable, setting, ", ".join(unknown), ", ".join(sorted(known))
            )


drop_empty()
leave_out_unknown("OTEL_PROPAGATORS", "opentelemetry_propagator")
leave_out_unknown("OTEL_PYTHON_CONTEXT", "opentelemetry_context")
