"""The settings of the web console."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, model_validator

from raymq.common.config.section import SettingsSection


class ConsoleOptions(SettingsSection):
    """The options of the console: where it listens, who may look at what."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enable: Annotated[bool, Field(description="Whether `raymq up` starts the console.")] = False
    host: Annotated[str, Field(description="The address on which it listens, on the head node.")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535, description="The port; 0 for any that is free.")] = 8270
    base_path: Annotated[
        str, Field(pattern=r"^(/[A-Za-z0-9._~-]+)*$", description="The path of all its pages, behind a proxy.")
    ] = ""
    tls_cert: Annotated[Path | None, Field(description="The file of its certificate, PEM, on the head node.")] = None
    tls_key: Annotated[Path | None, Field(description="The file of the certificate's key.")] = None
    viewer_token_file: Annotated[
        Path | None, Field(description="The file of the token of those who may look and change nothing.")
    ] = None
    show_bodies: Annotated[bool, Field(description="Whether those see the bodies of messages.")] = True
    read_only: Annotated[bool, Field(description="Whether nobody may change anything, admins neither.")] = False
    tail_rate: Annotated[
        int, Field(ge=1, le=1000, description="Messages per second that a live tail shows at most.")
    ] = 50
    max_viewers: Annotated[int, Field(ge=1, le=1000, description="Live tails at the same time.")] = 20

    @model_validator(mode="after")
    def _tls_is_whole(self) -> ConsoleOptions:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: set both, or none")
        return self

    @property
    def scheme(self) -> str:
        """``https`` or ``http``."""
        return "https" if self.tls_cert is not None else "http"

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach it."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
