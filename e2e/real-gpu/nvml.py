"""An independent reader of NVML: ctypes on the driver's library, sharing no code with the product.

    python3 nvml.py path     the driver's libnvidia-ml.so.1
    python3 nvml.py          what the devices hold now
"""

import ctypes
import glob
import os
import subprocess
import sys
import time
from dataclasses import dataclass

NAME = "libnvidia-ml.so.1"
MISSING = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE
TOO_SMALL = 7  # NVML_ERROR_INSUFFICIENT_SIZE


def library_path():
    """Where the driver's library lies on this machine."""
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    try:
        listed = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    except OSError:
        listed = ""
    folders += [os.path.dirname(line.split("=> ")[1]) for line in listed.splitlines()
                if NAME in line and "x86-64" in line and "=> " in line]
    folders += ["/usr/local/nvidia/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib"]
    for folder in filter(None, folders):
        path = os.path.join(folder, NAME)
        if os.path.exists(path):
            return path
    raise SystemExit(f"{NAME} is not on this machine: install the NVIDIA driver")


class _Memory(ctypes.Structure):
    """nvmlMemory_v2_t"""

    _fields_ = [("version", ctypes.c_uint)] + [
        (name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")]


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t of version 2 and 3"""

    _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong),
                ("gpu_instance", ctypes.c_uint), ("compute_instance", ctypes.c_uint)]


@dataclass(frozen=True)
class Sample:
    """One device at one moment. Bytes; `at` is time.monotonic()."""

    at: float
    total: int
    reserved: int
    free: int
    used: int
    processes: dict  # pid -> bytes, None where the driver does not say


class Nvml:
    """The driver's library, opened."""

    def __init__(self, path=None):
        self.lib = ctypes.CDLL(path or library_path())
        self._call("nvmlInit_v2")
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        self.devices = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
            self.devices.append(handle)
        self.buffer = (_Process * 256)()

    def _call(self, name, *arguments, allowed=()):
        code = getattr(self.lib, name)(*arguments)
        if code != 0 and code not in allowed:
            raise RuntimeError(f"{name} failed with NVML error {code}")
        return code

    def _text(self, name, *before):
        buffer = ctypes.create_string_buffer(96)
        self._call(name, *before, buffer, ctypes.c_uint(96))
        return buffer.value.decode()

    def driver(self):
        return self._text("nvmlSystemGetDriverVersion")

    def product(self, device=0):
        return self._text("nvmlDeviceGetName", self.devices[device])

    def uuid(self, device=0):
        return self._text("nvmlDeviceGetUUID", self.devices[device])

    def memory(self, device=0):
        memory = _Memory(version=ctypes.sizeof(_Memory) | (2 << 24))
        self._call("nvmlDeviceGetMemoryInfo_v2", self.devices[device], ctypes.byref(memory))
        return memory

    def processes(self, device=0):
        """PID -> bytes over the compute, graphics and MPS lists, each process once."""
        found = {}
        for function in ("nvmlDeviceGetComputeRunningProcesses_v3",
                         "nvmlDeviceGetGraphicsRunningProcesses_v3",
                         "nvmlDeviceGetMPSComputeRunningProcesses_v3"):
            while True:
                count = ctypes.c_uint(len(self.buffer))
                code = self._call(function, self.devices[device], ctypes.byref(count), self.buffer,
                                  allowed=(3, TOO_SMALL))
                if code != TOO_SMALL:
                    break
                self.buffer = (_Process * (count.value + 64))()
            if code == 3:  # not supported here
                continue
            for entry in self.buffer[:count.value]:
                used = None if entry.used == MISSING else entry.used
                before = found.get(entry.pid)
                found[entry.pid] = used if before is None else max(before, used or 0)
        return found

    def sample(self, device=0):
        processes = self.processes(device)
        memory = self.memory(device)
        return Sample(time.monotonic(), memory.total, memory.reserved, memory.free, memory.used, processes)

    def settled(self, device=0, attempts=200):
        """A sample in which memory did not move while the processes were listed."""
        for _ in range(attempts):
            before = self.memory(device).used
            sample = self.sample(device)
            if before == sample.used:
                return sample
        return sample


def device_nodes():
    """The driver's device files."""
    return sorted(path for path in glob.glob("/dev/nvidia*") if not os.path.isdir(path))


def main():
    if sys.argv[1:] == ["path"]:
        print(library_path())
        return
    nvml = Nvml()
    print(f"driver {nvml.driver()}")
    for device in range(len(nvml.devices)):
        sample = nvml.sample(device)
        print(f"{device} {nvml.product(device)} {nvml.uuid(device)} total {sample.total >> 20} MiB, "
              f"used {sample.used >> 20} MiB, reserved {sample.reserved >> 20} MiB, processes {sample.processes}")


if __name__ == "__main__":
    main()
