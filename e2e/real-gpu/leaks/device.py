"""Where programs take memory: PyTorch and the driver of a GPU, or, to try them without one, PyTorch on the processor, or a
simulated driver without PyTorch."""

import ctypes
import mmap
import re
import types

import variants

SIZE, POINTER = ctypes.c_size_t, ctypes.c_ulonglong
READ_MOSTLY = ATTACH_GLOBAL = 1


class Refused(Exception):
    """The driver did not do what it was asked for."""

    def __init__(self, name, code):
        super().__init__(f"{name}: CUDA error {code}")
        self.code = code


class Properties(ctypes.Structure):
    """CUmemAllocationProp: pinned memory of the first device"""

    _fields_ = [("kind", ctypes.c_int), ("handle_types", ctypes.c_int), ("location_kind", ctypes.c_int),
                ("location", ctypes.c_int), ("win32", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8)]


class Cuda:
    """The first GPU. Sizes are in MiB of `unit` bytes; a layer is `row` floats wide."""

    unit, row, name = 1 << 20, 1024, "cuda"

    def __init__(self):
        import torch
        self.torch, self.unlisted = torch, 0.0
        self.first = torch.ones(1, device="cuda")
        torch.cuda.synchronize()
        # As a device of that size would do: give back what is cached first, then refuse.
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((variants.CAPACITY - variants.CONTEXT) * self.unit / total)
        self.driver, self.runtime = ctypes.CDLL("libcuda.so.1"), None
        self.host = []

    def call(self, name, *arguments):
        code = getattr(self.driver, name)(*arguments)
        if code != 0:
            raise Refused(name, code)

    def tensor(self, size):
        return self.torch.full((max(int(size * self.unit), 1),), 1, dtype=self.torch.uint8, device="cuda")

    def settle(self):
        self.torch.cuda.synchronize()

    def trim(self):
        self.torch.cuda.empty_cache()

    def numbers(self):
        """What the framework says it has allocated and reserved, in bytes."""
        return self.torch.cuda.memory_allocated(), self.torch.cuda.memory_reserved()

    def capture(self, work):
        """A CUDA graph of `work`; what replays it, and what the graph returns."""
        side = self.torch.cuda.Stream()
        side.wait_stream(self.torch.cuda.current_stream())
        with self.torch.cuda.stream(side):
            work()
        self.torch.cuda.current_stream().wait_stream(side)
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            out = work()
        return graph.replay, out, graph

    def raw(self, how, size):
        """Takes memory that nobody will free, outside of the framework."""
        getattr(self, f"_{how}")(int(size * self.unit))

    def _plain(self, count):
        pointer = POINTER()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), SIZE(count))
        self.call("cuMemsetD8_v2", pointer, ctypes.c_ubyte(1), SIZE(count))

    def _runtime(self, count):
        self.runtime = self.runtime or runtime()
        pointer = ctypes.c_void_p()
        code = self.runtime.cudaMalloc(ctypes.byref(pointer), SIZE(count))
        if code != 0:
            raise Refused("cudaMalloc", code)

    def _pitch(self, count):
        pointer, pitch = POINTER(), SIZE()
        rows = max(count >> 20, 1)
        self.call("cuMemAllocPitch_v2", ctypes.byref(pointer), ctypes.byref(pitch), SIZE(1 << 20), SIZE(rows), 16)

    def _virtual(self, count):
        count = (count + (2 << 20) - 1) // (2 << 20) * (2 << 20)
        handle, address = POINTER(), POINTER()
        properties = Properties(kind=1, location_kind=1, location=0)
        self.call("cuMemCreate", ctypes.byref(handle), SIZE(count), ctypes.byref(properties), POINTER(0))
        self.call("cuMemAddressReserve", ctypes.byref(address), SIZE(count), SIZE(0), POINTER(0), POINTER(0))
        self.call("cuMemMap", address, SIZE(count), SIZE(0), handle, POINTER(0))
        self.call("cuMemRelease", handle)

    def _ordered(self, count):
        pointer = POINTER()
        self.call("cuMemAllocAsync", ctypes.byref(pointer), SIZE(count), None)
        self.call("cuMemsetD8Async", pointer, ctypes.c_ubyte(1), SIZE(count), None)

    def _managed_memory(self, count):
        pointer = POINTER()
        self.call("cuMemAllocManaged", ctypes.byref(pointer), SIZE(count), ctypes.c_uint(ATTACH_GLOBAL))
        # No process list shows it.
        self.unlisted += count
        return pointer

    def _managed(self, count):
        """Touched by the device alone."""
        self.call("cuMemsetD8_v2", self._managed_memory(count), ctypes.c_ubyte(1), SIZE(count))

    def _managed_host(self, count):
        """The first half touched by the processor, the second by the device."""
        pointer, half = self._managed_memory(count), count // 2
        ctypes.memset(pointer.value, 1, half)
        self.call("cuMemsetD8_v2", POINTER(pointer.value + half), ctypes.c_ubyte(1), SIZE(count - half))

    def _managed_both(self, count):
        """Read by both, so that both have a copy."""
        pointer = self._managed_memory(count)
        ctypes.memset(pointer.value, 1, count)
        self.call("cuMemAdvise", pointer, SIZE(count), ctypes.c_int(READ_MOSTLY), ctypes.c_int(0))
        self.call("cuMemPrefetchAsync", pointer, SIZE(count), ctypes.c_int(0), None)
        self.call("cuCtxSynchronize")

    def _pinned_pair(self, count):
        """A staging buffer and its twin on the device."""
        self._plain(count)
        pointer = ctypes.c_void_p()
        self.call("cuMemHostAlloc", ctypes.byref(pointer), SIZE(count), ctypes.c_uint(0))
        ctypes.memset(pointer.value, 1, count)

    def _host_pair(self, count):
        """A copy on the host of what is on the device."""
        self._plain(count)
        self.host.append(self.torch.ones(count, dtype=self.torch.uint8))


