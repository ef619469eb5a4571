"""Addresses."""

import pytest

from kvtide.runtime.address import join_address, split_address


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:7400", ("127.0.0.1", 7400)),
        ("registry:1", ("registry", 1)),
        ("[::1]:8000", ("::1", 8000)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
    ],
)
def test_good_address_splits_and_joins(address, parts):
    """Host and port come apart and together again."""
    assert split_address(address) == parts
    assert join_address(*parts) == address


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("registry", "no port"),
        ("", "no port"),
        (":7400", "no host"),
        ("registry:", "has the port ''"),
        ("registry:http", "has the port 'http'"),
        ("registry:-1", "has the port '-1'"),
        ("registry:65536", "has the port '65536'"),
        ("registry:٣", "has the port"),
        ("::1:7400", "without brackets"),
        ("http://registry:7400", "is a URL"),
        ("registry:7400/path", "is a URL"),
        ("the registry:7400", "a space"),
    ],
)
def test_bad_address_says_what_is_wrong(address, reason):
    """The message names the fault, whichever it is."""
    with pytest.raises(ValueError, match=reason):
        split_address(address)
