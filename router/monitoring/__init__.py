"""Metrics, the live feed and the page."""
