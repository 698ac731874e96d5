"""What is run: five variants of each leak mode and of each kind of right use, as data.

    python3 variants.py          lists them, and what they are expected to take at once

Times are minutes of the story, sizes MiB. The story goes so many times as fast as the clock (`record.py`), so a minute
of it is about a second. Of each five the first three are for tuning, the others are reported.
"""

from dataclasses import dataclass, field

MINUTES = 240  # of a story
CAPACITY = 3584  # MiB that a process may come to, its context included
CONTEXT = 740  # MiB that a context with its modules takes (H200, driver 580, PyTorch 2.11)
TUNED = 3  # variants of each kind that are for tuning


@dataclass(frozen=True)
class Load:
    """Requests a minute: `rate`, times what `kind` makes of it."""

    kind: str = "constant"  # constant, noisy, swing, bursts, idle
    rate: float = 6.0
    period: float = 60.0  # minutes
    depth: float = 0.5  # how far it swings, or how many times as much a burst is


@dataclass(frozen=True)
class Variant:
    """A program with what it is told."""

    kind: str  # the leak mode, or the kind of right use
    number: int
    program: str
    leaks: bool
    load: Load
    settings: dict = field(default_factory=dict)
    onset: float | None = None  # minute from which it leaks,
    end: float | None = None  # and at about which it has come to its capacity
    base: float = 500  # MiB of weights
    ranks: int = 1
    environment: dict = field(default_factory=dict)

    @property
    def name(self):
        return f"{self.kind}-{self.number}"

    @property
    def split(self):
        return "tuned" if self.number <= TUNED else "reported"

    @property
    def batch(self):
        """Which half it runs with: both halves have something of everything."""
        return 1 + (KINDS.index(self.kind) + self.number) % 2

    @property
    def growth(self):
        """MiB a minute from the onset on."""
        return (CAPACITY - CONTEXT - self.base - self.settings.get("busy", 0)) / (self.end - self.onset)

    @property
    def peak(self):
        """About how much all of its processes come to, in MiB."""
        idle = CONTEXT + self.base + self.settings.get("busy", 100)
        highest = CAPACITY if self.leaks else CONTEXT + self.settings["peak"]
        return highest + (self.ranks - 1) * idle


def allocator(setting):
    """The environment that chooses an allocator, by its new name and by its old."""
    return {"PYTORCH_ALLOC_CONF": setting, "PYTORCH_CUDA_ALLOC_CONF": setting}


def five(kind, program, leaks, *variants):
    return [Variant(kind=kind, number=number, program=program, leaks=leaks,
                    **{"load": Load(), **variant}) for number, variant in enumerate(variants, 1)]


NOISY, SWING, BURSTS, IDLE = Load("noisy"), Load("swing", period=50), Load("bursts", period=18, depth=4), \
    Load("idle", period=35)

