#!/usr/bin/env python3
"""Moving a process's memory to the host and back by the driver's checkpoints: how fast, what a neighbour loses
meanwhile, and what becomes of it when it is interrupted.

    park_bench.py [--gib N] [--only speed,facts] [--limit SECONDS]
    park_bench.py holder GIB | neighbour | small GIB | mover CALL PID | plain GIB     its own processes

Prints a line a number. It shares no code with the product. Exits 0 if what was parked came back as it was.
"""

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time

GI = 1 << 30
STATES = {0: "running", 1: "locked", 2: "checkpointed", 3: "failed", 4: "checkpointing", 5: "restoring"}
CALLS = {"lock": "Lock", "checkpoint": "Checkpoint", "restore": "Restore", "unlock": "Unlock"}
CAP_SYS_PTRACE = 19
BEGUN = time.monotonic()


# --- processes ----------------------------------------------------------------------------------


def say(**words):
    print(json.dumps(words), flush=True)


def holder(size):
    """PyTorch with an image of that size, which it can recognise."""
    import torch
    torch.manual_seed(7)
    step = 1 << 30
    blocks = [torch.empty(step // 4, dtype=torch.int32, device="cuda") for _ in range(size)]
    for block in blocks:
        block.random_(generator=None)
    sums = [int(block.sum(dtype=torch.int64)) for block in blocks]
    torch.cuda.synchronize()
    say(ready=True, reserved=torch.cuda.memory_reserved())
    for line in sys.stdin:
        begun = time.monotonic()
        if line.strip() == "check":
            say(intact=[int(block.sum(dtype=torch.int64)) for block in blocks] == sums, seconds=time.monotonic() - begun)
        elif line.strip() == "alloc":
            torch.empty(512 << 20, dtype=torch.int8, device="cuda")
            torch.cuda.synchronize()
            say(allocated=True, seconds=time.monotonic() - begun)


def neighbour():
    """PyTorch that computes, and notes when each step was done. Two kinds: multiplications, and copies within
    the device's memory."""
    import torch
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    one, other = (torch.empty(1 << 30, dtype=torch.int8, device="cuda") for _ in range(2))
    product = torch.empty_like(a)
    steps = []
    stop = threading.Event()

    def work():
        while not stop.is_set():
            begun = time.monotonic()
            for _ in range(5):
                torch.matmul(a, b, out=product)
            torch.cuda.synchronize()
            middle = time.monotonic()
            for _ in range(5):
                one.copy_(other)
            torch.cuda.synchronize()
            steps.append((begun, middle, time.monotonic()))

    worker = threading.Thread(target=work)
    worker.start()
    say(ready=True)
    for line in sys.stdin:
        start, end = json.loads(line)
        inside = [s for s in list(steps) if s[0] >= start and s[2] <= end]
        mean = lambda values: sum(values) / len(values) if values else None
        longest = max((s[2] - s[0] for s in inside), default=None)
        say(steps=len(inside), seconds=end - start, multiply=mean([s[1] - s[0] for s in inside]),
            copy=mean([s[2] - s[1] for s in inside]), longest=longest)
    stop.set()
    worker.join()


def plain(size):
    """The same bytes by plain copies: through one pinned buffer, and to pinned memory of the whole size."""
    import torch
    device = torch.empty(GI, dtype=torch.int8, device="cuda")
    begun = time.monotonic()
    host = torch.empty(GI, dtype=torch.int8, pin_memory=True)
    pinning = time.monotonic() - begun
    rates = {}
    for name, to, source in (("out", host, device), ("back", device, host)):
        to.copy_(source)
        torch.cuda.synchronize()
        begun = time.monotonic()
        for _ in range(size):
            to.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        rates[name] = time.monotonic() - begun
    begun = time.monotonic()
    blocks = []
    for _ in range(size):
        block = torch.empty(GI, dtype=torch.int8, pin_memory=True)
        block.copy_(device, non_blocking=True)
        blocks.append(block)
    torch.cuda.synchronize()
    say(out=rates["out"], back=rates["back"], fresh=time.monotonic() - begun, pinning_gib=pinning)


def small(size):
    """The driver alone with that much memory, filled."""
    from measure import Driver
    driver = Driver()
    driver.context()
    pointer = ctypes.c_ulonglong()
    driver.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size * GI))
    driver.call("cuMemsetD8_v2", pointer, ctypes.c_ubyte(0x5a), ctypes.c_size_t(size * GI))
    driver.call("cuCtxSynchronize")
    say(ready=True, pid=os.getpid())
    for line in sys.stdin:
        if line.strip() == "check":
            byte = ctypes.c_ubyte()
            found = set()
            for offset in (0, size * GI // 2 + 12345, size * GI - 1):
                driver.call("cuMemcpyDtoH_v2", ctypes.byref(byte), ctypes.c_ulonglong(pointer.value + offset),
                            ctypes.c_size_t(1))
                found.add(byte.value)
            say(intact=found == {0x5a})


class Checkpoints:
    """The driver's calls."""

    def __init__(self):
        from measure import Driver
        self.library = Driver().library

    def state(self, pid):
        state = ctypes.c_int(-1)
        code = self.library.cuCheckpointProcessGetState(pid, ctypes.byref(state))
        return STATES.get(state.value, str(state.value)) if code == 0 else f"error {code}"

    def call(self, name, pid, milliseconds=10_000):
        arguments = (ctypes.c_ulonglong * 8)()
        arguments[0] = milliseconds if name == "lock" else 0
        begun = time.monotonic()
        code = getattr(self.library, f"cuCheckpointProcess{CALLS[name]}")(pid, ctypes.byref(arguments))
        return code, time.monotonic() - begun


def mover(name, pid):
    driver = Checkpoints()
    if name == "state":
        say(state=driver.state(pid))
        return
    say(begins=True)
    code, seconds = driver.call(name, pid)
    say(code=code, seconds=seconds)


# --- the measuring side -------------------------------------------------------------------------


class Worker:
    """One of the processes above."""

    def __init__(self, *arguments, before=(), **options):
        command = [*before, sys.executable, os.path.abspath(__file__), *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)

    @property
    def pid(self):
        return self.process.pid

    def hear(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args[-2:]} ended early with {self.process.wait()}")
        return json.loads(line)

    def tell(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ask(self, line):
        self.tell(line)
        return self.hear()

    def end(self):
        self.process.kill()
        self.process.wait()


def limited(kept):
    """For a child: no rights of root but those."""
    def drop():
        libc = ctypes.CDLL(None)
        for capability in range(64):
            if capability not in kept:
                libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
    return drop


def host_bytes(pid):
    """Resident, locked, and charged to the memory cgroup, where that can be read."""
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        status = dict(line.split(":", 1) for line in file)
    kib = lambda name: int(status.get(name, "0 kB").split()[0]) << 10
    charged = None
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8") as file:
            path = next(line.strip().split("::", 1)[1] for line in file if line.startswith("0::"))
        with open(f"/sys/fs/cgroup{path}/memory.current", encoding="utf-8") as file:
            charged = int(file.read())
    except (OSError, StopIteration):
        pass
    return {"resident": kib("VmRSS"), "locked": kib("VmLck"), "charged": charged}


def gib(count):
    return "?" if count is None else f"{count / GI:.2f} GiB"


def speed(size, left):
    import nvml
    device = nvml.Nvml()
    driver = Checkpoints()
    held, beside = Worker("holder", size), Worker("neighbour")
    held.hear(), beside.hear()
    time.sleep(1)
    windows = {}

    def during(name, body):
        start = time.monotonic()
        result = body()
        windows.setdefault(name, []).append((start, time.monotonic()))
        return result

    during("alone", lambda: time.sleep(4))
    image = device.sample().processes.get(held.pid)
    intact = held.ask("check")["intact"]
    print(f"image: {gib(image)} by the driver's list")
    rates = {"park": [], "restore": []}
    for turn in (1, 2):
        if left() < 45:
            print(f"turn {turn}: not begun, for want of time")
            break
        before, host = device.sample(), host_bytes(held.pid)
        lock = driver.call("lock", held.pid)
        if turn == 1:
            held.tell("alloc")
        park = during("park", lambda: driver.call("checkpoint", held.pid))
        after, host_after = device.sample(), host_bytes(held.pid)
        state = driver.state(held.pid)
        during("parked", lambda: time.sleep(2))
        restore = during("restore", lambda: driver.call("restore", held.pid))
        unlock = driver.call("unlock", held.pid)
        codes = [lock[0], park[0], restore[0], unlock[0]]
        freed = before.used - after.used
        print(f"turn {turn}: codes {codes}, state {state}; lock {lock[1] * 1000:.1f} ms, checkpoint {park[1]:.2f} s, "
              f"restore {restore[1]:.2f} s, unlock {unlock[1] * 1000:.1f} ms")
        print(f"turn {turn}: device used fell by {gib(freed)}, in the list while parked: {held.pid in after.processes}; "
              + ", ".join(f"{name} +{gib(host_after[name] - host[name])}" for name in host if host[name] is not None))
        if any(codes):
            intact = False
            break
        rates["park"].append(freed / park[1])
        rates["restore"].append(freed / restore[1])
        if turn == 1:
            waited = held.hear()["seconds"]
            print(f"an allocation asked for while it was locked was done {waited:.2f} s later")
        intact &= held.ask("check")["intact"]
    print(f"what was parked came back as it was: {intact}")
    during("alone again", lambda: time.sleep(3))
    base = None
    for name, spans in windows.items():
        heard = [beside.ask(json.dumps(span)) for span in spans]
        steps, seconds = (sum(one[key] for one in heard) for key in ("steps", "seconds"))
        rate = steps / seconds
        base = base or rate
        mean = lambda key: sum(one[key] or 0 for one in heard) / len(heard) * 1000
        longest = max(one["longest"] or 0 for one in heard) * 1000
        print(f"neighbour, {name}: {rate:.1f} steps/s, {rate / base:.4f} of alone; multiplications {mean('multiply'):.2f} ms, "
              f"copies {mean('copy'):.2f} ms, longest step {longest:.1f} ms")
    held.end(), beside.end()
    if left() > 25:
        copied = Worker("plain", size).hear()
        out, back, fresh = (size * GI / copied[key] for key in ("out", "back", "fresh"))
        print(f"plain copy of {size} GiB: to pinned memory {out / 1e9:.2f} GB/s, back {back / 1e9:.2f} GB/s, "
              f"to memory that is pinned anew {fresh / 1e9:.2f} GB/s")
        for name, plainly in (("park", out), ("restore", back)):
            for turn, rate in enumerate(rates[name], 1):
                print(f"{name}, turn {turn}: {rate / 1e9:.2f} GB/s, {rate / plainly:.3f} of the plain copy"
                      + (f", {rate / fresh:.3f} of that to memory pinned anew" if name == "park" else ""))
    return intact


def settle(driver, pid, seconds=10):
    """The states that a process goes through, until one lasts for a second."""
    states, until = [], time.monotonic() + seconds
    same = time.monotonic()
    while time.monotonic() < until and time.monotonic() - same < 1:
        asked = time.monotonic()
        state = driver.state(pid)
        took = time.monotonic() - asked
        if not states or states[-1][0] != state:
            states.append((state, took))
            same = time.monotonic()
        time.sleep(0.01)
    return " -> ".join(f"{state} (answered in {took * 1000:.0f} ms)" for state, took in states)


def bring_back(driver, worker):
    """Whatever state it is in; whether it is as it was."""
    codes = []
    for call, state in (("restore", "checkpointed"), ("unlock", "locked")):
        if driver.state(worker.pid) == state:
            codes.append(driver.call(call, worker.pid)[0])
    if driver.state(worker.pid) != "running":
        return f"codes {codes}, state {driver.state(worker.pid)}"
    return f"codes {codes}, intact {worker.ask('check')['intact']}"


def facts(left):
    import nvml
    device = nvml.Nvml()
    driver = Checkpoints()
    size = 4
    idle = subprocess.Popen(["sleep", "1000"])
    print(f"a process that does not use CUDA: state {driver.state(idle.pid)}, lock {driver.call('lock', idle.pid)[0]}")
    idle.kill()
    print(f"a process that is not there: state {driver.state(idle.pid + 1)}")
    worker = Worker("small", size)
    worker.hear()

    print(f"out of order: checkpoint of a running one {driver.call('checkpoint', worker.pid)[0]}, "
          f"unlock {driver.call('unlock', worker.pid)[0]}, restore {driver.call('restore', worker.pid)[0]}")
    locker = Worker("mover", "lock", worker.pid)
    locker.hear()
    code = locker.hear()["code"]
    locker.process.wait()
    print(f"whoever locked has ended: lock {code}, then {driver.state(worker.pid)}, again {driver.call('lock', worker.pid)[0]}, "
          f"unlock by another {driver.call('unlock', worker.pid)[0]}")

    for call, first, pause in (("checkpoint", ["lock"], 0.4), ("restore", ["lock", "checkpoint"], 0.15)):
        if left() < 15:
            return
        for earlier in first:
            driver.call(earlier, worker.pid)
        killed = Worker("mover", call, worker.pid)
        killed.hear()
        time.sleep(pause)
        alive = killed.process.poll() is None
        killed.process.send_signal(signal.SIGKILL)
        killed.process.wait()
        print(f"whoever asked for a {call} was killed after {pause} s (under way: {alive}): {settle(driver, worker.pid)}; "
              f"brought back: {bring_back(driver, worker)}")

    if left() > 15:
        for call in ("lock", "checkpoint"):
            driver.call(call, worker.pid)
        free = device.sample().free
        filler = Worker("small", max(1, int(free / GI) - 2))
        filler.hear()
        refused = driver.call("restore", worker.pid)
        print(f"restore with {gib(device.sample().free)} free: code {refused[0]} after {refused[1]:.2f} s, "
              f"then {driver.state(worker.pid)}")
        filler.end()
        time.sleep(1)
        print(f"with room again: {bring_back(driver, worker)}")

    for name, kept in (("none", ()), ("SYS_PTRACE", (CAP_SYS_PTRACE,))):
        if left() < 10:
            return
        limited_one = Worker("mover", "state", worker.pid, preexec_fn=limited(kept))
        print(f"root with capabilities {name}: state {limited_one.hear()['state']}", end="")
        codes = []
        for call in ("lock", "checkpoint", "restore", "unlock"):
            limited_one = Worker("mover", call, worker.pid, preexec_fn=limited(kept))
            limited_one.hear()
            codes.append(limited_one.hear()["code"])
        print(f", lock to unlock {codes}; {bring_back(driver, worker)}")
    worker.end()
    if left() > 10:
        apart = Worker("small", 1, before=("unshare", "--pid", "--fork", "--mount-proc", "--net", "--ipc", "--mount"))
        apart.hear()
        with open(f"/proc/{apart.pid}/task/{apart.pid}/children", encoding="utf-8") as file:
            pid = int(file.read().split()[0])
        codes = [driver.call(call, pid)[0] for call in ("lock", "checkpoint", "restore", "unlock")]
        print(f"a process in namespaces of its own (PID, mounts, network, IPC): lock to unlock {codes}, "
              f"intact {apart.ask('check')['intact']}")
        os.kill(pid, signal.SIGKILL)
        apart.end()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, default=20)
    parser.add_argument("--only", default="speed,facts")
    parser.add_argument("--limit", type=float, default=150)
    own = {"holder": lambda rest: holder(int(rest[0])), "neighbour": lambda rest: neighbour(),
           "small": lambda rest: small(int(rest[0])), "plain": lambda rest: plain(int(rest[0])),
           "mover": lambda rest: mover(rest[0], int(rest[1]))}
    if len(sys.argv) > 1 and sys.argv[1] in own:
        own[sys.argv[1]](sys.argv[2:])
        return
    options = parser.parse_args()
    left = lambda: options.limit - (time.monotonic() - BEGUN)
    intact = True
    if "speed" in options.only.split(","):
        intact = speed(options.gib, left)
    if "facts" in options.only.split(","):
        facts(left)
    raise SystemExit(0 if intact else 1)


if __name__ == "__main__":
    main()
