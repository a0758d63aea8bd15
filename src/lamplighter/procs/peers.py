"""Connections of this process by who is at their other end, and which of our network interfaces leads there.

In:  addresses.
Out: connections to a machine that is gone, ended from our side, so that nobody waits in them; the interface of an address.
"""

from __future__ import annotations

import os
import socket

from lamplighter.procs import procfs


def end_connections_to(address: str) -> int:
    """How many there were. A read or write of another thread in one of them fails at once, as if the other side had closed it;
    without this it would wait for the timeouts of TCP, which take a quarter of an hour."""
    ended = 0
    for name in procfs.listed("/proc/self/fd"):
        try:
            copy = os.dup(int(name))
        except OSError:  # closed meanwhile
            continue
        try:
            with socket.socket(fileno=copy) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and plain(one.getpeername()[0]) == plain(address):
                    one.shutdown(socket.SHUT_RDWR)
                    ended += 1
        except OSError:  # no socket, or not connected
            continue
    return ended


def plain(address: str) -> str:
    """An IPv4 address as it is usually written, also where it came over IPv6."""
    return address.lower().removeprefix("::ffff:").partition("%")[0]


def interface_of(address: str) -> str:
    """The name of our network interface that has this address; empty where none has."""
    import psutil

    for name, each in psutil.net_if_addrs().items():
        if any(plain(one.address) == plain(address) for one in each if one.family in (socket.AF_INET, socket.AF_INET6)):
            return str(name)
    return ""


def is_own(address: str) -> bool:
    """Whether this machine has the address."""
    kind = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(kind, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
