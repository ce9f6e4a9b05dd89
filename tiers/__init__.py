"""The fleet: one model at three precisions, each served by engine processes that are started, warmed and watched here."""
