"""Ways of taking memory from the driver itself. Prints a line of JSON for each thing that is known.

    driver_cases.py CASE [--quota BYTES]   takes memory in one way; with a quota until it is refused, and goes on then
    driver_cases.py --list
    driver_cases.py take BYTES PIECE       takes so much in such pieces, says how long each took, and holds it
    driver_cases.py watch                  says what the device seems to have, whenever that changes
"""

import argparse
import ctypes
import json
import statistics
import time

MIB = 1 << 20
OUT_OF_MEMORY = 2
SIZE, POINTER = ctypes.c_size_t, ctypes.c_ulonglong


class Properties(ctypes.Structure):
    """CUmemAllocationProp: pinned memory of the first device"""

    _fields_ = [("kind", ctypes.c_int), ("handle_types", ctypes.c_int), ("location_kind", ctypes.c_int),
                ("location", ctypes.c_int), ("win32", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8)]


class ArrayShape(ctypes.Structure):
    """CUDA_ARRAY_DESCRIPTOR"""

    _fields_ = [("width", SIZE), ("height", SIZE), ("format", ctypes.c_int), ("channels", ctypes.c_uint)]


class Refused(Exception):
    """The driver did not do what it was asked for."""

    def __init__(self, name, code):
        super().__init__(f"{name}: CUDA error {code}")
        self.code = code


class Driver:
    """The driver's library, as a program finds it."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        self.context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0)
        self.call("cuCtxSetCurrent", self.context)

    def call(self, name, *arguments):
        code = getattr(self.library, name)(*arguments)
        if code != 0:
            raise Refused(name, code)

    def memory(self):
        """Free and total, as programs are told."""
        free, total = SIZE(), SIZE()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        whole = SIZE()
        self.call("cuDeviceTotalMem_v2", ctypes.byref(whole), 0)
        return free.value, total.value, whole.value

    def allocate(self, size):
        pointer = POINTER()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), SIZE(size))
        return pointer

    def free(self, pointer):
        self.call("cuMemFree_v2", pointer)

    def pattern(self):
        """Writes to memory and reads it back; what was read. None where nothing is computed."""
        if not all(hasattr(self.library, name) for name in ("cuMemsetD8_v2", "cuMemcpyDtoH_v2")):
            return None
        pointer, back = self.allocate(4 * MIB), (ctypes.c_ubyte * (4 * MIB))()
        self.call("cuMemsetD8_v2", pointer, ctypes.c_ubyte(0x5a), SIZE(4 * MIB))
        self.call("cuMemcpyDtoH_v2", back, pointer, SIZE(4 * MIB))
        self.free(pointer)
        return sum(back)


def plain(driver, size):
    pointer = driver.allocate(size)
    return lambda: driver.free(pointer)


def pitch(driver, size):
    pointer, rows = POINTER(), SIZE()
    driver.call("cuMemAllocPitch_v2", ctypes.byref(pointer), ctypes.byref(rows), SIZE(MIB), SIZE(size // MIB), 16)
    return lambda: driver.free(pointer)


def managed(driver, size):
    pointer = POINTER()
    driver.call("cuMemAllocManaged", ctypes.byref(pointer), SIZE(size), 1)
    return lambda: driver.free(pointer)


def virtual(driver, size):
    """Created, mapped, and its handle released: the mapping alone keeps the memory."""
    handle, address = POINTER(), POINTER()
    properties = Properties(kind=1, location_kind=1, location=0)
    driver.call("cuMemCreate", ctypes.byref(handle), SIZE(size), ctypes.byref(properties), POINTER(0))
    driver.call("cuMemAddressReserve", ctypes.byref(address), SIZE(size), SIZE(0), POINTER(0), POINTER(0))
    driver.call("cuMemMap", address, SIZE(size), SIZE(0), handle, POINTER(0))
    driver.call("cuMemRelease", handle)

    def undo():
        driver.call("cuMemUnmap", address, SIZE(size))
        driver.call("cuMemAddressFree", address, SIZE(size))

    return undo


def created(driver, size):
    """Created and nothing more."""
    handle = POINTER()
    properties = Properties(kind=1, location_kind=1, location=0)
    driver.call("cuMemCreate", ctypes.byref(handle), SIZE(size), ctypes.byref(properties), POINTER(0))
    return lambda: driver.call("cuMemRelease", handle)


def ordered(driver, size):
    """From the default pool, in the order of a stream."""
    pointer = POINTER()
    driver.call("cuMemAllocAsync", ctypes.byref(pointer), SIZE(size), None)
    driver.call("cuStreamSynchronize", None)

    def undo():
        driver.call("cuMemFreeAsync", pointer, None)
        driver.call("cuStreamSynchronize", None)

    return undo


def array(driver, size):
    handle = ctypes.c_void_p()
    shape = ArrayShape(width=4096, height=size // (4096 * 16), format=0x20, channels=4)
    driver.call("cuArrayCreate_v2", ctypes.byref(handle), ctypes.byref(shape))
    return lambda: driver.call("cuArrayDestroy", handle)


CASES = {function.__name__: function for function in (plain, pitch, managed, virtual, created, ordered, array)}


def say(**what):
    print(json.dumps({"at": time.monotonic(), **what}), flush=True)


def run(name, quota):
    driver, take, step = Driver(), CASES[name], 256 * MIB
    result, (free, total, whole) = driver.pattern(), driver.memory()
    answer = {"case": name, "result": result, "total": total, "total_of_device": whole, "free_at_first": free}
    undo = [take(driver, step) for _ in range(2)]
    if quota is not None:
        refused = None
        try:
            while len(undo) * step < 4 * quota:
                undo.append(take(driver, step))
        except Refused as error:
            refused = error.code
        answer.update(refused=refused, held_at_refusal=len(undo) * step)
    for one in undo:
        one()
    again = take(driver, step)
    answer["goes_on"] = driver.pattern() == result
    again()
    say(**answer)


def take(size, piece):
    begun = time.monotonic()
    driver = Driver()
    context, taken, times = time.monotonic() - begun, 0, []
    try:
        while taken < size:
            at = time.monotonic()
            driver.allocate(min(piece, size - taken))
            times.append((time.monotonic() - at) * 1e3)
            taken += min(piece, size - taken)
        code = 0
    except Refused as error:
        code = error.code
    times.sort()
    say(taken=taken, code=code, context_ms=context * 1e3, all_ms=sum(times),
        median_ms=statistics.median(times) if times else None, worst_ms=times[-1] if times else None,
        p90_ms=times[int(0.9 * (len(times) - 1))] if times else None, pieces=len(times))
    while True:
        time.sleep(60)


def watch():
    driver, last = Driver(), None
    while True:
        _, total, whole = driver.memory()
        if (total, whole) != last:
            last = (total, whole)
            say(total=total, total_of_device=whole)
        time.sleep(0.005)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("case", nargs="?", choices=[*CASES, "take", "watch"])
    parser.add_argument("sizes", nargs="*", type=int)
    parser.add_argument("--quota", type=int)
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    if arguments.list or not arguments.case:
        print("\n".join(CASES))
    elif arguments.case == "take":
        take(*arguments.sizes)
    elif arguments.case == "watch":
        watch()
    else:
        run(arguments.case, arguments.quota)


if __name__ == "__main__":
    main()