class Pretended:
    """The processor in place of a GPU: a sixteenth of every size, and its own memory stands for the device's."""

    unit, row, name = 1 << 16, 128, "cpu"

    def __init__(self):
        import torch
        torch.set_num_threads(1)
        self.torch, self.unlisted, self.outside, self.maps = torch, 0.0, 0, []
        self.before = resident()

    def tensor(self, size):
        return self.torch.full((max(int(size * self.unit), 1),), 1, dtype=self.torch.uint8)

    def settle(self):
        pass

    def trim(self):
        pass

    def numbers(self):
        held = max(resident() - self.before - self.outside, 0)
        return held, held

    def capture(self, work):
        return work, work(), None

    def raw(self, how, size):
        getattr(Cuda, f"_{how}")  # a call that the real one lacks shows here as well
        count = int(size * self.unit)
        if how.startswith("managed"):
            self.unlisted += count
        held = mmap.mmap(-1, max(count, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for at in range(0, len(held), mmap.PAGESIZE):
            held[at] = 1
        self.maps.append(held)
        self.outside += count


class Piece:
    """Memory of the simulated driver, in place of a tensor. Nothing is computed there."""

    def __init__(self, device, count):
        self.device, self.count, self.pointer = device, 0, POINTER()
        device.call("cuMemAlloc_v2", ctypes.byref(self.pointer), SIZE(count))
        self.count = count
        device.held += count

    def __del__(self):
        if self.count:
            self.device.held -= self.count
            self.device.call("cuMemFree_v2", self.pointer)

    def numel(self):
        return self.count

    def clone(self):
        return Piece(self.device, self.count)

    def __mul__(self, _):
        return self.clone()

    def __getitem__(self, _):
        return self

    def add_(self, _):
        return self

    copy_ = add_


class Simulated:
    """A simulated driver. Its framework gives back at once what is not used, and knows no gradients."""

    unit, row, name = 1 << 20, 1024, "simulated"

    def __init__(self):
        self.torch, self.driver = types.SimpleNamespace(cuda=None), ctypes.CDLL("libcuda.so.1")
        self.held, self.unlisted, self.outside = 0, 0.0, []
        context = ctypes.c_void_p()
        self.call("cuInit", ctypes.c_uint(0))
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(0))
        self.call("cuCtxSetCurrent", context)

    call = Cuda.call

    def tensor(self, size):
        return Piece(self, max(int(size * self.unit), 1))

    def settle(self):
        pass

    trim = settle

    def numbers(self):
        return self.held, self.held

    def capture(self, work):
        return self.settle, work(), None

    def raw(self, how, size):
        getattr(Cuda, f"_{how}")  # a call that the real one lacks shows here as well
        self.outside.append(POINTER())
        self.call("cuMemAlloc_v2", ctypes.byref(self.outside[-1]), SIZE(int(size * self.unit)))


def resident():
    """Anonymous memory of this process in bytes."""
    with open("/proc/self/status", encoding="utf-8") as file:
        return int(re.search(r"RssAnon:\s+(\d+) kB", file.read()).group(1)) * 1024


def runtime():
    """The runtime library that PyTorch brings."""
    with open("/proc/self/maps", encoding="utf-8") as file:
        found = re.search(r"(/\S*libcudart\.so\S*)", file.read())
    return ctypes.CDLL(found.group(1) if found else "libcudart.so")


DEVICES = {"cuda": Cuda, "cpu": Pretended, "simulated": Simulated}
