"""Prefill's decision: how much of a claimed lease may be read, and why not more.

Pure: no I/O, no protobuf, no vLLM. The real scheduler and the fake engine of
the tests both call ``plan_readback`` and nothing else decides.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtide.connector.fingerprint import Fingerprint, block_count, verified_token_count
from kvtide.connector.handle import KVTIDE_KEY, KvHandle, cut_handle, handle_from_params

# Why a turn's prompt was not (wholly) read back. "pulled" is the good outcome.
REUSE_PULLED = "pulled"
REUSE_NO_HANDLE = "no_handle"
REUSE_UNVERIFIED = "unverified"
REUSE_HISTORY_CHANGED = "history_changed"
REUSE_BLOCK_SIZE_MISMATCH = "block_size_mismatch"
REUSE_UNSUPPORTED_CACHE = "unsupported_cache"
REUSE_BELOW_THRESHOLD = "below_threshold"
REUSE_CACHED = "cached"
REUSE_TRANSFER_FAILED = "transfer_failed"
REUSE_PREEMPTED = "preempted"
REUSE_UNSUPPORTED_INPUT = "unsupported_input"

READ_DONE = "read"
READ_NOT = "not_read"
READ_UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class EngineCache:
    """What a prefill engine's KV cache can take in.

    ``prefix_cut_possible`` is False for caches whose block lists are clipped at
    the front (sliding window, state space): they are read whole or not at all.
    ``readback_possible`` is False when the engine cannot read back at all.
    """

    block_size_tokens: int
    prefix_cut_possible: bool = True
    readback_possible: bool = True


@dataclass(frozen=True, slots=True)
class ReadbackPlan:
    """The handle that may be read (None: read nothing), and the reason if cut or refused."""

    handle: KvHandle | None
    reason: str


def has_handle(params: Mapping[str, Any]) -> bool:
    """Whether a prefill request asks for a readback."""
    return bool(params.get("do_remote_decode") and params.get("remote_block_ids"))


def fingerprint_to_params(fingerprint: Fingerprint) -> dict[str, Any]:
    """Spell a fingerprint as JSON for ``kv_transfer_params["kvtide"]["fingerprint"]``."""
    return {
        "algorithm": fingerprint.algorithm,
        "block_size_tokens": fingerprint.block_size_tokens,
        "token_count": fingerprint.token_count,
        "digests": base64.b64encode(fingerprint.digests).decode("ascii"),
    }


def fingerprint_from_params(params: Mapping[str, Any]) -> Fingerprint | None:
    """Read the fingerprint beside a handle; None when absent or malformed."""
    own = params.get(KVTIDE_KEY)
    spelled = own.get("fingerprint") if isinstance(own, Mapping) else None
    if not isinstance(spelled, Mapping):
        return None
    try:
        return Fingerprint(
            algorithm=str(spelled["algorithm"]),
            block_size_tokens=int(spelled["block_size_tokens"]),
            token_count=int(spelled["token_count"]),
            digests=base64.b64decode(spelled["digests"], validate=True),
        )
    except (KeyError, TypeError, ValueError, binascii.Error):
        return None


def plan_readback(  # noqa: PLR0911 - one return for each reason reads best
    params: Mapping[str, Any],
    prompt_token_ids: Sequence[int],
    cache: EngineCache,
    seed: bytes = b"",
) -> ReadbackPlan:
    """Decide what of the handle in ``params`` may be read for this prompt (contract L8).

    Whatever is wrong with the handle, the answer is to read less, never an error:
    a recompute is slow, and a wrong read is wrong.
    """
    if not has_handle(params):
        return ReadbackPlan(None, REUSE_NO_HANDLE)
    if not cache.readback_possible:
        return ReadbackPlan(None, REUSE_UNSUPPORTED_CACHE)
    fingerprint = fingerprint_from_params(params)
    if fingerprint is None:
        return ReadbackPlan(None, REUSE_UNVERIFIED)
    if fingerprint.block_size_tokens != cache.block_size_tokens:
        return ReadbackPlan(None, REUSE_BLOCK_SIZE_MISMATCH)
    try:
        handle = handle_from_params(params, fingerprint.block_size_tokens)
    except ValueError:
        return ReadbackPlan(None, REUSE_UNVERIFIED)
    if handle.token_count != fingerprint.token_count or handle.engine_clock_expiry_s is None:
        # An absent expiry would be an unchecked read; a length that differs from
        # the fingerprint's would leave blocks unproven.
        return ReadbackPlan(None, REUSE_UNVERIFIED)
    if cache.prefix_cut_possible and any(
        len(group) != block_count(handle.token_count, handle.block_size_tokens)
        for group in handle.block_groups
    ):
        return ReadbackPlan(None, REUSE_UNVERIFIED)
    verified = verified_token_count(fingerprint, prompt_token_ids, seed)
    if verified == handle.token_count:
        return ReadbackPlan(handle, REUSE_PULLED)
    if verified == 0 or not cache.prefix_cut_possible or len(handle.block_groups) != 1:
        return ReadbackPlan(None, REUSE_HISTORY_CHANGED)
    return ReadbackPlan(cut_handle(handle, verified), REUSE_HISTORY_CHANGED)