# `busy` is what work takes at most at a time; `every` so many requests leave something behind.
LEAKS = [
    *five("tensor", "keep", True,
          dict(onset=40, end=190, settings=dict(busy=120)),
          dict(onset=30, end=170, load=NOISY, settings=dict(busy=200, uneven=True)),
          dict(onset=25, end=200, settings=dict(busy=80, every=36)),  # a jump about every six minutes
          dict(onset=60, end=190, load=SWING, base=700, settings=dict(busy=300, trim=5)),
          dict(onset=10, end=150, load=BURSTS, settings=dict(busy=150, uneven=True),
               environment=allocator("expandable_segments:True"))),
    *five("graph", "graph_kept", True,
          dict(onset=35, end=185, base=300, settings=dict(busy=100, how="sum")),
          dict(onset=20, end=175, base=400, load=NOISY, settings=dict(busy=100, how="list", every=4)),
          dict(onset=50, end=210, base=300, settings=dict(busy=100, how="state")),
          dict(onset=30, end=200, base=500, settings=dict(busy=100, how="list", every=60)),  # now and then: validation
          dict(onset=15, end=195, base=300, load=IDLE, settings=dict(busy=100, how="list", uneven=True))),
    *five("cache", "cache", True,
          dict(onset=15, end=180, settings=dict(busy=100, misses=0.5)),
          dict(onset=10, end=200, load=NOISY, settings=dict(busy=100, misses=0.6, falling=True)),
          dict(onset=20, end=190, settings=dict(busy=150, sessions=40)),
          dict(onset=25, end=205, settings=dict(busy=80, misses=0.03)),  # large adapters, one about every five minutes
          dict(onset=15, end=200, load=SWING, base=600, settings=dict(busy=200, misses=0.4, uneven=True))),
    *five("raw", "raw", True,
          dict(onset=30, end=180, settings=dict(busy=100, call="plain")),
          dict(onset=45, end=200, load=NOISY, settings=dict(busy=100, call="runtime")),
          dict(onset=20, end=190, settings=dict(busy=100, call="virtual", every=20)),
          dict(onset=35, end=205, load=SWING, settings=dict(busy=200, call="pitch", trim=8)),
          dict(onset=15, end=170, load=IDLE, settings=dict(busy=100, call="ordered", every=3))),
    *five("replay", "replay", True,
          dict(onset=30, end=180, settings=dict(busy=64, what="output")),
          dict(onset=25, end=190, settings=dict(busy=64, what="raw")),
          dict(onset=40, end=200, load=NOISY, settings=dict(busy=64, what="input")),
          dict(onset=20, end=195, load=SWING, settings=dict(busy=64, what="raw", every=2)),
          dict(onset=35, end=205, settings=dict(busy=64, what="captured", every=16))),
    *five("rank", "keep", True,
          dict(ranks=2, onset=30, end=180, settings=dict(busy=120)),
          dict(ranks=2, onset=40, end=190, load=NOISY, settings=dict(busy=120, uneven=True)),
          dict(ranks=2, onset=20, end=200, settings=dict(busy=80, every=30)),
          dict(ranks=3, onset=35, end=195, load=SWING, settings=dict(busy=150)),
          dict(ranks=4, onset=25, end=205, base=350, load=BURSTS, settings=dict(busy=100, every=2))),
    *five("managed", "raw", True,
          dict(onset=30, end=180, settings=dict(busy=100, call="managed")),
          dict(onset=40, end=190, load=NOISY, settings=dict(busy=100, call="managed_host")),
          dict(onset=25, end=195, settings=dict(busy=100, call="pinned_pair")),
          dict(onset=20, end=200, load=SWING, settings=dict(busy=120, call="host_pair")),
          dict(onset=35, end=205, settings=dict(busy=100, call="managed_both", every=3))),
]

