#!/usr/bin/env python3
"""What the driver does with shared memory, pools and graphs: the facts that the keeper and the guard stand on.

    python3 measure.py [NAME...]     all measurements, or these

Prints one line a fact. Needs an NVIDIA driver and Linux; root for the namespaces. It takes device memory by
plain and physical allocations only, and gives all of it back.
"""

import array
import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import warnings

import nvml

CUDA = "libcuda.so.1"
MI = 1 << 20
GI = 1 << 30
POSIX_FD = 1


class Properties(ctypes.Structure):
    """CUmemAllocationProp: pinned memory of device 0, to be shared by descriptor"""

    _fields_ = [("kind", ctypes.c_int), ("handle_types", ctypes.c_int), ("location_kind", ctypes.c_int),
                ("location", ctypes.c_int), ("win32", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8)]


class PoolProperties(ctypes.Structure):
    """CUmemPoolProps"""

    _fields_ = [("kind", ctypes.c_int), ("handle_types", ctypes.c_int), ("location_kind", ctypes.c_int),
                ("location", ctypes.c_int), ("win32", ctypes.c_void_p), ("max_size", ctypes.c_size_t),
                ("rest", ctypes.c_ubyte * 56)]


class Driver:
    """libcuda, with every result code checked."""

    def __init__(self):
        folder = os.path.dirname(nvml.library_path())
        path = os.path.join(folder, CUDA)
        self.library = ctypes.CDLL(path if os.path.exists(path) else CUDA)
        self.call("cuInit", 0)

    def code(self, name, *arguments):
        return getattr(self.library, name)(*arguments)

    def call(self, name, *arguments):
        code = self.code(name, *arguments)
        if code != 0:
            raise OSError(f"{name}: error {code}")

    def context(self):
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)
        return context

    def create(self, size):
        handle = ctypes.c_ulonglong()
        properties = Properties(kind=1, handle_types=POSIX_FD, location_kind=1, location=0)
        self.call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(properties),
                  ctypes.c_ulonglong(0))
        return handle

    def export(self, handle):
        descriptor = ctypes.c_int(-1)
        self.call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, POSIX_FD, ctypes.c_ulonglong(0))
        return descriptor.value

    def load(self, descriptor):
        handle = ctypes.c_ulonglong()
        self.call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(descriptor), POSIX_FD)
        return handle

    def map(self, handle, size):
        address = ctypes.c_ulonglong()
        self.call("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_size_t(0),
                  ctypes.c_ulonglong(0), ctypes.c_ulonglong(0))
        self.call("cuMemMap", address, ctypes.c_size_t(size), ctypes.c_size_t(0), handle, ctypes.c_ulonglong(0))
        access = (ctypes.c_int * 3)(1, 0, 3)
        self.call("cuMemSetAccess", address, ctypes.c_size_t(size), ctypes.byref(access), ctypes.c_size_t(1))
        return address

    def allocate(self, size):
        pointer = ctypes.c_ulonglong()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer


def used():
    """What the driver says is in use on device 0, in MiB, and what each process holds."""
    sample = nvml.Nvml().sample(0)
    return sample.used / MI, {pid: None if b is None else b / MI for pid, b in sample.processes.items()}


def say(what, value):
    print(f"{what}: {value}", flush=True)


def send(connection, descriptors):
    for first in range(0, len(descriptors), 200):
        batch = array.array("i", descriptors[first:first + 200])
        connection.sendmsg([b"d"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, batch)])


def receive(connection, count):
    got = []
    while len(got) < count:
        _, ancillary, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(4 * 200))
        for _, _, data in ancillary:
            batch = array.array("i")
            batch.frombytes(data)
            got.extend(batch)
    return got


