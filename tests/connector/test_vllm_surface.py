"""The names that the connector needs from vLLM, and the class that vLLM loads."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPullConnector

import kvtide.connector
from kvtide.connector import scheduler, vllm_surface, worker


def test_installed_vllm_has_every_name() -> None:
    """When vLLM moves a name that the connector touches, this fails with that name."""
    assert list(vllm_surface.missing_names()) == []


def test_missing_name_stops_the_engine_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine with a vLLM that does not fit says what is missing, before it serves anything."""
    monkeypatch.setattr(vllm_surface, "WORKER_NAMES", ("_reqs_to_send", "_moved_away"))
    with pytest.raises(
        vllm_surface.VllmSurfaceError, match=r"NixlPullConnectorWorker\._moved_away"
    ):
        vllm_surface.check_vllm_surface()


def test_every_private_name_in_use_is_listed() -> None:
    """No module of the connector touches a private vLLM attribute that the list does not name."""
    listed = {*vllm_surface.SCHEDULER_NAMES, *vllm_surface.WORKER_NAMES}
    for module in (scheduler, worker):
        tree = ast.parse(Path(str(module.__file__)).read_text())
        selves = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ]
        own = {node.attr for node in selves if isinstance(node.ctx, ast.Store)} | {
            node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
        }
        own -= listed
        unlisted = {node.attr for node in selves if node.attr.startswith("_")} - own - listed
        assert not unlisted, f"{module.__name__} touches {sorted(unlisted)}"


def test_vllm_finds_the_connector_where_the_flags_say() -> None:
    """``kv_connector_module_path=kvtide.connector`` leads to a pull-mode NIXL connector."""
    assert issubclass(kvtide.connector.LeasedNixlConnector, NixlPullConnector)


def test_unknown_name_is_an_ordinary_attribute_error() -> None:
    """The lazy import does not hide misspelt names."""
    with pytest.raises(AttributeError, match="LeasedConnector"):
        kvtide.connector.LeasedConnector  # noqa: B018
