"""Pages of metrics as an engine has them."""

from __future__ import annotations

GAUGES = "vllm:num_requests_running {}\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc {}\n"
