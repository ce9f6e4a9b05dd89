"""``qarr top``."""
