"""How fast a keeper is on this machine: the first device whole, a grant, and what a killed process held.

    pool_bench.py --keeper PROGRAM [--rounds N] [--margin BYTES]

Starts a keeper of its own and asks it as the agent does. Prints a line a figure with its goal, and exits 0 if every
goal holds. The device should be in nobody's use.
"""

import argparse
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import nvml

HERE = os.path.dirname(os.path.abspath(__file__))
MIB, GIB = 1 << 20, 1 << 30


class Report:
    """Figures against their goals."""

    def __init__(self):
        self.held = []

    def at_most(self, what, value, goal, unit):
        self.held.append(value <= goal)
        print(f"{what:<52} {value:>9.3f} {unit:<3}  goal <= {goal:g} {unit:<3}  {'ok' if value <= goal else 'short'}",
              flush=True)

    def finish(self):
        print(f"bench-pool: {sum(self.held)} of {len(self.held)} goals hold")
        sys.exit(0 if self.held and all(self.held) else 1)


class Keeper:
    """A keeper that runs here, and a connection to it."""

    def __init__(self, program, folder):
        libraries = os.path.dirname(nvml.library_path())
        cuda = os.path.join(libraries, "libcuda.so.1")
        command = [program, "serve", "--no-csi", "--state-dir", folder,
                   "--driver-library", os.path.join(libraries, nvml.NAME)]
        command += ["--cuda-library", cuda] if os.path.exists(cuda) else []
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self.number = 0
        end = time.monotonic() + 20
        while True:
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                self.socket.connect(os.path.join(folder, "keeper.sock"))
                self.ask(hello={"version": 1})
                return
            except OSError:
                self.socket.close()
                if time.monotonic() > end or self.process.poll() is not None:
                    raise SystemExit("the keeper does not answer") from None
                time.sleep(0.05)

    def ask(self, **what):
        """Asks, and waits for the answer."""
        self.number += 1
        self.socket.settimeout(60)
        self.socket.send(json.dumps({"id": self.number, **what}).encode())
        while True:
            answer = json.loads(self.socket.recv(1 << 16) or b'{"id": -1}')
            if answer["id"] == -1:
                raise SystemExit("the keeper closed the connection")
            if answer["id"] != self.number:
                continue
            if "ok" not in answer:
                raise SystemExit(f"the keeper refused {what}: {answer}")
            return next(iter(answer["ok"].values()))

    def reserve(self, device, size, keep_free):
        return self.ask(reserve={"device": device, "bytes": size, "keepFree": keep_free})

    def release(self, device, size):
        return self.ask(release={"device": device, "bytes": size})

    def end(self):
        self.process.terminate()
        self.process.wait(20)


def timed(function, *arguments):
    """What a call returned, and how many milliseconds it took."""
    begun = time.perf_counter()
    value = function(*arguments)
    return value, (time.perf_counter() - begun) * 1e3


def resident(pid):
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        fields = dict(re.findall(r"^(VmRSS|RssAnon|RssFile):\s+(\d+) kB", file.read(), re.MULTILINE))
    return ", ".join(f"{name} {int(kib) / 1024:.1f} MiB" for name, kib in fields.items())


def whole(report, keeper, device, margin, rounds):
    """The whole device, again and again."""
    _, opened = timed(keeper.reserve, device, 0, margin)
    print(f"  the worker is there after {opened:.0f} ms")
    reader, times = nvml.Nvml(), []
    first = reader.memory().free
    for _ in range(rounds):
        end = time.monotonic() + 5
        while (free := reader.memory().free) < first - 64 * MIB and time.monotonic() < end:
            time.sleep(0.001)
        reserved, took = timed(keeper.reserve, device, free, margin)
        times.append(took)
        free = reader.memory().free
        if reserved["end"] not in ("keepFree", "complete") or free > margin + 64 * MIB:
            raise SystemExit(f"the device was not reserved: {reserved}, {free / MIB:.0f} MiB free")
        if len(times) < rounds:
            keeper.release(device, reserved["ballastBytes"])
    report.at_most("whole device less the margin, worst", max(times), 150, "ms")
    print(f"  {reserved['ballastBytes'] / GIB:.2f} GiB held, {free / MIB:.0f} MiB free, margin {margin / MIB:.0f} MiB; "
          f"median {statistics.median(times):.1f} ms of {rounds}; in process lists {reader.sample().processes}")
    return reserved["ballastBytes"]


