"""`kvtide engine`."""

import os
import shlex

import pytest

from kvtide.cli import main


def _printed(capsys, *arguments: str) -> tuple[dict[str, str], list[str]]:
    """Environment and command that `--print` shows."""
    assert main(["engine", *arguments[:1], "--print", *arguments[1:]]) == 0
    words = shlex.split(capsys.readouterr().out.replace("\\\n", " "))
    assert words[0] == "env"
    place = next(number for number, word in enumerate(words[1:], 1) if "=" not in word)
    return dict(word.split("=", 1) for word in words[1:place]), words[place:]


def test_print_shows_what_would_run(capsys):
    """The printed text is a command that a shell can run, environment included."""
    variables, command = _printed(capsys, "decode", "--model", "/models/a b", "--cpu-core", "1")
    assert command[command.index("--model") + 1] == "/models/a b"
    assert command[command.index("--port") + 1] == "8200"
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "1"
    assert variables["KVTIDE_ENGINE_REGISTRY"] == "127.0.0.1:7400"
    assert variables["KVTIDE_ENGINE_NODE_ID"] == "decode-8200"


def test_two_engines_of_one_host_do_not_collide(capsys):
    """By default a prefill and a decode engine have different ports and names."""
    prefill, prefill_command = _printed(capsys, "prefill", "--model", "m")
    decode, decode_command = _printed(capsys, "decode", "--model", "m")
    for name in ("VLLM_NIXL_SIDE_CHANNEL_PORT", "KVTIDE_ENGINE_URL", "KVTIDE_ENGINE_NODE_ID"):
        assert prefill[name] != decode[name]
    place = prefill_command.index("--port") + 1
    assert prefill_command[place] != decode_command[place]


def test_every_option_reaches_the_engine(capsys):
    """Each flag changes the command or its environment."""
    variables, command = _printed(
        capsys,
        "prefill",
        *("--model", "m", "--served-model-name", "tiny", "--host", "0.0.0.0", "--port", "1"),
        *("--url", "http://p0:1", "--side-channel-port", "2", "--side-channel-host", "p0"),
        *("--registry", "r:3", "--health", "h:4", "--node-id", "p0", "--dtype", "float32"),
        *("--device", "cuda", "--kv-cache-gib", "2", "--max-model-len", "99"),
        *("--decoder-kv-blocks-ttl-s", "20", "--kv-recompute-threshold-tokens", "7"),
        *("--nixl-backend", "UCX", "--no-prefix-caching", "--", "--seed", "5"),
    )
    text = shlex.join(command)
    for part in (
        *("--served-model-name tiny", "--host 0.0.0.0", "--port 1", "--dtype float32"),
        *(
            "--max-model-len 99",
            f"--kv-cache-memory-bytes {2 * 2**30}",
            '"decoder_kv_blocks_ttl": 20',
        ),
        *('"kv_recompute_threshold": 7', '"backends": ["UCX"]', "--no-enable-prefix-caching"),
        '"kv_buffer_device": "cuda"',
    ):
        assert part in text
    assert text.endswith("--seed 5")
    assert variables["KVTIDE_ENGINE_URL"] == "http://p0:1"
    assert variables["KVTIDE_ENGINE_HEALTH"] == "h:4"
    assert variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "p0"
    assert variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "2"


def test_engine_takes_the_place_of_the_command(monkeypatch):
    """Without --print the process becomes the engine, on top of the caller's environment."""
    calls = []

    class Replaced(Exception):  # noqa: N818
        pass

    def execve(path, command, environment):
        calls.append((path, command, environment))
        raise Replaced

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setenv("OF_THE_CALLER", "kept")
    with pytest.raises(Replaced):
        main(["engine", "prefill", "--model", "m", "--", "--seed", "1"])
    ((path, command, environment),) = calls
    assert path == command[0]
    assert command[-2:] == ["--seed", "1"]
    assert environment["OF_THE_CALLER"] == "kept"
    assert environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"


def test_impossible_option_is_an_error(capsys):
    """An option that can't work ends the command with its name, not with a traceback."""
    assert main(["engine", "prefill", "--model", "m", "--port", "0"]) == 1
    assert capsys.readouterr().err.startswith("kvtide: port = 0:")
