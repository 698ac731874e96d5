"""The programs: a way of leaking memory each, or of using more and more of it rightly.

    programs.py VARIANT RANK FOLDER SLOT SPEED DEVICE      started by record.py

A program waits until FOLDER/begin says when the story begins, then lives it, SPEED times as fast as the clock. What it
knows of itself is in its slot of FOLDER/slots (`Slot`). Exits with 9 when it runs out of memory.
"""

import ctypes
import math
import mmap
import os
import random
import signal
import struct
import sys
import time

import variants
from device import DEVICES, Refused

OUT_OF_MEMORY = 9
WANT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
TICK = 0.08  # seconds of the clock
SLACK = 30  # requests that one who is late makes up for
PIECE = 25  # MiB
DIE_WITH_PARENT = 1


class Slot:
    """What a program says of itself, for the recorder."""

    FORMAT = struct.Struct("<q5d")
    SIZE = 64
    STARTING, READY = 0, 1

    def __init__(self, path, number):
        with open(path, "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 0)
        self.at = number * self.SIZE

    def write(self, state, allocated=0.0, reserved=0.0, work=0.0, replays=0.0, unlisted=0.0):
        packed = self.FORMAT.pack(state, allocated, reserved, work, replays, unlisted)
        self.memory[self.at:self.at + len(packed)] = packed

    def read(self):
        return self.FORMAT.unpack(self.memory[self.at:self.at + self.FORMAT.size])


class Clock:
    """Requests as they come: how many are due."""

    def __init__(self, load, chance):
        self.load, self.chance, self.due, self.last = load, chance, 0.0, 0.0
        share = {"bursts": 1 + (load.depth - 1) / 5, "idle": 0.7}
        self.scale = load.rate / share.get(load.kind, 1.0)

    def level(self, minute):
        """How many times as much as usual."""
        load, phase = self.load, minute % self.load.period / self.load.period
        if load.kind == "noisy":
            return self.chance.uniform(0.3, 1.7)
        if load.kind == "swing":
            return max(1 + load.depth * math.sin(2 * math.pi * phase), 0)
        if load.kind == "bursts":
            return load.depth if phase > 0.8 else 1.0
        if load.kind == "idle":
            return 0.0 if phase > 0.7 else 1.0
        return 1.0

    def requests(self, minute):
        self.due = min(self.due + self.scale * self.level(minute) * (minute - self.last), SLACK)
        self.last = minute
        count = int(self.due)
        self.due -= count
        return count


class Program:
    """A server or a training loop: weights, and work that takes memory for a moment."""

    def __init__(self, device, variant, leaking):
        self.device, self.torch, self.variant, self.leaking = device, device.torch, variant, leaking
        # Ranks of one workload do the same work.
        self.chance = random.Random(variant.name)
        self.clock = Clock(variant.load, self.chance)
        self.weights, self.kept, self.debt, self.count, self.replays = [], [], 0.0, 0, 0
        self.trimmed, self.minute = 0.0, 0.0
        self.given = variant.settings

    def load(self, minute):
        """Weights come in the first four minutes."""
        self.pieces(self.weights, self.variant.base * min(minute / 4, 1))

    def pieces(self, held, size):
        """Holds so much, in equal pieces; gives back what is more."""
        wanted = math.ceil(size / PIECE)
        while len(held) < wanted:
            held.append(self.device.tensor(PIECE))
        del held[wanted:]

    def busy(self):
        """Memory for a moment, and something computed."""
        moment = []
        self.pieces(moment, self.given.get("busy", 100) * self.chance.choice((0.4, 0.7, 1.0)))
        for one in moment[:2]:
            one.add_(1)

    def share(self):
        """What a request leaves behind, in MiB, once it leaks."""
        size = self.variant.growth / self.variant.load.rate
        return size * self.chance.uniform(0.2, 1.8) if self.given.get("uneven") else size

    def owed(self):
        """What is to be left behind by this request: nothing, but at every so many requests all since the last."""
        self.debt += self.share()
        if self.count % self.given.get("every", 1):
            return 0.0
        owed, self.debt = self.debt, 0.0
        return owed

    def leaks(self):
        return self.leaking and self.minute >= self.variant.onset

    def request(self):
        self.busy()

    def idle(self):
        """Once a tick."""

    def live(self, minute):
        """What is due at this minute; how many requests that was."""
        self.minute = minute
        if minute < 5:
            self.load(minute)
        count = self.clock.requests(minute)
        for _ in range(count):
            self.count += 1
            self.request()
        self.idle()
        every = self.given.get("trim")
        if every and every is not True and minute - self.trimmed >= every:
            self.trimmed = minute
            self.device.trim()


# --- leaks --------------------------------------------------------------------------------------


class Keep(Program):
    """Results are kept alive: a list of them that nobody empties."""

    def request(self):
        self.busy()
        if self.leaks() and (owed := self.owed()) > 0:
            self.kept.append(self.device.tensor(owed))


class GraphKept(Program):
    """Losses, or a state, are kept with the graphs that they came from."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        row = self.device.row
        self.weight = (self.torch.randn(row, row, device=self.device.name) / row ** 0.5).requires_grad_()
        self.total, self.state = 0.0, None

    def rows(self, size, saved):
        """So many rows that what is saved for the way back takes that size."""
        return max(int(size * self.device.unit / (saved * self.device.row * 4)), 1)

    def forward(self, rows):
        inputs = self.torch.ones(rows, self.device.row, device=self.device.name)
        hidden = self.torch.tanh(inputs @ self.weight)
        return self.torch.tanh(hidden @ self.weight).square().mean()

    def request(self):
        self.busy()
        how, leaks = self.given["how"], self.leaks()
        if how == "state":
            self.recur(leaks)
            return
        owed = self.owed() if leaks else 0.0
        if owed > 0:
            # Inputs and both layers' outputs are saved.
            loss = self.forward(self.rows(owed, 3))
            if how == "sum":
                self.total = self.total + loss
            else:
                self.kept.append(loss)
        else:
            with self.torch.no_grad():
                self.forward(64)

    def recur(self, leaks):
        """A state that is carried on, and is not detached any more from some day on."""
        if self.state is None:
            self.state = self.torch.zeros(self.rows(self.share(), 2), self.device.row, device=self.device.name)
        inputs = self.torch.ones_like(self.state)
        state = self.torch.tanh(inputs @ self.weight + self.state)
        self.state = state if leaks else state.detach()


class Cache(Program):
    """What was computed is kept by its key, without a bound."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.entries = {}

    def request(self):
        self.busy()
        if not self.leaks():
            return
        sessions = self.given.get("sessions")
        if sessions:
            # Each turn is added to its session; nobody ends sessions.
            self.entries.setdefault(self.chance.randrange(sessions), []).append(self.device.tensor(self.share()))
            return
        misses = self.given["misses"]
        chance = misses * (1.4 - 0.8 * self.minute / variants.MINUTES) if self.given.get("falling") else misses
        if self.chance.random() < chance:
            self.entries[self.count] = self.device.tensor(self.share() / misses)


class Raw(Program):
    """Memory from the driver that nobody frees."""

    GRAIN = 2  # MiB: what the driver gives at least

    def take(self, owed, how):
        self.debt += owed
        grains = int(self.debt / self.GRAIN)
        if grains:
            self.debt -= grains * self.GRAIN
            self.device.raw(how, grains * self.GRAIN)

    def request(self):
        self.busy()
        if self.leaks():
            self.debt += self.share()
            if self.count % self.given.get("every", 1) == 0:
                self.take(0, self.given["call"])


class Replay(Raw):
    """A CUDA graph is replayed at each request, and something is left behind each time."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        size = self.variant.growth / self.variant.load.rate
        self.fixed = self.device.tensor(size)
        self.play, self.out, self.graph = self.device.capture(lambda: self.fixed * 2)

    def request(self):
        self.play()
        self.replays += 1
        if not self.leaks():
            return
        what = self.given["what"]
        if what == "output":
            self.kept.append(self.out.clone())
        elif what == "input":
            self.kept.append(self.fixed.clone())
        elif what == "captured":
            owed = self.owed()
            if owed > 0:
                larger = self.device.tensor(owed / 2)
                self.kept.append((larger, self.device.capture(lambda: larger * 2)))
        else:
            self.debt += self.share()
            if self.count % self.given.get("every", 1) == 0:
                self.take(0, "plain")


# --- right use ----------------------------------------------------------------------------------


class WarmUp(Program):
    """Weights come slowly, and buffers for each shape that is seen for the first time, ever more seldom."""

    def load(self, minute):
        pass

    def idle(self):
        minutes = self.given["minutes"]
        self.pieces(self.weights, self.variant.base * min(self.minute / (minutes * 0.4), 1))
        seen = round(self.given["shapes"] * (1 - math.exp(-3 * self.minute / minutes)))
        while len(self.kept) < seen:
            self.kept.append(self.device.tensor(self.given["piece"]))


class Doubling(Program):
    """A table that is copied into one of twice the size when it is full, up to its bound."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.tables = [None] * self.given.get("tables", 1)

    def idle(self):
        last = self.given["last"] / len(self.tables)
        for place in range(len(self.tables)):
            minutes = self.given["minutes"] * (place + 1) / len(self.tables)
            filled = last * min(self.minute / minutes, 1)
            size = self.given["first"] / len(self.tables)
            while size < filled:
                size *= 2
            old = self.tables[place]
            if old is None or old.numel() < int(size * self.device.unit):
                new = self.device.tensor(size)
                if old is not None:
                    new[:old.numel()].copy_(old)
                self.tables[place] = new
                del old
                if self.given.get("trim"):
                    self.device.trim()


class Batch(Program):
    """Batches that become larger by a plan, up to their last size."""

    def request(self):
        first, last = self.given["first"], self.given["last"]
        done = min(self.minute / self.given["minutes"], 1)
        steps = self.given.get("steps")
        if steps:
            done = math.floor(done * steps) / steps
        moment = []
        self.pieces(moment, first + (last - first) * done)
        moment[0].add_(1)


class Fragmentation(Program):
    """Pieces of many sizes come and go; as much is in use as ever, but the gaps do not fit."""

    def request(self):
        smallest, largest = self.given["smallest"], self.given["largest"]
        if self.given.get("growing"):
            largest = smallest + (largest - smallest) * min(0.3 + self.minute / 150, 1)
        for _ in range(3):
            size = self.chance.uniform(smallest, largest)
            while self.kept and sum(one.numel() for one in self.kept) > (self.given["live"] - size) * self.device.unit:
                self.kept.pop(self.chance.randrange(len(self.kept)))
            self.kept.append(self.device.tensor(size))


class Kv(Program):
    """Pages of a key-value cache: sessions fill it up to its cap, then the oldest give way."""

    SLAB = 32  # MiB

    def request(self):
        self.busy()
        rate = self.given["cap"] / self.given["minutes"] / self.variant.load.rate
        self.debt += rate * self.chance.uniform(0.5, 1.5)
        while self.debt >= self.SLAB:
            self.debt -= self.SLAB
            if (len(self.kept) + 1) * self.SLAB <= self.given["cap"]:
                self.kept.append(self.device.tensor(self.SLAB))
            else:
                self.kept.append(self.kept.pop(0).add_(1))


class Swing(Program):
    """Memory that follows the load, up and down."""

    def idle(self):
        held = len(self.kept)
        load = self.variant.load
        level = self.clock.level(self.minute) / (load.depth if load.kind == "bursts" else 1 + load.depth)
        self.pieces(self.kept, self.given["most"] * level * self.chance.uniform(0.95, 1.0))
        if len(self.kept) < held - 4:
            self.device.trim()


class Swap(Program):
    """Models of several sizes, one after the other."""

    model = None

    def idle(self):
        sizes = self.given["models"]
        turn = int(self.minute / self.given["minutes"])
        if turn != self.model:
            self.model = turn
            self.kept.clear()
            self.device.trim()
        # A model is loaded within two minutes.
        into = self.minute - turn * self.given["minutes"]
        self.pieces(self.kept, sizes[turn % len(sizes)] * min(into / 2, 1))


PROGRAMS = {"keep": Keep, "graph_kept": GraphKept, "cache": Cache, "raw": Raw, "replay": Replay, "warm_up": WarmUp,
            "doubling": Doubling, "batch": Batch, "fragmentation": Fragmentation, "kv": Kv, "swing": Swing, "swap": Swap}


# --- a process ----------------------------------------------------------------------------------


def begin(folder):
    """Waits until it is said when the story begins."""
    path = os.path.join(folder, "begin")
    while True:
        try:
            with open(path, encoding="utf-8") as file:
                at = float(file.read())
        except FileNotFoundError:
            time.sleep(0.02)
            continue
        time.sleep(max(at - time.monotonic(), 0))
        return at


def main():
    name, rank, folder, number, speed, kind = sys.argv[1:]
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    slot, variant = Slot(os.path.join(folder, "slots"), int(number)), variants.BY_NAME[name]
    device = DEVICES[kind]()
    # Of several ranks the last leaks.
    program = PROGRAMS[variant.program](device, variant, variant.leaks and int(rank) == variant.ranks - 1)
    program.busy()
    device.settle()
    slot.write(Slot.READY, *device.numbers())
    started, speed = begin(folder), float(speed) / 60
    refused = getattr(device.torch.cuda, "OutOfMemoryError", MemoryError)
    try:
        while (minute := (time.monotonic() - started) * speed) < variants.MINUTES + 5:
            program.live(minute)
            slot.write(Slot.READY, *device.numbers(), program.count, program.replays, device.unlisted)
            time.sleep(TICK)
    except (refused, Refused) as error:
        if getattr(error, "code", WANT_OF_MEMORY) != WANT_OF_MEMORY:
            raise
        print(f"{name}: out of memory: {error}"[:300], file=sys.stderr, flush=True)
        os._exit(OUT_OF_MEMORY)
    os._exit(0)


if __name__ == "__main__":
    main()