def grants(report, keeper, device, held):
    """One GiB after the other."""
    times = [timed(keeper.release, device, GIB)[1] for _ in range(min(100, held // GIB * 3 // 4))]
    times.sort()
    report.at_most("1 GiB granted, p99", times[int(0.99 * (len(times) - 1))], 3, "ms")
    print(f"  {len(times)} grants: median {statistics.median(times):.2f} ms, worst {times[-1]:.2f} ms")
    return len(times) * GIB


def obtained(report, keeper, device, margin):
    """What is granted is there at the first try."""
    command = [sys.executable, os.path.join(HERE, "driver_cases.py"), "take", str(8 * GIB), str(GIB)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    said = json.loads(process.stdout.readline() or '{"code": -1}')
    process.kill()
    process.wait()
    report.at_most("8 GiB that were granted: refusals", abs(said["code"]), 0, "")
    print(f"  its context took {said.get('context_ms', 0):.0f} ms, 1 GiB {said.get('median_ms') or 0:.1f} ms (median)")
    until_held(keeper, device, margin, time.monotonic() + 10)


def until_held(keeper, device, margin, end):
    """Holds what is free, until that is done."""
    reader = nvml.Nvml()
    while time.monotonic() < end:
        free = reader.memory().free
        if free <= margin + 8 * MIB:
            return
        keeper.reserve(device, free - margin, margin)
    raise SystemExit("what is free cannot be held")


def killed(report, keeper, device, margin, sizes):
    """What a process held that was killed, back in the ballast."""
    for size in sizes:
        keeper.release(device, size * GIB + 2 * GIB)
        command = [sys.executable, os.path.join(HERE, "driver_cases.py"), "take", str(size * GIB), str(GIB)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        said = json.loads(process.stdout.readline() or '{"code": -1}')
        if said["code"] != 0:
            raise SystemExit(f"a process could not take what was granted: {said}")
        until_held(keeper, device, margin, time.monotonic() + 10)
        watcher = os.pidfd_open(process.pid)
        begun = time.monotonic()
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PIDFD, watcher, os.WEXITED)
        ended = time.monotonic()
        until_held(keeper, device, margin, ended + 10)
        done = time.monotonic()
        os.close(watcher)
        report.at_most(f"{size} GiB of a killed process held, after exit", (done - ended) * 1e3, 50 + 4 * size, "ms")
        print(f"  its exit was seen {(ended - begun) * 1e3:.0f} ms after SIGKILL")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--keeper", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--margin", type=int, default=512 * MIB)
    arguments = parser.parse_args()
    report, reader = Report(), nvml.Nvml()
    device, total = reader.uuid(), reader.memory().total
    with tempfile.TemporaryDirectory() as folder:
        keeper = Keeper(arguments.keeper, folder)
        try:
            held = whole(report, keeper, device, arguments.margin, arguments.rounds)
            status = keeper.ask(status={})
            worker = status["devices"][0]["worker"]
            print(f"  chunks by MiB: {status['devices'][0]['chunks']}")
            print(f"  the keeper is {resident(keeper.process.pid)}; its worker "
                  + (resident(worker) if worker else "is gone"))
            grants(report, keeper, device, held)
            obtained(report, keeper, device, arguments.margin)
            killed(report, keeper, device, arguments.margin, [size for size in (1, 16, 64) if size * GIB < total // 2])
        finally:
            keeper.end()
    report.finish()


if __name__ == "__main__":
    main()
