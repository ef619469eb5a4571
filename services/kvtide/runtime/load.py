"""Reading the settings: flags over environment over file over defaults.

Whatever is wrong, a key that does not exist or a value that can't be, is one `SettingsError`
that names each field, its value and what to do.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings import SettingsError as SourceError

from kvtide.runtime.errors import InvalidArgument
from kvtide.runtime.settings import Settings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping

    from pydantic_core import ErrorDetails

__all__ = ["CONFIG_VARIABLE", "ENV_PREFIX", "SettingsError", "add_settings_flags", "load_settings"]

ENV_PREFIX = "KVTIDE_"
CONFIG_VARIABLE = "KVTIDE_CONFIG"
"""Names the TOML file when --config does not."""

_FOREIGN_PREFIXES = ("KVTIDE_ENGINE_", "KVTIDE_DEMO_", "KVTIDE_TEST_")
"""Read by the connector, the demo and the tests, not by the services."""

# Kubernetes puts the address of every Service into every pod's environment: a Service called
# "kvtide-router" gives KVTIDE_ROUTER_PORT=tcp://… and KVTIDE_ROUTER_SERVICE_HOST=….
_KUBERNETES_LINK = re.compile(
    r"_SERVICE_(HOST|PORT)(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?$|_PORT$"
)


class SettingsError(InvalidArgument):
    """Settings that can't be used; the message has one line for each thing that is wrong."""

    def __init__(self, problems: Iterable[str]) -> None:
        super().__init__("bad_settings", "\n".join(problems))


class _SettingsLoader(Settings, BaseSettings):
    """`Settings` that reads the environment and the command line; the file comes by keyword."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_nested_delimiter="__", nested_model_default_partial_update=True
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - the base class fixes the signature
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Environment over file; pydantic-settings puts the command line before both."""
        return env_settings, init_settings


def add_settings_flags(parser: argparse.ArgumentParser) -> CliSettingsSource[Any]:
    """Give `parser` a `--section.field` flag for every setting, with its description.

    Hand the result to `load_settings` together with what the parser parsed.
    """
    return CliSettingsSource(
        _SettingsLoader,
        root_parser=parser,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_use_class_docs_for_groups=True,
    )


def load_settings(
    *,
    config_path: Path | None = None,
    flags: CliSettingsSource[Any] | None = None,
    parsed: argparse.Namespace | None = None,
) -> Settings:
    """Read all sources. `config_path` None means: the file that KVTIDE_CONFIG names, if any.

    Raises SettingsError.
    """
    if config_path is None and os.environ.get(CONFIG_VARIABLE):
        config_path = Path(os.environ[CONFIG_VARIABLE])
    unknown_variables = _unknown_variables(os.environ)
    problems = list(unknown_variables.values())
    from_file = {} if config_path is None else _read_file(config_path)
    source = flags(parsed_args=vars(parsed)) if flags is not None and parsed is not None else None
    try:
        # The stubs of pydantic's mypy support don't know the loader's own keywords.
        loaded = _SettingsLoader(_cli_settings_source=source, **from_file)  # type: ignore[call-arg]
    except ValidationError as error:
        for details in error.errors():
            variable = f"{ENV_PREFIX}{'__'.join(map(str, details['loc']))}".upper()
            if variable not in unknown_variables:
                problems.append(_problem(details))
        raise SettingsError(problems) from error
    except SourceError as error:
        raise SettingsError([*problems, str(error)]) from error
    if problems:
        raise SettingsError(problems)
    return Settings.model_construct(**{name: getattr(loaded, name) for name in _sections()})


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        problem = f"configuration file {path}: {error.strerror}; check --config or KVTIDE_CONFIG"
        raise SettingsError([problem]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problem = f"configuration file {path} is not valid TOML: {error}"
        raise SettingsError([problem]) from error


def _unknown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    known = [f"{ENV_PREFIX}{key}".upper().replace(".", "__") for key in _fields()]
    sections = {f"{ENV_PREFIX}{name}".upper() for name in _sections()}
    problems = {}
    for name in sorted(environment):
        upper = name.upper()
        if not upper.startswith(ENV_PREFIX) or upper.startswith(_FOREIGN_PREFIXES):
            continue
        if upper in known or upper in sections or upper == CONFIG_VARIABLE:
            continue
        if "__" not in upper and _KUBERNETES_LINK.search(upper):
            continue
        hint = _did_you_mean(upper, [*known, CONFIG_VARIABLE])
        problems[upper] = f"environment variable {name}: there is no such setting{hint}"
    return problems


def _problem(details: ErrorDetails) -> str:
    location = ".".join(str(part) for part in details["loc"])
    if details["type"] == "extra_forbidden":
        names = [*_fields(), *_sections()]
        return f"{location}: there is no such setting{_did_you_mean(location, names)}"
    message = details["msg"].removeprefix("Value error, ")
    if isinstance(details["input"], BaseModel | dict):
        # A rule about several fields: the message has their names and values.
        return f"{location}: {message}" if location else message
    section, _, field = location.partition(".")
    return (
        f"{location} = {details['input']!r}: {message} "
        f"(set it by --{location}, {ENV_PREFIX}{section.upper()}__{field.upper()} "
        f"or [{section}] {field} in the file)"
    )


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else "; `kvtide up --help` lists them all"


def _sections() -> list[str]:
    return list(Settings.model_fields)


def _fields() -> list[str]:
    return [
        f"{section}.{field}"
        for section, info in Settings.model_fields.items()
        for field in type(info.default).model_fields
    ]
