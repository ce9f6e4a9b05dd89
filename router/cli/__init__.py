"""The ``qarr`` command."""