def child(body):
    """Runs body(connection) in a process of its own, that never saw this one's driver."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    pid = os.fork()
    if pid == 0:
        ours.close()
        status = 1
        try:
            body(theirs)
            status = 0
        except BaseException as error:  # noqa: BLE001 - a child has nobody else to tell
            print(f"  child failed: {error!r}", flush=True)
        os._exit(status)
    theirs.close()
    return pid, ours


def creator(count, size, with_context=False):
    """A process that makes chunks, sends their descriptors and goes. The descriptors."""

    def body(connection):
        driver = Driver()
        if with_context:
            driver.context()
        send(connection, [driver.export(driver.create(size)) for _ in range(count)])
        connection.recv(1)

    pid, connection = child(body)
    descriptors = receive(connection, count)
    connection.send(b"x")
    _, status = os.waitpid(pid, 0)
    if status != 0:
        raise OSError("the creator failed")
    return descriptors


def settle(expected=None, seconds=5.0):
    """Waits until the use of the device is steady (and as expected, within 8 MiB); the use in MiB."""
    last, since, end = None, time.monotonic(), time.monotonic() + seconds
    while time.monotonic() < end:
        now = used()[0]
        if last is None or abs(now - last) > 1:
            last, since = now, time.monotonic()
        steady = time.monotonic() - since > 0.3
        if steady and (expected is None or abs(now - expected) < 8):
            return now
        time.sleep(0.02)
    return used()[0]


def exec_keeps():
    """Descriptors alone, over exec and in other namespaces."""
    base = settle()
    descriptors = creator(8, 128 * MI)
    held = settle() - base
    say("8 chunks of 128 MiB, creator gone, descriptors alone hold MiB", round(held))
    for descriptor in descriptors:
        os.set_inheritable(descriptor, True)
    # A program that never saw the driver, in mount, PID, network and IPC namespaces of its own.
    command = ["unshare", "--mount", "--pid", "--net", "--ipc", "--fork", "cat"]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, close_fds=False)
    time.sleep(0.5)
    for descriptor in descriptors:
        os.close(descriptor)
    say("after exec, held by `cat` in other namespaces, MiB", round(settle() - base))
    other.stdin.close()
    other.wait()
    say("after that process ended, MiB", round(settle(base) - base))


def thousands():
    """Many descriptors in one process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    say("RLIMIT_NOFILE was", f"{soft}, raised to {hard}")
    base = settle()
    for size in (2 * MI, 64 * MI):
        count = min(8000, int(100 * GI // size))
        if hard < count + 100:
            count = max(hard - 100, 16)

        def body(connection, count=count, size=size):
            driver = Driver()
            start = time.perf_counter()
            handles = [driver.create(size) for _ in range(count)]
            made = time.perf_counter()
            out = [driver.export(handle) for handle in handles]
            exported = time.perf_counter()
            say(f"{count} chunks of {size // MI} MiB: create us each", round((made - start) / count * 1e6, 1))
            say(f"{count} chunks of {size // MI} MiB: export us each", round((exported - made) / count * 1e6, 1))
            send(connection, out)
            connection.recv(1)

        pid, connection = child(body)
        got = receive(connection, count)
        connection.send(b"x")
        start = time.perf_counter()
        os.waitpid(pid, 0)
        say(f"creator of {count} chunks exits after ms", round((time.perf_counter() - start) * 1e3, 1))
        say(f"held by {count} descriptors alone, MiB", f"{round(settle() - base)} of {count * size // MI}")
        start = time.perf_counter()
        for descriptor in got:
            os.close(descriptor)
        say(f"closing {count} descriptors, us each", round((time.perf_counter() - start) / count * 1e6, 1))
        say("left after closing, MiB", round(settle(base) - base))


def importers():
    """One descriptor, several importers: who is charged, and when the memory goes."""
    base = settle()
    size = 2 * GI
    (descriptor,) = creator(1, size)

    def body(connection, with_context):
        (mine,) = receive(connection, 1)
        driver = Driver()
        if with_context:
            driver.context()
        handle = driver.load(mine)
        os.close(mine)
        if with_context:
            driver.map(handle, size)
        connection.send(b"r")
        connection.recv(1)

    people = []
    for with_context in (True, True, False):
        pid, connection = child(lambda c, w=with_context: body(c, w))
        send(connection, [descriptor])
        connection.recv(1)
        people.append((pid, connection, with_context))
    now, listed = used()
    say("three importers of one 2 GiB chunk (two mapped, one without context): device used MiB", round(now - base))
    for pid, _, with_context in people:
        say(f"  importer {'with' if with_context else 'without'} context is charged MiB", listed.get(pid, "not listed"))
    os.close(descriptor)
    say("descriptor closed: MiB", round(settle() - base))
    for index, (pid, connection, _) in enumerate(people):
        connection.send(b"x")
        os.waitpid(pid, 0)
        say(f"importer {index} gone: device used MiB", round(settle() - base))


def lists():
    """Which NVML calls show memory made without a context."""
    base = settle()

    def body(connection):
        driver = Driver()
        handles = [driver.create(1 * GI) for _ in range(3)]
        connection.send(b"r")
        connection.recv(1)
        del handles

    pid, connection = child(body)
    connection.recv(1)
    say("3 GiB made without a context: device used MiB", round(settle() - base))
    library = ctypes.CDLL(nvml.library_path())
    library.nvmlInit_v2()
    device = ctypes.c_void_p()
    library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device))
    for name in ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3",
                 "nvmlDeviceGetMPSComputeRunningProcesses_v3"):
        count = ctypes.c_uint(64)
        buffer = (ctypes.c_ubyte * (64 * 32))()
        code = getattr(library, name)(device, ctypes.byref(count), buffer)
        say(f"  {name}", f"code {code}, {count.value} processes")

    class Detail(ctypes.Structure):
        _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("gi", ctypes.c_uint), ("ci", ctypes.c_uint),
                    ("protected", ctypes.c_ulonglong)]

    class Details(ctypes.Structure):
        _fields_ = [("version", ctypes.c_uint), ("mode", ctypes.c_uint), ("count", ctypes.c_uint),
                    ("array", ctypes.c_void_p)]

    for mode, label in ((0, "compute"), (1, "graphics"), (2, "mps")):
        entries = (Detail * 64)()
        details = Details(version=ctypes.sizeof(Details) | (1 << 24), mode=mode, count=64,
                          array=ctypes.cast(entries, ctypes.c_void_p))
        code = library.nvmlDeviceGetRunningProcessDetailList(device, ctypes.byref(details))
        pids = [entries[i].pid for i in range(min(details.count, 64))] if code == 0 else []
        say(f"  nvmlDeviceGetRunningProcessDetailList {label}", f"code {code}, shows it: {pid in pids}")
    count = ctypes.c_uint(100)
    samples = (ctypes.c_ubyte * (100 * 64))()
    code = library.nvmlDeviceGetProcessUtilization(device, samples, ctypes.byref(count), ctypes.c_ulonglong(0))
    say("  nvmlDeviceGetProcessUtilization", f"code {code}, {count.value if code == 0 else 0} samples")
    mode = ctypes.c_uint()
    code = library.nvmlDeviceGetAccountingMode(device, ctypes.byref(mode))
    say("  nvmlDeviceGetAccountingMode", f"code {code}, enabled {mode.value}")
    links = []
    for entry in os.listdir(f"/proc/{pid}/fd"):
        try:
            links.append(os.readlink(f"/proc/{pid}/fd/{entry}"))
        except OSError:
            continue
    say("  its open devices", sorted({link for link in links if "nvidia" in link}))
    connection.send(b"x")
    os.waitpid(pid, 0)
    settle(base)


