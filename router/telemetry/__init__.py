"""Records, traces and logs of requests."""
