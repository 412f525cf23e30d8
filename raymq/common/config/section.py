"""The base class of all sections of `raymq.yaml`."""

from __future__ import annotations

import re
from typing import Any, Final

from pydantic import BaseModel, ValidationInfo, field_validator

_NUMBER: Final = re.compile(r"\b(int|float)\b")
_BOOL: Final = re.compile(r"\bbool\b")


class SettingsSection(BaseModel):
    """A section of settings. Raises ValidationError if a value is not allowed.

    A number setting accepts no bool: Pydantic would accept True as 1, and YAML reads ``yes`` as True.
    """

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_for_number(cls, value: Any, info: ValidationInfo) -> Any:
        kind = str(cls.model_fields[info.field_name or ""].annotation)
        if isinstance(value, bool) and _NUMBER.search(kind) and not _BOOL.search(kind):
            raise ValueError(f"must be a number, not {str(value).lower()}")
        return value
