"""Lay out the fleet, start it, and run the router."""
