"""Runs the programs of `variants.py` side by side on the first GPU, and records what is seen of them from outside.

    record.py --out DIR [--batch 1,2] [--speed 68] [--limit SECONDS] [--only NAME,...] [--device cuda|cpu]

Writes to DIR, for each batch N:
  series-N.csv.gz      what `kubectl highwater simulate` reads: pod,device,seconds,bytes,capacity,work,host_bytes,life
  framework-N.csv.gz   what the program and the kernel say beside that, every third sample
  labels-N.csv         a line a series: kind, variant, split, leak or not, onset and end
Seconds are those of the story, not of the clock. Bytes are the driver's, by process, as read.
Exits 0 if every program lived its story and every leak came to its end.
"""

import argparse
import csv
import gzip
import os
import re
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]

import variants  # noqa: E402
from programs import OUT_OF_MEMORY, Slot  # noqa: E402

MIB = 1 << 20
CADENCE = 10  # seconds of the story between samples
ASIDE = 3  # every so many samples what is beside them is written
START = 75  # seconds that programs may take to come up
GROUPS = "/sys/fs/cgroup"
SERIES = ("pod", "device", "seconds", "bytes", "capacity", "work", "host_bytes", "life")
FRAMEWORK = ("pod", "device", "seconds", "allocated", "reserved", "replays", "unlisted", "rss_anon", "rss_shmem",
             "kernel", "current")
LABELS = ("pod", "device", "kind", "variant", "split", "leaks", "onset_seconds", "ended_seconds", "ending", "capacity",
          "peak", "program", "load")


def field(text, name):
    """A number of a file of lines, in its own unit; None if it is missing."""
    found = re.search(rf"^{name}:?\s+(\d+)", text, re.MULTILINE)
    return int(found.group(1)) if found else None


def read(path):
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


class Driver:
    """The device by NVML: bytes by process."""

    scale = 1

    def __init__(self):
        from nvml import Nvml
        self.nvml = Nvml()

    def held(self, _):
        return self.nvml.processes()

    def used(self):
        return self.nvml.memory().used

    def describe(self):
        memory = self.nvml.memory()
        return f"{self.nvml.product()}, driver {self.nvml.driver()}, {memory.total / (1 << 30):.1f} GiB"


class Pretended:
    """In place of a driver: what each process has beyond what it had at its begin, sixteen times over."""

    scale = 16

    def __init__(self):
        self.first = {}

    def held(self, pids):
        held = {}
        for pid in pids:
            anon = field(read(f"/proc/{pid}/status"), "RssAnon")
            if anon is not None:
                begun = self.first.setdefault(pid, anon)
                held[pid] = max(anon - begun, 0) * 1024 * self.scale + variants.CONTEXT * MIB
        return held

    def used(self):
        return 0

    def describe(self):
        return "no GPU: the programs run on the processor, a sixteenth of every size"


class Groups:
    """A cgroup for each program, where the kernel has them as one tree; `None` elsewhere."""

    def __init__(self):
        self.root = None
        if not os.path.exists(f"{GROUPS}/cgroup.controllers"):
            return
        try:
            with open(f"{GROUPS}/cgroup.subtree_control", "w", encoding="utf-8") as file:
                file.write("+memory")
            root = f"{GROUPS}/highwater-leaks"
            os.makedirs(root, exist_ok=True)
            with open(f"{root}/cgroup.subtree_control", "w", encoding="utf-8") as file:
                file.write("+memory")
            self.root = root
        except OSError as error:
            print(f"no cgroups to be had ({error}): host memory is that of processes", flush=True)

    def add(self, name, pid):
        if self.root is None:
            return None
        path = f"{self.root}/{name}"
        try:
            os.makedirs(path, exist_ok=True)
            with open(f"{path}/cgroup.procs", "w", encoding="utf-8") as file:
                file.write(str(pid))
        except OSError:
            return None
        return path

    def clear(self):
        if self.root is None:
            return
        for folder, _, _ in os.walk(self.root, topdown=False):
            try:
                os.rmdir(folder)
            except OSError:
                pass


