#!/usr/bin/env python3
"""A CNI plugin that gives each pod an address of its own, 127.1.x.y, and nothing else.

Where nothing can set up networks, a pod can at least be told from others by its address. Only the machine itself listens
there: who wants to be answered at a pod's address has to serve there from outside (`leaks_case.py serve`).
"""

import fcntl
import json
import os
import sys


def next_number(path):
    """The next of all pods on this machine."""
    with open(path, "a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        number = int(file.read() or 0) + 1
        file.seek(0)
        file.truncate()
        file.write(str(number))
    return number


def main():
    command, given = os.environ["CNI_COMMAND"], json.load(sys.stdin)
    version = given.get("cniVersion", "1.0.0")
    if command == "ADD":
        number = next_number(given["numbers"])
        address = f"127.1.{number // 250}.{number % 250 + 1}/32"
        print(json.dumps({"cniVersion": version, "dns": {}, "ips": [{"interface": 0, "address": address}],
                          "interfaces": [{"name": os.environ["CNI_IFNAME"], "sandbox": os.environ["CNI_NETNS"]}]}))
    elif command == "VERSION":
        print(json.dumps({"cniVersion": version, "supportedVersions": ["0.4.0", "1.0.0"]}))


if __name__ == "__main__":
    main()
