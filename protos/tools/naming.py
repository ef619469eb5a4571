"""Naming rules of the protos: buf's STANDARD set as far as it is about names, and units.

`naming_problems` gives one line for each name that breaks a rule, with the rule.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from google.protobuf.descriptor_pb2 import FieldDescriptorProto

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.descriptor_pb2 import (
        DescriptorProto,
        EnumDescriptorProto,
        FileDescriptorProto,
        FileDescriptorSet,
    )

__all__ = ["naming_problems"]

_PASCAL_CASE = re.compile(r"[A-Z][a-zA-Z0-9]*")
_LOWER_SNAKE_CASE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")

_QUANTITY_WORDS = frozenset(
    (
        *("age", "deadline", "delay", "duration", "expiry", "interval", "left", "silent", "time"),
        *("timeout", "ttl", "wait", "length", "len", "memory", "size", "threshold"),
    )
)
"""A number whose name has one of these words measures something, so it needs a unit."""
_UNITS = ("_ms", "_s", "_bytes", "_tokens", "_blocks")
_UNITLESS = {
    "page_size": "AIP-158 fixes the name",
    "tensor_parallel_size": "a number of ranks",
    "decode_context_parallel_size": "a number of ranks",
    "pipeline_parallel_size": "a number of ranks",
    "temperature": "has no unit",
}
_INTEGERS = frozenset(
    {
        FieldDescriptorProto.TYPE_INT32,
        FieldDescriptorProto.TYPE_INT64,
        FieldDescriptorProto.TYPE_UINT32,
        FieldDescriptorProto.TYPE_UINT64,
        FieldDescriptorProto.TYPE_SINT32,
        FieldDescriptorProto.TYPE_SINT64,
    }
)
_FLOATS = frozenset({FieldDescriptorProto.TYPE_FLOAT, FieldDescriptorProto.TYPE_DOUBLE})


def naming_problems(descriptors: FileDescriptorSet) -> list[str]:
    """Every name in `descriptors` that breaks a rule, as a sentence."""
    problems: list[str] = []
    for file in descriptors.file:
        problems += _file_problems(file)
        for message in file.message_type:
            problems += _message_problems(message)
        for enum in file.enum_type:
            problems += _enum_problems(enum)
    problems += _rpc_problems(descriptors)
    return problems


def _file_problems(file: FileDescriptorProto) -> Iterator[str]:
    folder = file.name.rpartition("/")[0]
    if folder.replace("/", ".") != file.package:
        yield f"{file.name}: package {file.package} does not match its folder"
    if not re.search(r"\.v[1-9][0-9]*$", file.package):
        yield f"{file.name}: package {file.package} does not end with a version"


def _message_problems(message: DescriptorProto) -> Iterator[str]:
    if not _PASCAL_CASE.fullmatch(message.name):
        yield f"message {message.name}: not PascalCase"
    for field in message.field:
        name = f"field {message.name}.{field.name}"
        if not _LOWER_SNAKE_CASE.fullmatch(field.name):
            yield f"{name}: not lower_snake_case"
        if _lacks_unit(field):
            yield f"{name}: a quantity without a unit; end it with one of {', '.join(_UNITS)}"
    for nested in message.nested_type:
        if not nested.options.map_entry:
            yield from _message_problems(nested)
    for enum in message.enum_type:
        yield from _enum_problems(enum)


def _lacks_unit(field: FieldDescriptorProto) -> bool:
    if field.name in _UNITLESS or field.name.endswith(_UNITS):
        return False
    measures = bool(_QUANTITY_WORDS & set(field.name.split("_")))
    return field.type in _FLOATS or (field.type in _INTEGERS and measures)


def _enum_problems(enum: EnumDescriptorProto) -> Iterator[str]:
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper() + "_"
    if not _PASCAL_CASE.fullmatch(enum.name):
        yield f"enum {enum.name}: not PascalCase"
    for value in enum.value:
        if not value.name.startswith(prefix):
            yield f"enum value {value.name}: does not start with {prefix}"
        if value.number == 0 and value.name != f"{prefix}UNSPECIFIED":
            yield f"enum value {value.name}: zero is called {prefix}UNSPECIFIED"


def _rpc_problems(descriptors: FileDescriptorSet) -> Iterator[str]:
    used: Counter[str] = Counter()
    for file in descriptors.file:
        for service in file.service:
            if not service.name.endswith("Service"):
                yield f"service {service.name}: does not end with Service"
            for method in service.method:
                name = f"rpc {service.name}.{method.name}"
                if not _PASCAL_CASE.fullmatch(method.name):
                    yield f"{name}: not PascalCase"
                for type_name, suffix in (
                    (method.input_type, "Request"),
                    (method.output_type, "Response"),
                ):
                    used[type_name] += 1
                    allowed = (
                        f".{file.package}.{method.name}{suffix}",
                        f".{file.package}.{service.name}{method.name}{suffix}",
                    )
                    if type_name not in allowed:
                        yield f"{name}: {type_name} is not called {method.name}{suffix}"
    for type_name, count in used.items():
        if count > 1:
            yield f"message {type_name}: used by {count} rpcs; each has its own"