def pools():
    """What stream-ordered pools reserve."""
    base = settle()

    def body(connection):
        driver = Driver()
        driver.context()
        pool = ctypes.c_void_p()
        driver.call("cuDeviceGetDefaultMemPool", ctypes.byref(pool), 0)

        def attribute(number):
            value = ctypes.c_ulonglong()
            driver.call("cuMemPoolGetAttribute", pool, number, ctypes.byref(value))
            return value.value / MI

        def report(what):
            say(f"  {what}: reserved MiB, used MiB", (attribute(5), attribute(7)))

        report("default pool at first")
        taken = []
        for size in (1, 4 * MI, 64 * MI, 100 * MI):
            pointer = ctypes.c_ulonglong()
            driver.call("cuMemAllocAsync", ctypes.byref(pointer), ctypes.c_size_t(size), None)
            taken.append(pointer)
            report(f"after cuMemAllocAsync of {size} bytes")
        for pointer in taken:
            driver.call("cuMemFreeAsync", pointer, None)
        report("after freeing all")
        driver.call("cuStreamSynchronize", None)
        report("after a synchronisation")
        driver.call("cuMemPoolTrimTo", pool, ctypes.c_size_t(0))
        report("after a trim to 0")
        # Graph memory nodes.
        graph = ctypes.c_void_p()
        driver.call("cuGraphCreate", ctypes.byref(graph), 0)

        class Node(ctypes.Structure):
            _fields_ = [("pool", PoolProperties), ("access", ctypes.c_void_p), ("count", ctypes.c_size_t),
                        ("bytes", ctypes.c_size_t), ("pointer", ctypes.c_ulonglong)]

        node = ctypes.c_void_p()
        parameters = Node(pool=PoolProperties(kind=1, handle_types=0, location_kind=1, location=0), bytes=256 * MI)
        code = driver.code("cuGraphAddMemAllocNode", ctypes.byref(node), graph, None, ctypes.c_size_t(0),
                           ctypes.byref(parameters))
        say("  cuGraphAddMemAllocNode of 256 MiB", f"code {code}")
        if code == 0:
            def graph_memory(number):
                value = ctypes.c_ulonglong()
                driver.call("cuDeviceGetGraphMemAttribute", 0, number, ctypes.byref(value))
                return value.value / MI

            def graph_report(what):
                say(f"  {what}: graph used, reserved MiB; device used MiB",
                    (graph_memory(0), graph_memory(2), round(used()[0] - base)))

            graph_report("after adding the node")
            executable = ctypes.c_void_p()
            driver.call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
            graph_report("after instantiation")
            driver.call("cuGraphUpload", executable, None)
            driver.call("cuStreamSynchronize", None)
            graph_report("after upload")
            driver.call("cuGraphLaunch", executable, None)
            driver.call("cuStreamSynchronize", None)
            graph_report("after launch")
            free = driver.code("cuMemFree_v2", ctypes.c_ulonglong(parameters.pointer))
            say("  cuMemFree of the node's pointer", f"code {free}")
            graph_report("after the free")
            driver.call("cuGraphExecDestroy", executable)
            driver.code("cuDeviceGraphMemTrim", 0)
            graph_report("after destruction and trim")
        connection.send(b"r")

    pid, _connection = child(body)
    os.waitpid(pid, 0)
    settle(base)


