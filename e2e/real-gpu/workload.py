"""What runs in the pods: a process with a CUDA context that holds as much memory as it is told.

    workload.py run FOLDER [--backend torch|driver] [--ignore-sigterm]
        FOLDER/target.json {"bytes": N, "bytesPerSecond": N} is followed upwards, never downwards;
        FOLDER/state.json says what is held
    workload.py needs [--backend torch|driver]
        prints as JSON what of this machine the same run needs in a pod
"""

import argparse
import ctypes
import json
import os
import re
import signal
import sys
import sysconfig
import time

CHUNK = 16 << 20
# What the device plugin brings into a pod, so that it must not be copied.
DRIVER = re.compile(r"lib(cuda|nvcuvid|nvidia-[^/]*)\.so|lib(gpusim)")


class Torch:
    """Memory through PyTorch's caching allocator."""

    def __init__(self):
        import torch
        self.torch = torch
        self.held = [torch.ones(1, device="cuda")]
        torch.cuda.synchronize()

    def allocate(self, size):
        self.held.append(self.torch.full((size,), 1, dtype=self.torch.uint8, device="cuda"))

    def touch(self):
        """Work on what is held, so that a broken device would show."""
        assert int(self.held[-1].sum(dtype=self.torch.int64)) == self.held[-1].numel()
        self.torch.cuda.synchronize()


class Driver:
    """Memory through the driver itself, where PyTorch is not at hand."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        context, device = ctypes.c_void_p(), ctypes.c_int()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self._call("cuCtxCreate_v2", ctypes.byref(context), ctypes.c_uint(0), device)

    def _call(self, name, *arguments):
        code = getattr(self.cuda, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name} failed with CUDA error {code}")

    def allocate(self, size):
        pointer = ctypes.c_ulonglong()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))

    def touch(self):
        self._call("cuCtxSynchronize")


BACKENDS = {"torch": Torch, "driver": Driver}


def write(path, value):
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.rename(path + ".new", path)


def read_target(folder):
    try:
        with open(os.path.join(folder, "target.json"), encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return {"bytes": 0, "bytesPerSecond": 0}


def run(folder, backend, ignore_sigterm):
    signal.signal(signal.SIGTERM, signal.SIG_IGN if ignore_sigterm else lambda *_: sys.exit(0))
    memory = BACKENDS[backend]()
    held, turn, credit, before = 0, 0, 0.0, time.monotonic()
    while True:
        target = read_target(folder)
        now = time.monotonic()
        credit = min(credit + (now - before) * target["bytesPerSecond"], 64 * CHUNK)
        before = now
        while held + CHUNK <= target["bytes"] and credit >= CHUNK:
            memory.allocate(CHUNK)
            held, credit = held + CHUNK, credit - CHUNK
        if held + CHUNK > target["bytes"]:
            credit = 0.0
        turn += 1
        if turn % 20 == 1:
            memory.touch()
        write(os.path.join(folder, "state.json"), {"bytes": held, "turn": turn, "pid": os.getpid(),
                                                   "reached": held + CHUNK > target["bytes"]})
        time.sleep(0.02)


def needs(backend):
    memory = BACKENDS[backend]()
    memory.allocate(CHUNK)
    memory.touch()
    folders = {os.path.realpath(path) for path in
               [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), *sys.path[1:]]
               if path and os.path.isdir(path)}
    own = os.path.realpath(sys.base_prefix)
    if own not in ("/", "/usr", "/usr/local"):
        folders.add(own)
    # A folder inside another one comes with it.
    folders = {path for path in folders if not any(path.startswith(other + "/") for other in folders)}
    inside = tuple(path + "/" for path in folders)
    with open("/proc/self/maps", encoding="utf-8") as file:
        mapped = {line.split(None, 5)[5].rstrip("\n") for line in file if "/" in line}
    files = sorted(path for path in mapped
                   if ".so" in path and os.path.isfile(path) and not path.startswith(inside)
                   and not path.startswith("/dev/") and not DRIVER.search(path))
    executable = os.path.realpath(sys.executable)
    if not executable.startswith(inside):
        files.append(executable)
    standard = os.path.realpath(sysconfig.get_path("stdlib"))
    packages = [path for path in sys.path[1:] if os.path.isdir(path) and os.path.realpath(path) != standard
                and not os.path.realpath(path).startswith(standard + "/lib-dynload")]
    print(json.dumps({"executable": executable, "files": files, "folders": sorted(folders),
                      "packages": [os.path.realpath(path) for path in packages]}, indent=1))
    sys.stdout.flush()
    os._exit(0)  # without the clean-up of a device that nobody needs any more


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["run", "needs"])
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--backend", choices=sorted(BACKENDS), default="torch")
    parser.add_argument("--ignore-sigterm", action="store_true")
    arguments = parser.parse_args()
    if arguments.command == "needs":
        needs(arguments.backend)
    else:
        run(arguments.folder, arguments.backend, arguments.ignore_sigterm)


if __name__ == "__main__":
    main()
