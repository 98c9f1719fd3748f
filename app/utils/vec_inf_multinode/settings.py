"""The knobs: environment variables of the submitting process, validated at submit."""

import os
from collections.abc import Mapping
from typing import Literal, Optional

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from .errors import SettingsError

PREFIX = "LLMHUB_MN_"
ALIAS_PREFIX = "LLMFLUX_"

_MAX_PORT = 65535


class MultinodeSettings(BaseModel):
    """Every knob, with its default.

    A field ``x_y`` is read from ``LLMHUB_MN_X_Y``, else from ``LLMFLUX_X_Y``; an
    empty variable counts as unset.

    Parameters
    ----------
    server_timeout : int
        Readiness budget in seconds from the start of the step; 0 is no budget. The
        job clamps it to 90 % of its remaining walltime.
    rank_start_timeout : int
        Seconds for all ranks to start.
    hsn_iface : str
        Prefix of the fabric interfaces, matched as ``<prefix><digits>``.
    nccl_socket_ifname : str, optional
        Value for ``NCCL_SOCKET_IFNAME`` in place of the derived ``=hsn0,hsn1``.
    rdzv_port : int
        First port of the search for a rendezvous port.
    port_scan_max : int
        How many ports above `rdzv_port` are tried.
    symm_mem : {0, 1}
        Value for ``VLLM_ALLREDUCE_USE_SYMM_MEM``.
    ready_probe : {'completion', 'health'}
        What the server must answer before the job calls itself ready.
    stall_timeout : int
        Seconds without a token, while requests are there, that end the job; 0 is off.
    idle_probe : int
        Seconds of idleness after which the server is asked for one token; 0 is off.
    max_restarts : int
        How often a step that fails after it was ready is started again.
    failures : str, optional
        File with the site's own known failures, in the form of ``failures.yaml``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=True)

    server_timeout: int = Field(default=1800, ge=0, le=31_536_000)
    rank_start_timeout: int = Field(default=300, ge=1, le=86_400)
    # 15 characters is the kernel's limit for an interface name
    hsn_iface: str = Field(default="hsn", pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,13}$")
    nccl_socket_ifname: Optional[str] = Field(
        default=None, pattern=r"^\^?=?[A-Za-z0-9_.:@,-]+$"
    )
    rdzv_port: int = Field(default=29500, ge=1024, le=_MAX_PORT)
    port_scan_max: int = Field(default=64, ge=1, le=4096)
    symm_mem: Literal["0", "1"] = "0"
    ready_probe: Literal["completion", "health"] = "completion"
    stall_timeout: int = Field(default=300, ge=0, le=86_400)
    idle_probe: int = Field(default=0, ge=0, le=86_400)
    max_restarts: int = Field(default=0, ge=0, le=1000)
    failures: Optional[str] = None

    @model_validator(mode="after")
    def _ports_exist(self) -> "MultinodeSettings":
        if self.rdzv_port + self.port_scan_max > _MAX_PORT:
            raise ValueError(
                f"rdzv_port + port_scan_max is {self.rdzv_port + self.port_scan_max}, "
                f"over the last port {_MAX_PORT}"
            )
        return self

    @field_validator("failures")
    @classmethod
    def _failures_are_usable(cls, path: Optional[str]) -> Optional[str]:
        if path:
            from . import failures

            failures.load(path)
        return path

    @classmethod
    def from_environ(
        cls, environ: Optional[Mapping[str, str]] = None
    ) -> "MultinodeSettings":
        """Read the knobs from an environment, ``os.environ`` by default.

        Raises
        ------
        SettingsError
            If a value cannot be used; the text names the variable and the value.
        """
        environ = os.environ if environ is None else environ
        found: dict[str, tuple[str, str]] = {}
        for field in cls.model_fields:
            for prefix in (PREFIX, ALIAS_PREFIX):
                variable = prefix + field.upper()
                if environ.get(variable, "").strip():
                    found[field] = (variable, environ[variable])
                    break
        try:
            return cls(**{field: value for field, (_, value) in found.items()})
        except ValidationError as err:
            raise SettingsError(_explain(err, found)) from None


def _explain(err: ValidationError, found: Mapping[str, tuple[str, str]]) -> str:
    """Turn pydantic's report into one line per knob, under the variable's name."""
    lines = []
    for item in err.errors():
        field = str(item["loc"][0]) if item["loc"] else "rdzv_port"
        variable, value = found.get(field, (PREFIX + field.upper(), "(default)"))
        default = MultinodeSettings.model_fields[field].default
        lines.append(
            f"{variable}={value!r} cannot be used: {item['msg']}. "
            f"Unset it for the default ({default}) or correct it."
        )
    return "\n".join(lines)