# `peak` is what they come to beside their context.
RIGHT = [
    *five("warmup", "warm_up", False,
          dict(base=600, settings=dict(peak=1700, minutes=25, shapes=20, piece=40)),
          dict(base=400, load=NOISY, settings=dict(peak=1900, minutes=60, shapes=45, piece=30)),
          dict(base=900, settings=dict(peak=2300, minutes=15, shapes=12, piece=100)),
          dict(base=500, load=SWING, settings=dict(peak=2200, minutes=90, shapes=60, piece=25)),
          dict(base=700, load=BURSTS, settings=dict(peak=2450, minutes=45, shapes=30, piece=50))),
    *five("doubling", "doubling", False,
          dict(base=300, settings=dict(peak=1900, first=16, last=1024, minutes=90)),
          dict(base=300, load=NOISY, settings=dict(peak=1900, first=8, last=1024, minutes=180)),
          dict(base=500, settings=dict(peak=2150, first=64, last=1024, minutes=60, trim=True)),
          dict(base=400, load=SWING, settings=dict(peak=2300, first=12, last=768, minutes=200, tables=2)),
          dict(base=300, load=BURSTS, settings=dict(peak=1900, first=16, last=1024, minutes=130, trim=True))),
    *five("batch", "batch", False,
          dict(base=500, settings=dict(peak=2100, first=100, last=1500, minutes=100)),
          dict(base=500, load=NOISY, settings=dict(peak=2200, first=200, last=1600, minutes=150, steps=6)),
          dict(base=400, settings=dict(peak=1900, first=50, last=1400, minutes=60, steps=4)),
          dict(base=600, load=SWING, settings=dict(peak=2300, first=100, last=1600, minutes=180)),
          dict(base=300, load=IDLE, settings=dict(peak=2000, first=64, last=1500, minutes=120, steps=9))),
    *five("fragmentation", "fragmentation", False,
          dict(base=300, settings=dict(peak=1900, live=900, smallest=4, largest=60)),
          dict(base=300, load=NOISY, settings=dict(peak=2100, live=1000, smallest=2, largest=120)),
          dict(base=400, settings=dict(peak=1900, live=700, smallest=12, largest=90, growing=True)),
          dict(base=300, load=SWING, settings=dict(peak=2200, live=1000, smallest=3, largest=100, growing=True)),
          dict(base=300, load=BURSTS, settings=dict(peak=2200, live=1100, smallest=2, largest=80))),
    *five("kv", "kv", False,
          dict(base=500, settings=dict(peak=2500, cap=1950, minutes=60)),
          dict(base=500, load=NOISY, settings=dict(peak=2300, cap=1750, minutes=110)),
          dict(base=700, settings=dict(peak=2500, cap=1750, minutes=160)),
          dict(base=500, load=SWING, settings=dict(peak=2550, cap=2000, minutes=140)),
          dict(base=400, load=BURSTS, settings=dict(peak=2300, cap=1850, minutes=200))),
    *five("swing", "swing", False,
          dict(base=500, load=Load("swing", period=60, depth=0.8), settings=dict(peak=2000, most=1500)),
          dict(base=600, load=Load("swing", period=100, depth=0.7), settings=dict(peak=2300, most=1600)),
          dict(base=400, load=Load("swing", period=35, depth=0.9), settings=dict(peak=2200, most=1700)),
          dict(base=500, load=Load("swing", period=160, depth=0.8), settings=dict(peak=2500, most=1900)),
          dict(base=500, load=Load("bursts", period=40, depth=4), settings=dict(peak=2300, most=1700))),
    *five("swap", "swap", False,
          dict(base=200, settings=dict(peak=1600, models=(600, 1400, 900), minutes=30)),
          dict(base=200, load=NOISY, settings=dict(peak=2200, models=(400, 800, 1200, 1600, 2000), minutes=22)),
          dict(base=200, settings=dict(peak=2000, models=(1800, 700), minutes=45)),
          dict(base=200, load=BURSTS, settings=dict(peak=2400, models=(500, 1000, 2200, 1300), minutes=35)),
          dict(base=200, load=IDLE, settings=dict(peak=2100, models=(300, 900, 1500, 1900), minutes=50))),
]

VARIANTS = [*LEAKS, *RIGHT]
KINDS = list(dict.fromkeys(variant.kind for variant in VARIANTS))
BY_NAME = {variant.name: variant for variant in VARIANTS}


def main():
    for batch in (1, 2):
        chosen = [variant for variant in VARIANTS if variant.batch == batch]
        print(f"batch {batch}: {len(chosen)} variants, {sum(v.ranks for v in chosen)} processes, at most "
              f"{sum(v.peak for v in chosen) / 1024:.0f} GiB if all were at their peaks together")
        for variant in chosen:
            print(f"  {variant.name:18} {variant.program:14} {variant.split:8} {variant.load.kind:8} "
                  f"{'leaks ' + format(variant.growth, '.1f') + ' MiB a minute' if variant.leaks else 'right'}")


if __name__ == "__main__":
    main()
