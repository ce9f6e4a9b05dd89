"""Connections: limits, timeouts, draining, handover."""
