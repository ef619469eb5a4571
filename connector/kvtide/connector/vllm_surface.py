"""Every vLLM name below the public connector interface that this package relies on.

When vLLM moves one, ``check_vllm_surface`` fails at engine start and names it,
and so does a test. Add a name here before you use it anywhere else.
"""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Attributes and methods of the scheduler side, and who uses them.
SCHEDULER_NAMES = (
    "block_size",
    "decoder_kv_blocks_ttl",
    "engine_id",
    "get_num_new_matched_tokens",
    "has_pending_push_work",
    "is_bidirectional_kv_xfer_enabled",
    "kv_recompute_threshold",
    "on_new_request",
    "request_finished",
    "update_connector_output",
    "update_state_after_alloc",
    "use_host_buffer",
    "_has_mamba",
    "_is_hma_required",
    "_reqs_in_batch",
    "_reqs_need_recv",
    "_reqs_need_send",
    "_reqs_not_processed",
    "_stop_heartbeat",
)

#: Attributes and methods of the worker side.
WORKER_NAMES = (
    "consumer_notification_counts_by_req",
    "expected_consumer_notifications_by_req",
    "get_transfer_results",
    "start_load_kv",
    "xfer_stats",
    "_engine_clock_offset",
    "_get_new_notifs",
    "_pop_done_transfers",
    "_reap_expired_send_leases",
    "_recving_metadata",
    "_reqs_to_process",
    "_reqs_to_send",
)

#: Keys that vLLM reads from, or leaves in, ``kv_transfer_params``.
PARAM_NAMES = (
    "do_remote_decode",
    "do_remote_prefill",
    "remote_block_ids",
    "remote_blocks_expiry_time",
    "remote_engine_id",
    "remote_host",
    "remote_num_tokens",
    "remote_port",
    "remote_request_id",
    "_remote_blocks_processed",
)

#: Fields of ``vllm.v1.request.Request``.
REQUEST_NAMES = (
    "abort_immediately",
    "all_token_ids",
    "kv_transfer_params",
    "lora_request",
    "mm_features",
    "num_computed_tokens",
    "num_prompt_tokens",
    "num_tokens",
    "prompt_token_ids",
    "request_id",
    "status",
)


class VllmSurfaceError(RuntimeError):
    """The installed vLLM lacks a name that kvtide relies on."""


def _source_of(cls: type) -> str:
    return "\n".join(
        inspect.getsource(base) for base in cls.__mro__ if base.__module__.startswith("vllm.")
    )


def missing_names() -> Iterator[str]:
    """Names that the installed vLLM does not have, as ``Class.name``."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
        NixlPullConnectorScheduler,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import (
        NixlPullConnectorWorker,
    )
    from vllm.v1.request import Request

    expected = (
        (NixlPullConnectorScheduler, SCHEDULER_NAMES),
        (NixlPullConnectorWorker, WORKER_NAMES),
        (Request, REQUEST_NAMES),
    )
    for cls, names in expected:
        # Most are set in __init__, so only the source can show them.
        source = _source_of(cls)
        for name in names:
            if not re.search(rf"(self\.|def ){re.escape(name)}\b", source):
                yield f"{cls.__name__}.{name}"
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata

    source = _source_of(NixlPullConnectorScheduler) + inspect.getsource(metadata)
    for name in PARAM_NAMES:
        if not re.search(rf"\b{re.escape(name)}\b", source):
            yield f"kv_transfer_params[{name!r}]"


def check_vllm_surface() -> None:
    """Raise VllmSurfaceError naming everything that is missing."""
    missing = sorted(missing_names())
    if missing:
        from vllm import __version__

        msg = (
            f"vLLM {__version__} has no {', '.join(missing)}: this kvtide does not fit it. "
            "Use a vLLM that kvtide supports (see README), or a newer kvtide."
        )
        raise VllmSurfaceError(msg)
