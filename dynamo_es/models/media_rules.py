"""Which URLs media may come from: the guard against requests that a client makes this server send (SSRF). Pure.

A URL is looked at before each request, the first and every redirect's; the addresses that its host resolves to are
looked at before a connection is made, and the connection is made to one of those and no other.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Any

from yarl import URL

from dynamo_es.errors import InvalidArgument

_PORTS = {"http": 80, "https": 443}
# RFC 6052: addresses that stand for IPv4 ones behind a translator.
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_NUMBER = re.compile(r"(0x[0-9a-f]*|[0-9]+)", re.ASCII)
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class MediaRefused(InvalidArgument):
    """A medium is not taken: from where it should come, its size, or what it is. The message is fit for the client."""


@dataclass(frozen=True, slots=True)
class FetchRules:
    """From where media are fetched (``MediaFetcher`` says what each means).

    Attributes:
        domains: Hosts, in lower case; None: any.
        timeout_s: For one medium, redirects included.
    """

    user_agent: str
    direct_ip: bool
    direct_port: bool
    private_ips: bool
    domains: frozenset[str] | None
    timeout_s: float

    @classmethod
    def of_card(cls, body: dict[str, Any]) -> FetchRules:
        """From ``media_fetcher`` of a model's card."""
        domains = body["allowed_media_domains"]
        timeout = body["timeout"]
        return cls(
            user_agent=body["user_agent"],
            direct_ip=body["allow_direct_ip"],
            direct_port=body["allow_direct_port"],
            private_ips=body["allow_private_ips"],
            domains=None if domains is None else frozenset(domain.lower().rstrip(".") for domain in domains),
            timeout_s=timeout["secs"] + timeout["nanos"] / 1e9,
        )

    def check_url(self, text: str, before: URL | None = None) -> URL:
        """The URL, if a request may go there. ``before``: the one that led there.

        Raises:
            MediaRefused: It may not; says why, without the path, which may hold a secret.
        """
        try:
            url = URL(text) if before is None else before.join(URL(text))
            host, port = url.host, url.explicit_port
        except ValueError as error:
            raise MediaRefused("media URL cannot be read") from error
        if url.scheme not in _PORTS:
            raise MediaRefused(f"media URL of scheme {url.scheme!r}: http, https and data are fetched")
        if not host:
            raise MediaRefused("media URL names no host")
        if before is not None and before.scheme == "https" and url.scheme == "http":
            raise MediaRefused("media URL leads from https to http")
        if url.user is not None or url.password is not None:
            raise MediaRefused("media URL holds a user name or password")
        if port is not None and port != _PORTS[url.scheme] and not self.direct_port:
            raise MediaRefused(f"media URL names port {port}: ports are not allowed")
        self._check_host(host.lower().rstrip("."))
        return url

    def check_address(self, host: str, text: str) -> None:
        """Refuse an address of ``host`` that is not public. Raises MediaRefused."""
        if not self.private_ips and not is_public(text):
            raise MediaRefused(f"media host {host} has an address that is not public")

    def _check_host(self, host: str) -> None:
        if self.domains is not None and host not in self.domains:
            raise MediaRefused(f"media host {host} is not among those allowed")
        if not self.private_ips and host.rsplit(".", 1)[-1] == "localhost":
            # RFC 6761: a loopback address, whoever resolves it.
            raise MediaRefused(f"media host {host} has an address that is not public")
        address = _literal(host)
        if address is None:
            return
        if not self.direct_ip:
            raise MediaRefused(f"media host {host} is an address: addresses are not allowed")
        self.check_address(host, host)


def is_public(text: str) -> bool:
    """Whether an address belongs to the open internet, also where it wraps another one."""
    try:
        address: Address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return all(each.is_global and not each.is_multicast and not each.is_reserved for each in _unwrapped(address))


def _unwrapped(address: Address) -> list[Address]:
    """The address, or the IPv4 addresses that it carries."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address in _NAT64:
        return [ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    found: list[Address] = [address]
    if address.sixtofour is not None:
        found.append(address.sixtofour)
    if address.teredo is not None:
        found += address.teredo
    return found


def _literal(host: str) -> str | None:
    """The host, if it is an address in any spelling that a resolver takes for one, such as 127.1 or 0x7f000001."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host if _NUMBER.fullmatch(host.rsplit(".", 1)[-1]) else None
    return host
