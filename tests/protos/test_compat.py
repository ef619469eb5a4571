"""No breaking change to the protos slips in, and the comparer that says so is right."""

from collections.abc import Callable

import pytest
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from protos.tools.compat import breaking_changes, surface
from protos.tools.generate import read_snapshot
from tests.protos.descriptors import current_descriptors

BASE = """
file {
  name: "kvtide/v1/thing.proto" package: "kvtide.v1"
  message_type {
    name: "Thing"
    field { name: "id" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
    field { name: "parts" number: 2 type: TYPE_INT64 label: LABEL_REPEATED }
    field {
      name: "kind" number: 3 type: TYPE_ENUM type_name: ".kvtide.v1.Kind" label: LABEL_OPTIONAL
    }
    reserved_range { start: 8 end: 9 }
    reserved_name: "old"
    nested_type {
      name: "Inner" field { name: "x" number: 1 type: TYPE_BOOL label: LABEL_OPTIONAL }
    }
  }
  message_type { name: "GetThingRequest" }
  message_type { name: "GetThingResponse" }
  enum_type {
    name: "Kind"
    value { name: "KIND_UNSPECIFIED" number: 0 }
    value { name: "KIND_BIG" number: 1 }
  }
  service {
    name: "ThingService"
    method {
      name: "GetThing"
      input_type: ".kvtide.v1.GetThingRequest" output_type: ".kvtide.v1.GetThingResponse"
    }
  }
}
"""


def _base() -> FileDescriptorSet:
    return text_format.Parse(BASE, FileDescriptorSet())


def _changed(change: Callable[[FileDescriptorProto], object]) -> list[str]:
    new = _base()
    change(new.file[0])
    return breaking_changes(_base(), new)


def _set(owner, **values) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


BREAKING = {
    "field removed": (lambda f: f.message_type[0].field.pop(0), "Thing#1 (string id) was removed"),
    "field renumbered": (lambda f: _set(f.message_type[0].field[0], number=5), "Thing#1"),
    "field renamed": (lambda f: _set(f.message_type[0].field[0], name="key"), "now (string key)"),
    "field retyped": (lambda f: _set(f.message_type[0].field[0], type=12), "now (bytes id)"),
    "field no longer repeated": (
        lambda f: _set(f.message_type[0].field[1], label=1),
        "was (repeated int64 parts) and is now (int64 parts)",
    ),
    "field gained presence": (
        lambda f: _set(f.message_type[0].field[0], proto3_optional=True),
        "now (optional string id)",
    ),
    "field moved into a oneof": (
        lambda f: (
            f.message_type[0].oneof_decl.add(name="either"),
            _set(f.message_type[0].field[0], oneof_index=0),
        ),
        "now (string id in oneof either)",
    ),
    "nested field removed": (
        lambda f: f.message_type[0].nested_type[0].field.pop(),
        "Thing.Inner#1 (bool x) was removed",
    ),
    "message removed": (
        lambda f: f.message_type.pop(0),
        "message kvtide.v1.Thing (in kvtide/v1/thing.proto) was removed",
    ),
    "file renamed": (lambda f: _set(f, name="kvtide/v1/other.proto"), "now (in kvtide/v1/other"),
    "reservation dropped": (
        lambda f: f.message_type[0].reserved_range.pop(),
        "Thing#8 is no longer reserved",
    ),
    "reserved name dropped": (
        lambda f: f.message_type[0].reserved_name.pop(),
        "Thing.old is no longer reserved",
    ),
    "enum value removed": (lambda f: f.enum_type[0].value.pop(), "Kind#1 (KIND_BIG) was removed"),
    "enum value renumbered": (
        lambda f: _set(f.enum_type[0].value[1], number=2),
        "Kind#1 (KIND_BIG) was removed",
    ),
    "enum removed": (lambda f: f.enum_type.pop(), "enum kvtide.v1.Kind"),
    "service removed": (lambda f: f.service.pop(), "service kvtide.v1.ThingService"),
    "rpc removed": (lambda f: f.service[0].method.pop(), "ThingService.GetThing"),
    "rpc request changed": (
        lambda f: _set(f.service[0].method[0], input_type=".kvtide.v1.Thing"),
        "now (.kvtide.v1.Thing -> .kvtide.v1.GetThingResponse)",
    ),
    "rpc streams": (
        lambda f: _set(f.service[0].method[0], server_streaming=True),
        "-> stream .kvtide.v1.GetThingResponse",
    ),
}


@pytest.mark.parametrize("name", BREAKING)
def test_breaking_change_is_named(name):
    """A change that an old peer would trip over is reported with the thing that it breaks."""
    change, expected = BREAKING[name]
    assert any(expected in line for line in _changed(change))


ADDITIONS = {
    "nothing": lambda _: None,
    "field": lambda f: f.message_type[0].field.add(name="more", number=4, type=9, label=1),
    "message": lambda f: f.message_type.add(name="Other"),
    "enum value": lambda f: f.enum_type[0].value.add(name="KIND_SMALL", number=2),
    "enum": lambda f: f.enum_type.add(name="Colour"),
    "service": lambda f: f.service.add(name="OtherService"),
    "rpc": lambda f: f.service[0].method.add(
        name="ListThings", input_type=".kvtide.v1.A", output_type=".kvtide.v1.B"
    ),
    "reservation": lambda f: f.message_type[0].reserved_name.append("older"),
}


@pytest.mark.parametrize("name", ADDITIONS)
def test_addition_is_not_breaking(name):
    """What is only added breaks nobody."""
    assert _changed(ADDITIONS[name]) == []


def test_protos_do_not_break_what_was_promised():
    """Everything in the checked-in snapshot is still there, unchanged."""
    assert breaking_changes(read_snapshot(), current_descriptors()) == []


def test_snapshot_has_every_addition():
    """What was added is promised too, from the same commit on (`make protos UPDATE=1`)."""
    promised, current = surface(read_snapshot()), surface(current_descriptors())
    assert current.items.keys() - promised.items.keys() == set(), "run `make protos UPDATE=1`"
