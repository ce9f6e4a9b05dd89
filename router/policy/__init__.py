"""Decide which tier serves a request, and why."""
