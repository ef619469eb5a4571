"""The class that vLLM loads: ``LeasedNixlConnector``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.logger import init_logger

from kvtide.connector.engine_settings import EngineSettings
from kvtide.connector.scheduler import LeasedNixlScheduler
from kvtide.connector.vllm_surface import check_vllm_surface
from kvtide.connector.worker import LeasedNixlWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvtide.connector.agent import EngineAgent
    from kvtide.connector.worker import LeaseWorkerMeta

logger = init_logger(__name__)


class LeasedNixlConnector(NixlPullConnector):  # type: ignore[misc]
    """vLLM's pull-mode NIXL connector, with leases.

    Load it with ``--kv-transfer-config '{"kv_connector": "LeasedNixlConnector",
    "kv_connector_module_path": "kvtide.connector", …}'``. Where the registry is
    comes from the environment (see ``engine_settings``); without one, the engine
    is a plain vLLM engine that pins nothing for conversations.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        check_vllm_surface()
        # The pull façade's own constructor would build the upstream scheduler and
        # worker, with their listener threads, before they could be replaced.
        super(NixlPullConnector, self).__init__(vllm_config, role, kv_cache_config)
        self._agent: EngineAgent | None = None
        self._scheduler: LeasedNixlScheduler | None = None
        self._worker: LeasedNixlWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = LeasedNixlScheduler(vllm_config, self.engine_id, kv_cache_config)
            self._start_agent(vllm_config, self._scheduler)
        else:
            self._worker = LeasedNixlWorker(vllm_config, self.engine_id, kv_cache_config)
        self.connector_scheduler = self._scheduler
        self.connector_worker = self._worker

    def _start_agent(self, vllm_config: VllmConfig, scheduler: LeasedNixlScheduler) -> None:
        settings = EngineSettings.from_environment()
        if settings is None:
            logger.warning(
                "kvtide: KVTIDE_ENGINE_REGISTRY is not set: this engine joins no fleet "
                "and grants no leases"
            )
            return
        # Imported here: grpc must not be loaded in a process that vLLM is yet to fork.
        from kvtide.connector.agent import EngineAgent
        from kvtide.connector.identity import describe_engine

        self._agent = EngineAgent(
            settings=settings,
            identity=describe_engine(vllm_config, settings, scheduler),
            pins=scheduler.pins,
            release=scheduler.release_requests.put,
            load=lambda: scheduler.load,
        )
        self._agent.start()

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Hand the cache manager to the scheduler side."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            self._scheduler.bind_kv_cache_manager(kv_cache_manager)

    def build_connector_worker_meta(self) -> LeaseWorkerMeta | None:
        """Carry the workers' reasons to the scheduler."""
        return None if self._worker is None else self._worker.build_connector_worker_meta()

    def shutdown(self) -> None:
        """Leave the fleet, then stop as upstream does."""
        if self._agent is not None:
            self._agent.stop()
        super().shutdown()


__all__ = ["LeasedNixlConnector"]
