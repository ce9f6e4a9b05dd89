"""API keys, quotas, and who is on this machine."""
