"""``qarr doctor``."""
