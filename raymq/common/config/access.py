"""The settings of access control: whether servers check users, and the initial super user."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, model_validator

from raymq.common.config.section import SettingsSection


class AccessOptions(SettingsSection):
    """The section `access` of raymq.yaml. If `enable` is false, servers accept every call."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enable: bool = False
    """`true`: each request needs a user whose policies allow the request. `false`: servers accept every
    request."""
    super_user: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.@-]{1,64}$")] = "admin"
    """The name of the initial user, who may do everything."""
    super_secret_file: Path | None = None
    """The file with the super user's secret, mode 0600, on the machine that runs `raymq up`. Required if `enable` is
    true."""

    users_file: Path | None = None
    """The file with the other users and their policies, mode 0600, on the machine that runs `raymq up`."""

    @model_validator(mode="after")
    def _is_whole(self) -> AccessOptions:
        if self.enable and self.super_secret_file is None:
            raise ValueError(
                "access.enable needs access.super_secret_file: set it to a file with the secret of the super user"
            )
        return self
