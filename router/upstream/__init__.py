"""Requests to engines and their answers."""
