"""Which proxy of the environment a request goes through: none to an address of this machine."""

import ipaddress
import os
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

LOOPBACK = ("localhost", "127.0.0.0/8", "127.0.0.1", "::1")
"""Addresses of this machine, as no_proxy names them; not every library reads networks."""


@dataclass(frozen=True)
class Proxy:
    variable: str
    """The environment variable that names it."""
    address: str
    """It may hold a password: no message has it."""

    def __str__(self) -> str:
        return f"the proxy that {self.variable} names"


def proxy_for(url: str) -> Proxy | None:
    """The proxy for requests to `url`, by the variables that curl reads; None for one that goes straight there."""
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    if is_loopback(host) or any(_excepts(entry, host, parts.port) for entry in _no_proxy()):
        return None
    for name in (f"{parts.scheme}_proxy", "all_proxy"):
        # HTTP_PROXY is what a web server makes of a header "Proxy" of whoever asks it.
        names = (name, name.upper()) if "REQUEST_METHOD" not in os.environ else (name,)
        for variable in names:
            if address := os.environ.get(variable, "").strip():
                return Proxy(variable, address if "://" in address else f"http://{address}")
    return None


def through(url: str) -> str:
    """Words for the message of a failed request to `url`: ", asked through the proxy that http_proxy names …"; "" for
    one that went straight there."""
    proxy = proxy_for(url)
    host = urlsplit(url).hostname
    return f", asked through {proxy} (no_proxy={host} goes straight there)" if proxy else ""


def is_loopback(host: str) -> bool:
    """Whether a host's name or address, without brackets, is of this machine."""
    host = host.lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    address = _address(host)
    return address is not None and (address.is_loopback or address.is_unspecified)


def keep_loopback_direct() -> None:
    """Adds this machine to no_proxy, for libraries and processes that read it by themselves."""
    if any(os.environ.get(name) for name in _variables()):
        given = list(_no_proxy())
        entries = ",".join([*given, *(entry for entry in LOOPBACK if entry not in given)])
        os.environ |= {"no_proxy": entries, "NO_PROXY": entries}


def _variables() -> Iterator[str]:
    for scheme in ("http", "https", "all"):
        yield from (f"{scheme}_proxy", f"{scheme.upper()}_PROXY")


def _no_proxy() -> list[str]:
    entries = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    return [entry.strip() for entry in entries.split(",") if entry.strip()]


def _excepts(entry: str, host: str, port: int | None) -> bool:
    """Whether an entry of no_proxy (*, a domain, an address, a network; with a port or without) is about this host."""
    address = _address(host)
    if address is not None and "/" in entry:
        try:
            return address in ipaddress.ip_network(entry, strict=False)
        except ValueError:
            return False
    if entry.count(":") == 1:
        entry, _, wanted = entry.partition(":")
        if wanted != str(port):
            return False
    domain = entry.strip("[]").lower().removeprefix("*").removeprefix(".")
    return entry == "*" or host == domain or (address is None and host.endswith(f".{domain}"))


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a host is given as; one of IPv4 in the form of IPv6 is that one."""
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return None
    return (found.version == 6 and found.ipv4_mapped) or found
