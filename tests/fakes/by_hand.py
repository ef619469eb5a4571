"""Drives the two legs of a turn by hand, as the simplest of routers would.

For tests of the engines themselves, real and fake ones alike: no kvtide service
is involved, and the handle is whatever the test gives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine answered to one completion request."""

    status: int
    body: dict[str, Any]

    @property
    def text(self) -> str:
        """The answer's text. Raises KeyError when the answer is an error."""
        choice = self.body["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])

    @property
    def logprobs(self) -> list[float]:
        """Log probability of each token of the answer."""
        logprobs = self.body["choices"][0]["logprobs"]
        if "content" in logprobs:
            return [entry["logprob"] for entry in logprobs["content"]]
        return [float(value) for value in logprobs["token_logprobs"]]

    @property
    def params(self) -> dict[str, Any]:
        """The answer's ``kv_transfer_params``."""
        return dict(self.body["kv_transfer_params"])

    @property
    def outcome(self) -> dict[str, Any]:
        """What kvtide's connector on prefill says became of the prompt."""
        return dict(self.params["kvtide"])


@dataclass(frozen=True, slots=True)
class Turn:
    """Both legs' answers."""

    prefill: Answer
    decode: Answer


@dataclass(slots=True)
class ByHand:
    """A prefill and a decode engine, by base URL.

    ``turn_ids`` go to decode under ``kvtide``: without them the leased
    connector pins nothing.
    """

    http: aiohttp.ClientSession
    prefill_url: str
    decode_url: str
    model: str = "tiny"
    turn_ids: dict[str, Any] = field(default_factory=dict)

    async def complete(self, url: str, prompt: str, **body: Any) -> Answer:
        """One completion request to one engine."""
        body = _DEFAULTS | {"model": self.model, "prompt": prompt} | body
        async with self.http.post(f"{url}/v1/completions", json=body) as response:
            return Answer(response.status, await response.json())

    async def prefill_leg(
        self, prompt: str, handle: dict[str, Any] | None = None, **body: Any
    ) -> Answer:
        """The first leg; ``handle`` is what it may read back."""
        params = {**(handle or {}), "do_remote_decode": True, "do_remote_prefill": False}
        legs = {"max_tokens": 1, "kv_transfer_params": params}
        return await self.complete(self.prefill_url, prompt, **(body | legs))

    async def decode_leg(self, prompt: str, params: dict[str, Any], **body: Any) -> Answer:
        """The second leg, reading what the first one left."""
        own = {"kvtide": self.turn_ids} if self.turn_ids else {}
        sent = {key: value for key, value in params.items() if key != "kvtide"} | own
        return await self.complete(self.decode_url, prompt, kv_transfer_params=sent, **body)

    async def turn(self, prompt: str, handle: dict[str, Any] | None = None, **body: Any) -> Turn:
        """Both legs, one after the other."""
        prefill = await self.prefill_leg(prompt, handle, **body)
        assert prefill.status == 200, prefill.body
        return Turn(prefill, await self.decode_leg(prompt, prefill.params, **body))


_DEFAULTS: dict[str, Any] = {
    "max_tokens": 16,
    "logprobs": 1,
    "temperature": 0,
    "ignore_eos": True,
}
