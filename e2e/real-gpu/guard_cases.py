"""Every way of taking memory, under the guard and without it, on a machine without a cluster.

    guard_cases.py --guard-bench PROGRAM [--library LIBRARY] [--limit BYTES] [--lanes N] [--only NAME,...]

Prints a line a claim with its numbers, and exits 0 if every claim held. The limit is that of each device. `rest` among
the names is what is charged for a process at rest.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import driver_cases
import nvml
import torch_cases

HERE = os.path.dirname(os.path.abspath(__file__))
MIB = 1 << 20
# What the driver takes for a process by itself beside a context: modules that are loaded when they are
# first used, and workspaces. Measured 92 MiB for a process that multiplies matrices.
GROWTH = 160 * MIB
# The same for processes that talk to each other: the kernels of the library that they do it by, which no call
# shows. Two ranks of NCCL were seen 448 MiB apart each, one alone 262 MiB, and one of gloo 162 MiB.
TALKING = 512 * MIB


class Runs:
    """Runs programs with the guard and without."""

    def __init__(self, arguments, folder):
        self.arguments, self.folder = arguments, folder

    def serve(self, state):
        arguments = self.arguments
        command = [arguments.guard_bench, "serve", "--limit", str(arguments.limit), "--state", state]
        return [*command, *(["--library", arguments.library] if arguments.library else []), "--"]

    def run(self, script, case, guarded):
        """What a case says, what was charged in the end, and what its ranks held when they rested, if it has some."""
        state = os.path.join(self.folder, f"{script}-{case}.json")
        command = [sys.executable, os.path.join(HERE, script), case]
        ranks, resting, pairs = torch_cases.RANKS.get(case, 0), None, []
        if guarded:
            command = [*self.serve(state), *command, "--quota", str(self.arguments.limit)]
            if ranks:
                resting = tempfile.mkdtemp(dir=self.folder)
                command += ["--rest", resting]
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            with subprocess.Popen(command, stdout=out, stderr=errors, text=True) as process:
                try:
                    if resting:
                        pairs = rests(process, resting, ranks, state)
                    process.wait(300)
                except BaseException:
                    process.kill()
                    raise
            out.seek(0)
            errors.seek(0)
            printed, said = out.read(), errors.read()
        lines = [line for line in printed.splitlines() if line.startswith("{")]
        if process.returncode != 0 or not lines:
            said = " | ".join((said or printed).strip().splitlines()[-3:])
            raise RuntimeError(f"{'with' if guarded else 'without'} the guard it ended with {process.returncode}: {said}")
        charged = None
        if guarded:
            with open(state, encoding="utf-8") as file:
                charged = json.load(file)
        return json.loads(lines[-1]), charged, pairs


def claim(holds, what, numbers):
    print(f"{'ok  ' if holds else 'FAIL'}  {what:<42} {numbers}", flush=True)
    return bool(holds)


def drift(state, reader):
    """What each process has charged on each device, and what the driver says that it holds there: `(device, charged,
    held)` for whatever is not nothing by both."""
    with open(state, encoding="utf-8") as file:
        processes = json.load(file)["processes"]
    pairs = []
    for device in range(len(reader.devices)):
        listed = reader.settled(device).processes
        for pid, charged in processes.items():
            if len(charged) != len(reader.devices):
                raise RuntimeError(f"{len(charged)} devices are charged, NVML has {len(reader.devices)}: unset "
                                   "CUDA_VISIBLE_DEVICES")
            pair = (device, charged[device], listed.get(int(pid)) or 0)
            if any(pair[1:]):
                pairs.append(pair)
    return pairs


def rests(process, folder, ranks, state):
    """The same of a case once all its ranks rest; then they go on. Nothing of one that ended before."""
    end = time.monotonic() + 120
    while len(os.listdir(folder)) < ranks:
        if process.poll() is not None:
            return []
        if time.monotonic() > end:
            raise RuntimeError(f"{len(os.listdir(folder))} of {ranks} ranks came to rest")
        time.sleep(0.05)
    time.sleep(0.5)  # the state is written every 50 ms
    pairs = drift(state, nvml.Nvml())
    with open(os.path.join(folder, "go"), "w", encoding="utf-8"):
        pass
    return pairs


def apart(pairs, bound=GROWTH):
    """Whether charges and the driver's numbers are near each other, and both in words."""
    numbers = "; ".join(f"GPU {device}: charged {charged / MIB:.1f} MiB, the driver says {held / MIB:.1f}"
                        for device, charged, held in pairs)
    return bool(pairs) and all(abs(charged - held) <= bound for _, charged, held in pairs), numbers


