"""Every way of taking memory, under the guard and without it, on a machine without a cluster.

    guard_cases.py --guard-bench PROGRAM [--library LIBRARY] [--limit BYTES] [--lanes N] [--only NAME,...]

Prints a line a claim with its numbers, and exits 0 if every claim held.
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


class Runs:
    """Runs programs with the guard and without."""

    def __init__(self, arguments, folder):
        self.arguments, self.folder = arguments, folder

    def serve(self, state):
        arguments = self.arguments
        command = [arguments.guard_bench, "serve", "--limit", str(arguments.limit), "--state", state]
        return [*command, *(["--library", arguments.library] if arguments.library else []), "--"]

    def run(self, script, case, guarded):
        """What a case says, and what was charged in the end."""
        state = os.path.join(self.folder, f"{script}-{case}.json")
        command = [sys.executable, os.path.join(HERE, script), case]
        if guarded:
            command = [*self.serve(state), *command, "--quota", str(self.arguments.limit)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode != 0 or not lines:
            said = " | ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
            raise RuntimeError(f"{'with' if guarded else 'without'} the guard it ended with {done.returncode}: {said}")
        charged = None
        if guarded:
            with open(state, encoding="utf-8") as file:
                charged = json.load(file)
        return json.loads(lines[-1]), charged


def claim(holds, what, numbers):
    print(f"{'ok  ' if holds else 'FAIL'}  {what:<42} {numbers}", flush=True)
    return bool(holds)


def compare(runs, script, case):
    without, _ = runs.run(script, case, False)
    under, charged = runs.run(script, case, True)
    holds, numbers = torch_cases.judge(case, without, under, runs.arguments.limit)
    if holds is None:
        return None, numbers
    left = sum(charged["charged"])
    if left or charged["joined"] == 0:
        holds, numbers = False, f"{charged['joined']} processes connected, {left} bytes left charged; {numbers}"
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
        with open(state, encoding="utf-8") as file:
            charged = {int(pid): held[0] for pid, held in json.load(file)["processes"].items()}
        listed = nvml.Nvml().settled().processes
        pairs = [(held, listed[pid]) for pid, held in charged.items() if pid in listed]
        worst = max((abs(held - used) for held, used in pairs), default=None)
        return worst is not None and worst <= GROWTH, "; ".join(
            f"charged {held / MIB:.1f} MiB, the driver says {used / MIB:.1f}" for held, used in pairs) or \
            f"none of {list(charged)} is listed"
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
    if arguments.only:
        cases = [(script, case) for script, case in cases if case in arguments.only.split(",")]
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
        if not arguments.no_torch and not arguments.only:
            try:
                holds, numbers = at_rest(runs, arguments.limit)
                held.append(claim(holds, "at rest: charged and held, 160 MiB apart", numbers))
            except (RuntimeError, OSError, ValueError) as error:
                held.append(claim(False, "at rest", f"{type(error).__name__}: {error}"))
    print(f"guard_cases: {sum(held)} of {len(held)} claims hold")
    sys.exit(0 if held and all(held) else 1)


if __name__ == "__main__":
    main()
