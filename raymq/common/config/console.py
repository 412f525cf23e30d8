"""The settings of the web console."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, model_validator

from raymq.common.config.section import SettingsSection
from raymq.common.config.values import is_loopback


class ConsoleOptions(SettingsSection):
    """The section `console` of raymq.yaml: the console's address, and what viewers may see and change."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enable: bool = False
    """`true`: `raymq up` starts the console."""
    host: str = "127.0.0.1"
    """The address on which the console listens, on the head node. An address other than loopback needs Ray's token
    authentication."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 8270
    """The TCP port on which the console listens; `0` for any free port."""
    base_path: Annotated[str, Field(pattern=r"^(/[A-Za-z0-9._~-]+)*$")] = ""
    """The path prefix of the console's pages behind a proxy, for example `/raymq`."""
    tls_cert: Path | None = None
    """The PEM file of the console's TLS certificate, on the head node."""
    tls_key: Path | None = None
    """The file of the TLS certificate's private key."""
    viewer_token_file: Path | None = None
    """The file with the viewers' token. Viewers may read but change nothing."""
    show_bodies: bool = True
    """`true`: viewers see the bodies of messages."""
    read_only: bool = False
    """`true`: nobody may change anything through the console, not even admins."""
    tail_rate: Annotated[int, Field(ge=1, le=1000)] = 50
    """Maximum number of messages per second that a live tail shows."""
    max_viewers: Annotated[int, Field(ge=1, le=1000)] = 20
    """Maximum number of live tails that run at the same time."""

    @model_validator(mode="after")
    def _tls_is_whole(self) -> ConsoleOptions:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be set together: set both, or neither")
        return self

    @property
    def scheme(self) -> str:
        """URL scheme of the console: ``https`` or ``http``."""
        return "https" if self.tls_cert is not None else "http"

    @property
    def is_loopback(self) -> bool:
        """True if only the console's own machine can reach the console."""
        return is_loopback(self.host)