def compare(runs, script, case):
    without, _, _ = runs.run(script, case, False)
    under, charged, pairs = runs.run(script, case, True)
    holds, numbers = torch_cases.judge(case, without, under, runs.arguments.limit)
    if holds is None:
        return None, numbers
    left = sum(charged["charged"])
    if left or charged["joined"] == 0:
        holds, numbers = False, f"{charged['joined']} processes connected, {left} bytes left charged; {numbers}"
    if case in torch_cases.RANKS:
        near, said = apart(pairs, TALKING)
        if not near:
            holds, said = False, f"more than {TALKING // MIB} MiB apart at rest: {said or 'nobody holds anything'}"
        devices = {device for device, used, _ in pairs if used}
        wanted = set(range(torch_cases.RANKS[case])) if "nccl" in case else {0}
        if devices != wanted:
            holds, said = False, f"charged on the devices {sorted(devices)}, not {sorted(wanted)}; {said}"
        numbers = f"{numbers}; {said}"
    return holds, numbers


def at_rest(runs, limit):
    """What a process at rest has charged against what the driver says that it holds."""
    control, state = tempfile.mkdtemp(dir=runs.folder), os.path.join(runs.folder, "rest.json")
    with open(os.path.join(control, "target.json"), "w", encoding="utf-8") as file:
        json.dump({"bytes": limit // 4, "bytesPerSecond": limit}, file)
    command = [*runs.serve(state), sys.executable, os.path.join(HERE, "workload.py"), "run", control]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                with open(os.path.join(control, "state.json"), encoding="utf-8") as file:
                    if json.load(file)["reached"]:
                        break
            except (OSError, ValueError):
                pass
            time.sleep(0.1)
        else:
            raise RuntimeError("it did not take its memory")
        time.sleep(0.5)
        near, numbers = apart(drift(state, nvml.Nvml()))
        return near, numbers or "nobody holds anything"
    finally:
        process.terminate()
        process.wait(20)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--guard-bench", required=True)
    parser.add_argument("--library")
    parser.add_argument("--limit", type=int, default=16 << 30)
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--only")
    parser.add_argument("--no-torch", action="store_true")
    arguments = parser.parse_args()
    cases = [("driver_cases.py", case) for case in driver_cases.CASES]
    if not arguments.no_torch:
        cases += [("torch_cases.py", case) for case in torch_cases.CASES]
    resting = not arguments.no_torch
    if arguments.only:
        wanted = arguments.only.split(",")
        known = [case for _, case in cases] + ["rest"]
        if set(wanted) - set(known):
            parser.error(f"no case {', '.join(sorted(set(wanted) - set(known)))}: there are {', '.join(known)}")
        cases = [(script, case) for script, case in cases if case in wanted]
        resting = resting and "rest" in wanted
    # As NVML numbers the devices.
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    held = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.lanes) as lanes:
        runs = Runs(arguments, folder)
        futures = [(f"{script.split('_')[0]}: {case}", lanes.submit(compare, runs, script, case)) for script, case in cases]
        for what, future in futures:
            try:
                holds, numbers = future.result()
            except (RuntimeError, OSError, LookupError, ValueError, subprocess.SubprocessError) as error:
                holds, numbers = False, f"{type(error).__name__}: {error}"
            if holds is None:
                print(f"      {what:<42} not run: {numbers}", flush=True)
            else:
                held.append(claim(holds, what, numbers))
        if resting:
            try:
                holds, numbers = at_rest(runs, arguments.limit)
                held.append(claim(holds, "at rest: charged and held, 160 MiB apart", numbers))
            except (RuntimeError, OSError, ValueError) as error:
                held.append(claim(False, "at rest", f"{type(error).__name__}: {error}"))
    print(f"guard_cases: {sum(held)} of {len(held)} claims hold")
    sys.exit(0 if held and all(held) else 1)


if __name__ == "__main__":
    main()
