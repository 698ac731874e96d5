"""Prints an address of this machine for its node: its own, else one that is put on lo.

A node's address must not be a loopback address, but it may lie on the loopback interface.
"""

import fcntl
import socket
import struct

OWN = "10.222.0.1"
SIOCGIFFLAGS, SIOCSIFFLAGS, SIOCSIFADDR, IFF_UP = 0x8913, 0x8914, 0x8916, 1


def local_addresses():
    """IPv4 addresses of this network namespace, loopback ones left out."""
    found, last = [], None
    with open("/proc/net/fib_trie", encoding="utf-8") as file:
        for line in file:
            if "|--" in line:
                last = line.split()[-1]
            elif "/32 host LOCAL" in line and last and not last.startswith("127."):
                if last not in found:
                    found.append(last)
    return found


def request(name, address):
    return struct.pack("16sH2s4s8x", name.encode(), socket.AF_INET, b"\0\0", socket.inet_aton(address))


def put_on_loopback():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        flags = struct.unpack("16sH14x", fcntl.ioctl(control, SIOCGIFFLAGS, struct.pack("16sH14x", b"lo", 0)))[1]
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))
        fcntl.ioctl(control, SIOCSIFADDR, request("lo:1", OWN))


if __name__ == "__main__":
    if not local_addresses():
        put_on_loopback()
    print(local_addresses()[0])
