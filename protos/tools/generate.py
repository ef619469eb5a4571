"""Generates the Python stubs beside the protos, and the descriptor snapshot.

Run by `make protos`, with the compiler in build/proto-venv, from the root of the repository:
`python -m protos.tools.generate [--out DIR] [--update-snapshot]`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from google.protobuf import json_format
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from protos.tools.compat import breaking_changes

__all__ = ["PROTO_ROOT", "SNAPSHOT", "main", "read_snapshot"]

PROTO_ROOT = Path(__file__).resolve().parents[1]
SNAPSHOT = PROTO_ROOT / "descriptor_snapshot.json"


def read_snapshot() -> FileDescriptorSet:
    """The descriptors that the world was last promised."""
    return json_format.Parse(SNAPSHOT.read_text(encoding="utf-8"), FileDescriptorSet())


def main() -> int:
    """Generate; returns the exit status."""
    parser = argparse.ArgumentParser(description="generate the Python stubs of the protos")
    parser.add_argument("--out", type=Path, default=PROTO_ROOT, help="where the stubs go")
    parser.add_argument(
        "--update-snapshot",
        action="store_true",
        help="take additions into descriptor_snapshot.json; refuses breaking changes",
    )
    arguments = parser.parse_args()
    sources = sorted(path.relative_to(PROTO_ROOT) for path in PROTO_ROOT.glob("kvtide/*/*.proto"))
    arguments.out.mkdir(parents=True, exist_ok=True)
    status = _protoc(
        [
            f"--python_out={arguments.out}",
            f"--pyi_out={arguments.out}",
            f"--grpc_python_out={arguments.out}",
            *map(str, sources),
        ]
    )
    if status == 0 and arguments.update_snapshot:
        status = _update_snapshot(sources)
    return status


def _protoc(arguments: list[str]) -> int:
    # Only the toolchain's own environment has it.
    from grpc_tools import protoc  # noqa: PLC0415

    well_known = Path(protoc.__file__).parent / "_proto"
    return int(protoc.main(["protoc", f"-I{PROTO_ROOT}", f"-I{well_known}", *arguments]))


def _update_snapshot(sources: list[Path]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        compiled = Path(folder, "descriptors.binpb")
        status = _protoc([f"--descriptor_set_out={compiled}", *map(str, sources)])
        if status != 0:
            return status
        descriptors = FileDescriptorSet.FromString(compiled.read_bytes())
    if SNAPSHOT.exists():
        changes = breaking_changes(read_snapshot(), descriptors)
        if changes:
            print("breaking changes; the snapshot stays as it is:", *changes, sep="\n  ")
            print(f"to break the contract on purpose, delete {SNAPSHOT.name} first")
            return 1
    text = json.dumps(json_format.MessageToDict(descriptors), indent=1, sort_keys=True)
    SNAPSHOT.write_text(text + "\n", encoding="utf-8")
    print(f"wrote {SNAPSHOT.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
