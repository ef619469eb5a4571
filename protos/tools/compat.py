"""What makes a change to the protos a breaking one.

Old clients and engines keep running while services are upgraded, so within kvtide.v1 things are
only ever added. `breaking_changes` compares two descriptor sets and names what was not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from google.protobuf.descriptor_pb2 import FieldDescriptorProto

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.descriptor_pb2 import (
        DescriptorProto,
        EnumDescriptorProto,
        FileDescriptorSet,
        ServiceDescriptorProto,
    )

__all__ = ["breaking_changes", "surface"]


@dataclass(slots=True)
class Surface:
    """What others depend on, each thing by its full name, with what may never change of it."""

    items: dict[str, str] = field(default_factory=dict)
    """Such as "field kvtide.v1.Lease#2" -> "int64 generation"."""
    reserved: set[str] = field(default_factory=set)
    """Field numbers and names that may never be used again."""


def surface(descriptors: FileDescriptorSet) -> Surface:
    """Everything in `descriptors` that a change could break."""
    found = Surface()
    for file in descriptors.file:
        for message in file.message_type:
            _add_message(found, f"{file.package}.{message.name}", message, file.name)
        for enum in file.enum_type:
            _add_enum(found, f"{file.package}.{enum.name}", enum, file.name)
        for service in file.service:
            _add_service(found, f"{file.package}.{service.name}", service, file.name)
    return found


def breaking_changes(old: FileDescriptorSet, new: FileDescriptorSet) -> list[str]:
    """One line for each thing of `old` that `new` removed, moved, renumbered or retyped.

    Additions give no line.
    """
    before, after = surface(old), surface(new)
    changes = []
    for name, was in before.items.items():
        now = after.items.get(name)
        if now is None:
            changes.append(f"{name} ({was}) was removed")
        elif now != was:
            changes.append(f"{name} was ({was}) and is now ({now})")
    changes += [
        f"{name} is no longer reserved" for name in sorted(before.reserved - after.reserved)
    ]
    return changes


def _add_message(found: Surface, name: str, message: DescriptorProto, file: str) -> None:
    found.items[f"message {name}"] = f"in {file}"
    for one in message.field:
        oneof = ""
        if one.HasField("oneof_index") and not one.proto3_optional:
            oneof = f" in oneof {message.oneof_decl[one.oneof_index].name}"
        found.items[f"field {name}#{one.number}"] = f"{_type_of(one)} {one.name}{oneof}"
    for reserved in message.reserved_range:
        for number in range(reserved.start, reserved.end):
            found.reserved.add(f"field {name}#{number}")
    found.reserved.update(f"field name {name}.{reserved}" for reserved in message.reserved_name)
    for nested in message.nested_type:
        _add_message(found, f"{name}.{nested.name}", nested, file)
    for enum in message.enum_type:
        _add_enum(found, f"{name}.{enum.name}", enum, file)


def _type_of(one: FieldDescriptorProto) -> str:
    kind = one.type_name or FieldDescriptorProto.Type.Name(one.type).removeprefix("TYPE_").lower()
    if one.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {kind}"
    return f"optional {kind}" if one.proto3_optional else kind


def _add_enum(found: Surface, name: str, enum: EnumDescriptorProto, file: str) -> None:
    found.items[f"enum {name}"] = f"in {file}"
    for value in enum.value:
        found.items[f"enum value {name}#{value.number}"] = value.name


def _add_service(found: Surface, name: str, service: ServiceDescriptorProto, file: str) -> None:
    found.items[f"service {name}"] = f"in {file}"
    found.items.update(_methods(name, service))


def _methods(name: str, service: ServiceDescriptorProto) -> Iterator[tuple[str, str]]:
    for method in service.method:
        request = f"{'stream ' if method.client_streaming else ''}{method.input_type}"
        response = f"{'stream ' if method.server_streaming else ''}{method.output_type}"
        yield f"rpc {name}.{method.name}", f"{request} -> {response}"
