"""The settings model: defaults, limits, documentation."""

import pytest
from pydantic import ValidationError

from kvtide.runtime import (
    GrpcSettings,
    HealthSettings,
    RegistrySettings,
    RouterSettings,
    Settings,
)


def test_code_reads_neither_environment_nor_file(monkeypatch):
    """Settings built in code are what the code says, whatever the environment holds."""
    monkeypatch.setenv("KVTIDE_LOG__LEVEL", "debug")
    assert Settings().log.level == "info"


def test_every_field_is_documented_with_its_unit():
    """Each setting has a description, and each duration or size says its unit in the name."""
    for section, info in Settings.model_fields.items():
        for name, field in info.annotation.model_fields.items():
            assert field.description, f"{section}.{name}"
            if name.endswith("_s"):
                assert "second" in field.description, f"{section}.{name}"
            if field.annotation is float:
                assert name.endswith("_s"), f"{section}.{name}"
            if name.endswith("_bytes"):
                assert "bytes" in field.description, f"{section}.{name}"


def test_settings_are_frozen():
    """Nothing changes a setting behind the back of who has read it."""
    with pytest.raises(ValidationError):
        Settings().log.level = "debug"


IMPOSSIBLE = [
    (RegistrySettings, {"claim_min_left_s": 5.9}, "claim_min_left_s = 5.9 is too short"),
    (RegistrySettings, {"claim_limit_s": 9.0}, "claim_limit_s = 9 is shorter"),
    (RegistrySettings, {"grant_wait_s": 0.6}, "grant_wait_s = 0.6 is longer"),
    (RegistrySettings, {"sweep_interval_s": 0}, "greater than 0"),
    (RegistrySettings, {"keep_ended_s": -1}, "greater than or equal to 0"),
    (RegistrySettings, {"claim_limit_s": float("inf")}, "finite number"),
    (RegistrySettings, {"address": "registry"}, "has no port"),
    (RegistrySettings, {"address": "registry:0"}, "port 0"),
    (HealthSettings, {"report_interval_s": float("nan")}, "finite number"),
    (HealthSettings, {"suspect_after_missed": 0}, "greater than or equal to 1"),
    (HealthSettings, {"suspect_after_missed": 12}, "down_after_s = 12 is not longer"),
    (HealthSettings, {"down_after_s": 3}, "down_after_s = 3 is not longer"),
    (RouterSettings, {"max_body_bytes": 0}, "greater than 0"),
    (RouterSettings, {"turn_history": 0}, "greater than or equal to 1"),
    (RouterSettings, {"prefill_timeout_s": -1}, "greater than 0"),
    (GrpcSettings, {"listen": ":7400"}, "has no host"),
    (GrpcSettings, {"lisen": "127.0.0.1:1"}, "Extra inputs"),
]


@pytest.mark.parametrize(("section", "values", "reason"), IMPOSSIBLE)
def test_impossible_value_is_refused(section, values, reason):
    """A value that can't work is refused where it is set, with the reason."""
    with pytest.raises(ValidationError, match=reason):
        section(**values)


def test_claims_can_wait_for_their_grant():
    """A router that gives up on a claim before the registry stops waiting is refused."""
    with pytest.raises(ValidationError, match=r"router.claim_timeout_s = 0.2 is not longer"):
        Settings(router=RouterSettings(claim_timeout_s=0.2))


def test_limits_themselves_are_allowed():
    """The shortest and the empty values that can work do."""
    RegistrySettings(claim_min_left_s=6, claim_limit_s=6, grant_wait_s=0, keep_ended_s=0)
    HealthSettings(suspect_after_missed=1, report_interval_s=1, down_after_s=1.1)
    RouterSettings(drain_timeout_s=0, turn_history=1)
    GrpcSettings(listen="[::1]:0")
