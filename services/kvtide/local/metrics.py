"""Reads what an engine or the router counts, from its Prometheus endpoint."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

HTTP_TIMEOUT_S = 10.0

BYTES_READ = "vllm:nixl_bytes_transferred_sum"
"""Bytes that this engine read from others over NIXL; whole blocks."""
TOKENS_READ = 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}'
"""Prompt tokens whose KV this engine read from others instead of computing it."""
TOKENS_COMPUTED = 'vllm:prompt_tokens_by_source_total{source="local_compute"}'
"""Prompt tokens that this engine computed."""
UNSAFE_READS = "vllm:nixl_num_notifications_after_expiry_total"
"""Reads of this engine's blocks that ended after it had freed them. Must stay 0."""


def parse_metrics(text: str) -> dict[str, float]:
    """Sample name to value, summed over all label sets.

    Samples with a `source` label are also there source by source, as `name{source="…"}`.
    Histogram buckets and the times at which counters were created are left out: their sums mean
    nothing.
    """
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith(("_bucket", "_created")):
                continue
            keys = [sample.name]
            if "source" in sample.labels:
                keys.append(f'{sample.name}{{source="{sample.labels["source"]}"}}')
            for key in keys:
                values[key] = values.get(key, 0.0) + sample.value
    return values


def read_metrics(url: str) -> dict[str, float]:
    """The current metrics of the server at this base URL. Raises OSError if it does not answer."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=HTTP_TIMEOUT_S) as response:  # noqa: S310 - our own http URL
        return parse_metrics(response.read().decode())