class Process:
    """A program that runs, and what was seen of it."""

    def __init__(self, variant, rank, number, arguments, folder, log, groups):
        self.variant, self.rank, self.slot = variant, rank, Slot(f"{folder}/slots", number)
        # Of several ranks each would have a device of its own.
        self.device = str(rank)
        environment = {**os.environ, **variant.environment, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
                       "MALLOC_MMAP_THRESHOLD_": "65536" if arguments.device == "cpu" else "1048576"}
        command = [sys.executable, f"{HERE}/programs.py", variant.name, str(rank), folder, str(number),
                   str(arguments.speed), arguments.device]
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.group = groups.add(f"{variant.name}-{rank}", self.process.pid)
        self.leaks = variant.leaks and rank == variant.ranks - 1
        self.peak, self.last, self.gap, self.samples, self.ending, self.ended = 0, None, 0.0, 0, None, None
        self.views = []  # (seconds, bytes, allocated, reserved, host)

    @property
    def pid(self):
        return self.process.pid

    def is_ready(self):
        return self.slot.read()[0] == Slot.READY

    def host(self):
        """Memory of the host that the kernel cannot drop, and what makes it up."""
        status = read(f"/proc/{self.pid}/status")
        anon, shmem = ((field(status, name) or 0) * 1024 for name in ("RssAnon", "RssShmem"))
        if self.group is None:
            return anon + shmem, anon, shmem, None, None
        stat = read(f"{self.group}/memory.stat")
        swapped = int(read(f"{self.group}/memory.swap.current") or 0)
        held = (field(stat, "anon") or 0) + (field(stat, "shmem") or 0) + swapped
        return held, anon, shmem, field(stat, "kernel"), int(read(f"{self.group}/memory.current") or 0)

    def end(self, how, seconds):
        if self.ending is None:
            self.ending, self.ended = how, seconds
        self.process.kill()


def sample(one, seconds, held, scale, series, framework, turn):
    """A sample of a process: a line of its series, and of what is beside it."""
    _, allocated, reserved, work, replays, unlisted = one.slot.read()
    allocated, reserved, unlisted = (int(number * scale) for number in (allocated, reserved, unlisted))
    size, capacity = held.get(one.pid), variants.CAPACITY * MIB
    host, anon, shmem, kernel, current = one.host()
    # Less than a MiB of the host is noise, and noise makes files large.
    host, anon, shmem, kernel, current = (part if part is None else part // MIB * MIB
                                          for part in (host, anon, shmem, kernel, current))
    pod = one.variant.name
    series.writerow((pod, one.device, f"{seconds:.1f}", "" if size is None else min(size, capacity), capacity,
                     int(work), host, 0))
    if turn % ASIDE == 0:
        framework.writerow((pod, one.device, f"{seconds:.1f}", allocated, reserved, int(replays), unlisted, anon, shmem,
                            "" if kernel is None else kernel, "" if current is None else current))
    if size is not None:
        one.samples += 1
        one.gap = max(one.gap, seconds - one.last) if one.last is not None else 0.0
        one.last, one.peak = seconds, max(one.peak, size)
        if turn % 6 == 0:
            one.views.append((seconds, size, allocated, reserved, host))
    # Managed memory is in no process list: what is not seen fills the device all the same.
    if max(size or 0, (variants.CONTEXT * MIB + reserved + unlisted) if unlisted else 0) >= capacity:
        one.end("out of memory", seconds)


def start(arguments, chosen, folder, groups):
    os.makedirs(folder, exist_ok=True)
    if os.path.exists(f"{folder}/begin"):
        os.unlink(f"{folder}/begin")
    wanted = [(variant, rank) for variant in chosen for rank in range(variant.ranks)]
    with open(f"{folder}/slots", "wb") as file:
        file.write(bytes(len(wanted) * Slot.SIZE))
    with open(f"{arguments.out}/programs.log", "ab") as log:
        processes = [Process(variant, rank, number, arguments, folder, log, groups)
                     for number, (variant, rank) in enumerate(wanted)]
    limit = time.monotonic() + START
    while time.monotonic() < limit:
        waiting = [one for one in processes if not one.is_ready() and one.process.poll() is None]
        if not waiting:
            break
        time.sleep(0.05)
    for one in processes:
        if not one.is_ready():
            one.end("did not start", 0.0)
    return processes