def calls():
    """How long single calls take, and what a context charges by how it is made."""
    base = settle()

    def body(_connection):
        driver = Driver()
        start = time.perf_counter()
        driver.context()
        say("  cuDevicePrimaryCtxRetain ms", round((time.perf_counter() - start) * 1e3, 1))
        say("  one context: device used MiB", round(used()[0] - base, 2))
        say("  one context: charged MiB", used()[1].get(os.getpid()))
        second = ctypes.c_void_p()
        code = driver.code("cuCtxCreate_v2", ctypes.byref(second), 0, 0)
        say("  a second context of the process", f"code {code}, charged MiB {used()[1].get(os.getpid())}")
        for size in (1, 1 * MI, 2 * MI, 3 * MI, 64 * MI):
            before = used()[1].get(os.getpid())
            driver.allocate(size)
            say(f"  cuMemAlloc of {size} bytes charges MiB", used()[1].get(os.getpid()) - before)
        array_handle = ctypes.c_void_p()
        descriptor = (ctypes.c_size_t * 2)(4096, 4096)

        class Array(ctypes.Structure):
            _fields_ = [("width", ctypes.c_size_t), ("height", ctypes.c_size_t), ("format", ctypes.c_int),
                        ("channels", ctypes.c_uint)]

        del descriptor
        before = used()[1].get(os.getpid())
        code = driver.code("cuArrayCreate_v2", ctypes.byref(array_handle),
                           ctypes.byref(Array(width=4096, height=4096, format=0x20, channels=4)))
        say("  cuArrayCreate 4096 x 4096 x 4 floats (256 MiB)",
            f"code {code}, charges MiB {used()[1].get(os.getpid()) - before}")
        pointer, pitch = ctypes.c_ulonglong(), ctypes.c_size_t()
        before = used()[1].get(os.getpid())
        code = driver.code("cuMemAllocPitch_v2", ctypes.byref(pointer), ctypes.byref(pitch), ctypes.c_size_t(1000),
                           ctypes.c_size_t(100000), 16)
        say("  cuMemAllocPitch 1000 x 100000",
            f"code {code}, pitch {pitch.value}, charges MiB {used()[1].get(os.getpid()) - before}")
        for name, arguments in (("cuMemGetInfo_v2", (None, None)), ("cuDeviceTotalMem_v2", (None, 0))):
            say(f"  {name} with NULL", f"code {driver.code(name, *arguments)}")
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        driver.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        say("  cuMemGetInfo total MiB", total.value / MI)
        whole = ctypes.c_size_t()
        driver.call("cuDeviceTotalMem_v2", ctypes.byref(whole), 0)
        say("  cuDeviceTotalMem MiB", whole.value / MI)
        code = driver.code("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(1 << 40))
        say("  cuMemAlloc of 1 TiB", f"code {code}")

    pid, _connection = child(body)
    os.waitpid(pid, 0)
    settle(base)


def death():
    """From SIGKILL to memory that can be had again, by pidfd."""
    base = settle()
    for size in (1 * GI, 16 * GI, 64 * GI):
        def body(connection, size=size):
            driver = Driver()
            driver.context()
            driver.allocate(size)
            connection.send(b"r")
            connection.recv(1)

        pid, connection = child(body)
        connection.recv(1)
        watcher = os.pidfd_open(pid)
        start = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PIDFD, watcher, os.WEXITED)
        gone = time.perf_counter()
        reader = nvml.Nvml()
        while reader.sample(0).used / MI - base > 8 and time.perf_counter() - start < 5:
            pass
        say(f"SIGKILL with {size // GI} GiB: exit seen after ms, memory back after ms",
            (round((gone - start) * 1e3, 1), round((time.perf_counter() - start) * 1e3, 1)))
        os.close(watcher)


