"""Reads `tenants.toml`: all tenants of a yard with their settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from tokenyard.process.toml_file import read_toml
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.keys import PRIORITY_CLASSES, is_tenant
from tokenyard.protocol.tenants import TENANT_RULE, TenantSettings
from tokenyard.protocol.texts import did_you_mean

_TABLES: Final = ("defaults", "tenants")
FIELDS: Final = {field.name: field.type for field in msgspec.structs.fields(TenantSettings)}


def read_tenants_file(path: Path) -> dict[str, TenantSettings]:
    """The tenants of a file, by name; raises `SettingsError` with all of its faults."""
    tables = read_toml(path)
    reading = _TenantsFile()
    found = reading.tenants(tables)
    if reading.faults:
        raise SettingsError([f"{path}: {fault}" for fault in reading.faults])
    return found


class _TenantsFile:
    """One pass over a file, which collects all faults instead of stopping at the first."""

    def __init__(self) -> None:
        self.faults: list[str] = []

    def tenants(self, tables: Mapping[str, Any]) -> dict[str, TenantSettings]:
        """All tenants; valid only if there are no faults."""
        for key in tables.keys() - {*_TABLES}:
            hint = did_you_mean(key, _TABLES) or f"; use {' and '.join(_TABLES)}"
            self.faults.append(f"{key}: is not known{hint}")
        defaults = self._values("defaults", tables.get("defaults", {}))
        found = {}
        for name, table in self._table("tenants", tables.get("tenants", {})).items():
            if not is_tenant(name):
                self.faults.append(f"tenants.{name!r}: {TENANT_RULE}")
            found[name] = TenantSettings(**defaults | self._values(f"tenants.{name}", table))
        return found

    def _values(self, at: str, table: Any) -> dict[str, Any]:
        found = {}
        for key, value in self._table(at, table).items():
            if fault := setting_fault(key, value):
                self.faults.append(f"{at}.{fault}")
            else:
                found[key] = value
        return found

    def _table(self, at: str, value: Any) -> Mapping[str, Any]:
        if isinstance(value, Mapping):
            return value
        self.faults.append(f"{at}: must be a table")
        return {}


def setting_fault(key: str, value: Any) -> str:
    """What is wrong with a setting of a tenant; "" if it is valid."""
    if key not in FIELDS:
        hint = did_you_mean(key, FIELDS) or f"; use {', '.join(FIELDS)}"
        return f"{key}: is not known{hint}"
    try:
        msgspec.convert(value, FIELDS[key])
    except msgspec.ValidationError as error:
        classes = f"; use {', '.join(PRIORITY_CLASSES)}" if key == "classes" else ""
        return f"{key}: {error}{classes}"
    return ""
