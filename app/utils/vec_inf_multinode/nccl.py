"""Which transport a process chose, from NCCL's own log of it (``NCCL_DEBUG=INFO``)."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from .jobdir import clean_line, read

# Lines look like "nid001:123:456 [0] NCCL INFO Using network AWS Libfabric".
_NETWORK = re.compile(r"NCCL INFO Using network (.+)")
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is ([^,\s]+)")
_OFI_NICS = re.compile(r"NET/OFI Selected [Pp]rovider is .*\(found (\d+) nics?\)")
_DEVICES = re.compile(r"NET/(IB|Socket) ?: Using (\[0\].*)")
_DEVICE = re.compile(r"\[\d+\]([^\s:]+)")
# between nodes only: what stays inside a node goes "via P2P" or "via SHM"
_CHANNEL = re.compile(r"Channel .* via NET/([^/]+)/\d+(/GDRDMA)?")
_HCA = re.compile(r"GPU Direct RDMA (Enabled|Disabled) for (?:HCA \d+ '([^']+)'|GPU)")
_VERSION = re.compile(r"NCCL version (\S+)")
_PLUGIN_GONE = re.compile(
    r"NET/Plugin ?: ?(?:Could not find: [^.]*\.so|No plugin found)"
    r"|Failed to initialize NET plugin (?!IB)\S+"
    r"|aws-ofi-nccl initialization failed"
)

SOCKET = "Socket"


@dataclass(frozen=True)
class Transport:
    """What one process uses between the nodes.

    Parameters
    ----------
    host, pid : str
        Where the process ran, as NCCL names its log.
    network : str
        NCCL's network: ``AWS Libfabric``, ``IB``, ``Socket``, ...
    provider : str, optional
        libfabric's provider, ``cxi`` for Slingshot.
    nics : tuple of str
        The interfaces or adapters.
    gpudirect : bool, optional
        Whether the adapters read GPU memory themselves; None if the log does not say.
    version : str, optional
        NCCL's version.
    fell_back : bool
        It uses sockets, after a plugin for something faster could not be used.
    """

    host: str
    pid: str
    network: str
    provider: Optional[str] = None
    nics: tuple[str, ...] = ()
    gpudirect: Optional[bool] = None
    version: Optional[str] = None
    fell_back: bool = False

    @property
    def kind(self) -> tuple[object, ...]:
        """What should be the same for every process."""
        return self.network, self.provider, self.gpudirect

    @property
    def words(self) -> str:
        """The choice in a few words."""
        name = f"{self.network} ({self.provider})" if self.provider else self.network
        direct = {True: ", GPUDirect", False: ", no GPUDirect", None: ""}
        nics = f" on {','.join(self.nics)}" if self.nics else ""
        return name + nics + direct[self.gpudirect]


def transport(path: Path) -> Optional[Transport]:
    """Transport of the process that wrote a log, None if it had not chosen yet."""
    text = "\n".join(map(clean_line, read(path).splitlines()))
    channels = _CHANNEL.findall(text)
    network = _last(_NETWORK, text) or (channels[-1][0] if channels else None)
    if network is None:
        return None
    host, _, pid = path.name.rpartition(".")
    network = network.strip()
    return Transport(
        host=host,
        pid=pid,
        network=network,
        provider=None if network == SOCKET else _last(_PROVIDER, text),
        nics=_nics(network, text),
        gpudirect=_gpudirect(channels, text) if network != SOCKET else False,
        version=_last(_VERSION, text),
        fell_back=network == SOCKET and bool(_PLUGIN_GONE.search(text)),
    )


def _last(pattern: "re.Pattern[str]", text: str) -> Optional[str]:
    found = pattern.findall(text)
    return found[-1] if found else None


def _nics(network: str, text: str) -> tuple[str, ...]:
    for name, devices in _DEVICES.findall(text):
        if name == network:
            return tuple(dict.fromkeys(_DEVICE.findall(devices)))[:16]
    named = [hca for _, hca in _HCA.findall(text) if hca]
    if named:
        return tuple(dict.fromkeys(named))[:16]
    count = _last(_OFI_NICS, text)
    return (f"{count} NIC(s)",) if count else ()


def _gpudirect(channels: list[tuple[str, str]], text: str) -> Optional[bool]:
    if channels:
        return all(direct for _, direct in channels)
    enabled = [word == "Enabled" for word, _ in _HCA.findall(text)]
    return any(enabled) if enabled else None


def warnings(transports: list[Transport]) -> list[str]:
    """What is odd about the choices of a job's processes."""
    found = []
    slow = [one for one in transports if one.network == SOCKET]
    if slow:
        hosts = ", ".join(dict.fromkeys(one.host for one in slow))
        why = " (NCCL's network plugin could not be used)"
        found.append(
            f"{len(slow)} of {len(transports)} processes go over TCP sockets, "
            f"on {hosts}" + (why if any(one.fell_back for one in slow) else "")
        )
    kinds = {one.kind: one for one in transports}
    if len(kinds) > 1:
        choices = "; ".join(f"{one.host}: {one.words}" for one in kinds.values())
        found.append(f"the processes chose different transports: {choices}")
    return found