def resident():
    """What NVML alone makes a process weigh, without and with libcuda beside it."""

    def weight():
        with open("/proc/self/status", encoding="ascii") as status:
            fields = dict(line.split(":", 1) for line in status)
        return {name: round(int(fields[name].split()[0]) / 1024, 1) for name in ("VmRSS", "RssAnon", "RssFile")}

    def body(_connection):
        before = weight()
        nvml.Nvml().sample(0)
        after = weight()
        with open("/proc/self/maps", encoding="ascii") as maps:
            beside = any(CUDA.split(".", maxsplit=1)[0] + ".so" in line for line in maps)
        say("  NVML opened and read adds MiB", {name: round(after[name] - before[name], 1) for name in before})
        say("  it loaded libcuda too", beside)

    pid, _connection = child(body)
    os.waitpid(pid, 0)


MEASUREMENTS = {"exec": exec_keeps, "thousands": thousands, "importers": importers, "lists": lists, "pools": pools,
                "calls": calls, "death": death, "resident": resident}


def main():
    # Children use a driver of their own; NVML's thread stays with the parent.
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    names = sys.argv[1:] or list(MEASUREMENTS)
    for name in names:
        print(f"== {name}: {MEASUREMENTS[name].__doc__}", flush=True)
        # A process of its own, so that none inherits another's driver.
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                MEASUREMENTS[name]()
                status = 0
            except BaseException as error:  # noqa: BLE001 - told, and the next one goes on
                print(f"  failed: {error!r}", flush=True)
            os._exit(status)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
