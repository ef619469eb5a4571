"""Names in the protos follow buf's STANDARD rules and carry their units."""

import pytest
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from protos.tools.naming import naming_problems
from tests.protos.descriptors import current_descriptors

METHOD = 'method {{ name: "Get" input_type: ".kvtide.v1.{0}" output_type: ".kvtide.v1.{1}" }}'
GOOD = METHOD.format("GetRequest", "GetResponse")
QUALIFIED = METHOD.format("XServiceGetRequest", "XServiceGetResponse")


def _problems(content: str, *, name="kvtide/v1/x.proto", package="kvtide.v1") -> list[str]:
    text = f'file {{ name: "{name}" package: "{package}" {content} }}'
    return naming_problems(text_format.Parse(text, FileDescriptorSet()))


def _field(name: str, kind: str = "TYPE_UINT32") -> str:
    return f'message_type {{ name: "M" field {{ name: "{name}" number: 1 type: {kind} }} }}'


def test_protos_follow_the_rules():
    """No name in the protos breaks a rule."""
    assert naming_problems(current_descriptors()) == []


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('message_type { name: "lower_case" }', "not PascalCase"),
        (_field("camelCase"), "not lower_snake_case"),
        (_field("ttl"), "without a unit"),
        (_field("time_left"), "without a unit"),
        (_field("block_size"), "without a unit"),
        (_field("progress", "TYPE_DOUBLE"), "without a unit"),
        ('enum_type { name: "Hue" value { name: "RED" number: 1 } }', "start with HUE_"),
        ('enum_type { name: "Hue" value { name: "HUE_RED" number: 0 } }', "HUE_UNSPECIFIED"),
        ('service { name: "Registry" }', "does not end with Service"),
        (f'service {{ name: "XService" {METHOD.format("Get", "GetResponse")} }}', "GetRequest"),
        (f'service {{ name: "XService" {METHOD.format("GetRequest", "R")} }}', "GetResponse"),
        (f'service {{ name: "XService" {GOOD} {GOOD} }}', "used by 2 rpcs"),
    ],
)
def test_bad_name_is_reported(content, expected):
    """A name that breaks a rule is reported with that rule."""
    assert any(expected in problem for problem in _problems(content))


@pytest.mark.parametrize(
    "content",
    [
        _field("time_left_ms"),
        _field("block_size_tokens"),
        _field("page_size"),
        _field("free_blocks"),
        _field("expiry_s", "TYPE_DOUBLE"),
        'enum_type { name: "LeaseState" value { name: "LEASE_STATE_UNSPECIFIED" number: 0 } }',
        f'service {{ name: "XService" {GOOD} }}',
        f'service {{ name: "XService" {QUALIFIED} }}',
    ],
)
def test_good_name_passes(content):
    """A name that follows the rules is not reported."""
    assert _problems(content) == []


def test_package_matches_its_folder_and_has_a_version():
    """A file's package is its folder, and ends with the version of the contract."""
    assert _problems("", name="kvtide/v2/x.proto") != []
    assert _problems("", name="kvtide/x.proto", package="kvtide") != []