def batch(arguments, number, chosen, driver, left):
    """Runs variants side by side; the processes with what was seen of them."""
    begun, groups, folder = time.monotonic(), Groups(), f"{arguments.work}/batch-{number}"
    processes = start(arguments, chosen, folder, groups)
    ready = [one for one in processes if one.ending is None]
    took = time.monotonic() - begun
    print(f"batch {number}: {len(ready)} of {len(processes)} programs are up after {took:.0f} s", flush=True)
    if isinstance(driver, Pretended):
        driver.held([one.pid for one in ready])
    origin = time.monotonic() + 0.3
    with open(f"{folder}/begin.new", "w", encoding="utf-8") as file:
        file.write(repr(origin))
    os.rename(f"{folder}/begin.new", f"{folder}/begin")
    turn, most, slow, calls = 0, 0, 0.0, []
    with gzip.open(f"{arguments.out}/series-{number}.csv.gz", "wt", encoding="utf-8", newline="") as first, \
            gzip.open(f"{arguments.out}/framework-{number}.csv.gz", "wt", encoding="utf-8", newline="") as second:
        series, framework = csv.writer(first, lineterminator="\n"), csv.writer(second, lineterminator="\n")
        series.writerow(SERIES)
        framework.writerow(FRAMEWORK)
        while (due := turn * CADENCE) <= variants.MINUTES * 60 and left() > 12 and any(one.ending is None for one in ready):
            wait = origin + due / arguments.speed - time.monotonic()
            if wait > 0:
                time.sleep(wait)
            slow = max(slow, -wait)
            at = time.monotonic()
            seconds, held = (at - origin) * arguments.speed, driver.held([one.pid for one in ready])
            calls.append(time.monotonic() - at)
            for one in ready:
                if one.ending is not None:
                    continue
                code = one.process.poll()
                if code is None:
                    sample(one, max(seconds, 0.0), held, driver.scale, series, framework, turn)
                else:
                    one.end("out of memory" if code == OUT_OF_MEMORY else f"ended with {code}", seconds)
            most = max(most, driver.used())
            turn = max(turn + 1, int((time.monotonic() - origin) * arguments.speed / CADENCE))
    for one in ready:
        one.end("story told" if due > variants.MINUTES * 60 else "cut off", min(due, variants.MINUTES * 60))
    for one in processes:
        one.process.wait()
    groups.clear()
    with open(f"{arguments.out}/labels-{number}.csv", "w", encoding="utf-8", newline="") as file:
        labels = csv.writer(file, lineterminator="\n")
        labels.writerow(LABELS)
        for one in processes:
            labels.writerow(label(one))
    calls = sorted(calls) or [0.0]
    print(f"batch {number}: {turn} rounds in {time.monotonic() - origin:.0f} s, at most {slow * 1000:.0f} ms late; reading the "
          f"driver took {calls[len(calls) // 2] * 1e3:.2f} ms (median); the device had at most {most / (1 << 30):.1f} GiB in "
          f"use", flush=True)
    return processes


def label(one):
    variant = one.variant
    return (variant.name, one.device, variant.kind, variant.number, variant.split, int(one.leaks),
            int(variant.onset * 60) if one.leaks else "", f"{one.ended:.0f}", one.ending, variants.CAPACITY * MIB, one.peak,
            variant.program, variant.load.kind)


def summary(processes):
    """A line a process, and whether all is as it was to be."""
    wrong = []
    print(f"\n{'program':18} {'':8} {'samples':>7} {'gap s':>6} {'begin':>7} {'end':>7} {'peak':>5} {'grew: framework':>15} "
          f"{'reserved':>8} {'host':>5}  what became of it")
    for one in processes:
        onset = (one.variant.onset or 10) * 60
        since = [view for view in one.views if view[0] >= onset] or one.views or [(0, 0, 0, 0, 0)]
        before, after = since[0], since[-1]
        grown = after[1] - before[1]

        def part(place, grown=grown, before=before, after=after):
            return f"{100 * (after[place] - before[place]) / grown:.0f} %" if abs(grown) > 64 * MIB else "-"

        whole = one.variant.name if one.variant.ranks == 1 else f"{one.variant.name}/{one.rank}"
        print(f"{whole:18} {one.variant.split:8} {one.samples:7} {one.gap:6.1f} {before[1] / MIB:7.0f} {after[1] / MIB:7.0f} "
              f"{100 * one.peak / variants.CAPACITY / MIB:4.0f}% {part(2):>15} {part(3):>8} {part(4):>5}  {one.ending} at "
              f"{one.ended / 60:.0f} min" + (" (leaks)" if one.leaks else ""))
        if one.leaks and one.ending != "out of memory":
            wrong.append(f"{whole} leaks and {one.ending}")
        elif not one.leaks and one.ending != "story told" and one.variant.kind != "fragmentation":
            wrong.append(f"{whole} is right and {one.ending}")
        elif one.gap > 4 * CADENCE:
            wrong.append(f"{whole} was not seen for {one.gap:.0f} s")
    print(f"\n{len(processes)} processes, {len(wrong)} not as they were to be" + "".join(f"\n  {what}" for what in wrong),
          flush=True)
    return not wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--work", default="/var/tmp/highwater-leaks")
    parser.add_argument("--batch", default="1,2")
    parser.add_argument("--speed", type=float, default=68)
    parser.add_argument("--limit", type=float, default=580)
    parser.add_argument("--only", default="")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    begun = time.monotonic()
    os.makedirs(arguments.out, exist_ok=True)
    driver = Driver() if arguments.device == "cuda" else Pretended()
    print(f"{driver.describe()}; {variants.MINUTES} minutes of each story, {arguments.speed:.0f} times as fast as the clock; "
          f"a capacity of {variants.CAPACITY} MiB each", flush=True)
    only, processes = [name for name in arguments.only.split(",") if name], []
    for number in map(int, arguments.batch.split(",")):
        chosen = [one for one in variants.VARIANTS if one.batch == number and (not only or one.name in only)]
        if chosen:
            processes += batch(arguments, number, chosen, driver,
                               lambda: arguments.limit - (time.monotonic() - begun))
    sys.exit(0 if summary(processes) and processes else 1)


if __name__ == "__main__":
    main()
