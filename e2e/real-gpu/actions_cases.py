"""What runs in the pods of check_actions.py. Each prints a line of JSON for each thing that is known; its times are of the
clock that all processes of the machine share.

    actions_cases.py hold BYTES            holds so much, and says over and over whether it is what it was
    actions_cases.py keep BYTES KEPT       works on so much while its allocator keeps so much more for later
    actions_cases.py pulse BYTES TIMES     takes so much, gives it back, and again

--backend torch|driver: PyTorch, or the driver where PyTorch is not at hand. PyTorch's allocator is chosen by its environment.
"""

import argparse
import ctypes
import json
import random
import time

from driver_cases import POINTER, SIZE, Driver

MIB, GIB = 1 << 20, 1 << 30
RELEASE_THRESHOLD, RESERVED, USED = 4, 5, 7  # attributes of a pool


def say(**what):
    print(json.dumps({"at": time.monotonic(), **what}), flush=True)


# --- memory that must be what it was ------------------------------------------------------------


def hold_torch(size):
    import torch
    torch.manual_seed(7)
    step = min(size, GIB)
    blocks = [torch.empty(step // 4, dtype=torch.int32, device="cuda").random_() for _ in range(size // step)]

    def sums():
        return [int(block.sum(dtype=torch.int64)) for block in blocks]

    before = sums()
    return lambda: sums() == before


def hold_driver(size):
    driver = Driver()
    step = min(size, GIB)
    for _ in range(size // step):
        driver.allocate(step)

    def goes_on():
        driver.free(driver.allocate(2 * MIB))
        return True

    return goes_on


def hold(size, backend):
    check = {"torch": hold_torch, "driver": hold_driver}[backend](size)
    say(held=size)
    beat = 0
    while True:
        begun = time.monotonic()
        intact = check()
        beat += 1
        say(beat=beat, intact=intact, took=time.monotonic() - begun)
        time.sleep(0.25)


# --- memory that an allocator keeps -------------------------------------------------------------


class Pool:
    """The device's own pool, which the driver's allocations in stream order come from."""

    def __init__(self, driver):
        self.driver, self.handle = driver, ctypes.c_void_p()
        driver.call("cuDeviceGetDefaultMemPool", ctypes.byref(self.handle), 0)

    def number(self, attribute):
        value = POINTER()
        self.driver.call("cuMemPoolGetAttribute", self.handle, attribute, ctypes.byref(value))
        return value.value

    def retain(self):
        value = POINTER(2**64 - 1)
        self.driver.call("cuMemPoolSetAttribute", self.handle, RELEASE_THRESHOLD, ctypes.byref(value))


def keep_torch(size, kept):
    import torch
    torch.manual_seed(7)
    weights = torch.randn(1024, 1024, device="cuda")
    held = [torch.ones(size, dtype=torch.uint8, device="cuda")]
    for_later = [torch.ones(kept // 16, dtype=torch.uint8, device="cuda") for _ in range(16)]
    torch.cuda.synchronize()
    del for_later

    def step():
        moment = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
        result = int(moment.sum(dtype=torch.int64)) + int((weights @ weights).mul(1024).round().sum().item())
        torch.cuda.synchronize()
        return result + int(held[0][:MIB].sum(dtype=torch.int64))

    return step, lambda: (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()), \
        torch.cuda.get_allocator_backend()


def keep_driver(size, kept):
    driver = Driver()
    pool = Pool(driver)
    pool.retain()

    def take(count):
        pointer = POINTER()
        driver.call("cuMemAllocAsync", ctypes.byref(pointer), SIZE(count), None)
        return pointer

    def give(pointer):
        driver.call("cuMemFreeAsync", pointer, None)

    take(size)
    for pointer in [take(kept // 16) for _ in range(16)]:
        give(pointer)
    driver.call("cuStreamSynchronize", None)

    def step():
        give(take(64 * MIB))
        driver.call("cuStreamSynchronize", None)
        return 0

    return step, lambda: (pool.number(USED), pool.number(RESERVED)), "driver"


def keep(size, kept, backend):
    step, numbers, allocator = {"torch": keep_torch, "driver": keep_driver}[backend](size, kept)
    turn, last = 0, None
    while True:
        result, (allocated, reserved) = step(), numbers()
        turn += 1
        # Whenever what is kept changes, and now and then.
        if reserved != last or turn % 25 == 0:
            last = reserved
            say(turn=turn, result=result, allocated=allocated, reserved=reserved, allocator=allocator)
        time.sleep(0.01)


# --- memory that comes and goes -----------------------------------------------------------------


def pulse(size, times):
    driver, chance = Driver(), random.Random(7)
    say(ready=True)
    time.sleep(2)
    for number in range(times):
        asked = time.monotonic()
        pointer = driver.allocate(size)
        had = time.monotonic()
        time.sleep(0.35)
        driver.free(pointer)
        say(pulse=number, asked=asked, had=had, freed=time.monotonic())
        # Anywhere in the interval of the agent's samples.
        time.sleep(0.35 + chance.uniform(0, 0.1))
    say(pulses=times)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=["hold", "keep", "pulse"])
    parser.add_argument("numbers", nargs="+", type=int)
    parser.add_argument("--backend", choices=["torch", "driver"], default="torch")
    arguments = parser.parse_args()
    if arguments.case == "pulse":
        pulse(*arguments.numbers)
    else:
        {"hold": hold, "keep": keep}[arguments.case](*arguments.numbers, arguments.backend)


if __name__ == "__main__":
    main()
