"""The reservation pool: memory that is really held, given out at once, taken back at once, and out of a thief's reach."""

import math
import os
import select
import signal
import threading
import time

from common import (
    GIB, GROUP, INTERVAL, MIB, NAMESPACE, Failed, Page, by_pod, component, mib, resident, until,
)
from nvml import Nvml

MARGIN = 512 * MIB
# What the agent may take for a guard's question for 1 GiB, in seconds: releasing the memory from the ballast included.
GRANT_GOAL = 0.003
GRANTS = "highwater_grant_duration_seconds"
# What contexts and open devices take beside what is asked for.
SLACK = 64 * MIB
CONTEXT = 640 * MIB


class Watch(threading.Thread):
    """Reads what is in use as often as it can, and keeps every change."""

    def __init__(self):
        super().__init__(daemon=True)
        self.nvml, self.changes, self.ended = Nvml(), [], threading.Event()

    def run(self):
        last = None
        while not self.ended.is_set():
            used = self.nvml.memory().used
            if used != last:
                self.changes.append((time.monotonic(), used))
                last = used
            time.sleep(0.0002)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.join()

    def first(self, since, holds):
        """When what was in use was first so, from that time on."""
        return next((at for at, used in self.changes if at >= since and holds(used)), None)


def policy(unit):
    def rule(name, apps, **sizes):
        return {"name": name, "pods": {"matchExpressions": [{"key": "app", "operator": "In", "values": apps}]},
                **{key: str(size) for key, size in sizes.items()}}

    return {"mode": "Enforce", "nodes": {}, "namespaces": {"matchLabels": {"highwater-check": "yes"}},
            "pool": {"sizePercent": 100, "maxPercent": 100, "marginSize": str(MARGIN), "startHoldSeconds": 0,
                     "allocationWaitSeconds": 5},
            "quota": {"default": {"limit": str(unit)}, "rules": [
                rule("static", ["static"], limit=16 * unit),
                rule("elastic", ["elastic"], guarantee=8 * unit, limit=40 * unit),
                rule("thieves", ["thief", "avoider"], limit=2 * unit)]},
            "remediation": {"victims": {"ownerKinds": ["ReplicaSet"]},
                            "budget": {"maxUnavailable": 1, "haltAtCondemnedPercent": 100}}}


def check(report, nvml, cluster, total):
    unit = GIB if total > 100 * GIB else total // 128 // (2 * MIB) * (2 * MIB)
    until("the device is in nobody's use", 20, lambda: not nvml.sample().processes)
    base = nvml.settled()
    try:
        reserve(report, nvml, cluster, base, unit)
        static = give(report, nvml, cluster, unit)
        elastic(report, nvml, cluster, unit, static)
        steal(report, nvml, cluster, unit)
        sizes(report, cluster)
    finally:
        for app in ("static", "elastic", "thief", "avoider"):
            cluster.remove(app)
        cluster.without_policy("pool")
    until("the pool is given back", 20, lambda: nvml.memory().used <= base.used + SLACK,
          lambda: f"({mib(nvml.memory().used)} are in use)")
    report.claim(True, "pool: it goes with its policy", f"{mib(nvml.settled().used)} in use, {mib(base.used)} before")


def held(nvml):
    """Whether nothing but the margin is free, and that has been so for a while."""
    low = MARGIN + SLACK
    if nvml.memory().free > low:
        return False
    time.sleep(4 * INTERVAL)
    return nvml.memory().free <= low


def reserve(report, nvml, cluster, base, unit):
    with Watch() as watch:
        begun = time.monotonic()
        cluster.policy("pool", policy(unit))
        until("the whole device is held", 30, lambda: held(nvml),
              lambda: f"({mib(nvml.memory().free)} are free; the agent says {Page().device('highwater_pool_ballast_bytes')})")
    after, page = nvml.settled(), Page()
    ballast, size = page.device("highwater_pool_ballast_bytes") or 0, page.device("highwater_pool_size_bytes") or 0
    took = after.used - base.used
    report.claim(abs(took - ballast) <= SLACK and abs(size - ballast) <= MARGIN + SLACK and not after.processes,
                 "pool: the ballast reaches its target, in nobody's name",
                 f"pool {mib(size)}, ballast {mib(ballast)}; NVML: {mib(took)} more in use, {mib(after.free)} free, "
                 f"{len(after.processes)} processes listed")
    rose = watch.first(begun, lambda used: used > base.used + SLACK)
    whole = watch.first(begun, lambda used: used >= after.used - 4 * MIB)
    report.claim(whole - rose <= 0.150, "pool: the whole card less the margin within 150 ms",
                 f"{(whole - rose) * 1e3:.0f} ms from the first chunk to the last, {len(watch.changes)} readings that "
                 f"differ; {(whole - begun) * 1e3:.0f} ms after the policy was sent")


def give(report, nvml, cluster, unit):
    """A pod without a guard: its limit is free for it from when it is bound."""
    before = Page().device("highwater_pool_ballast_bytes") or 0
    pod = cluster.deploy("static")
    wanted = 16 * unit - CONTEXT
    job = cluster.start("static", "take", "driver_cases.py", "take", wanted, unit)
    said, name = job.says("taken"), pod["metadata"]["name"]
    until("the agent sees what it took", 10, lambda: (Page().pod(name) or 0) >= wanted)
    page = Page()
    fell = before - (page.device("highwater_pool_ballast_bytes") or 0)
    # The margin may be part of what is granted: it is only never held back.
    granted = page.of(name, "highwater_pool_granted_bytes") or 0
    report.claim(said["code"] == 0 and said["taken"] == wanted and fell >= 16 * unit - MARGIN - SLACK
                 and granted >= 16 * unit - SLACK, "pool: a static grant is there for a pod at once",
                 f"ballast fell by {mib(fell)}, granted {mib(granted)}; it took "
                 f"{mib(said['taken'])} at the first try: {said['all_ms']:.0f} ms for {said['pieces']} pieces, "
                 f"code {said['code']}, strength {page.strength(name)}")
    return said


def elastic(report, nvml, cluster, unit, static):
    """A pod with a guard: granted as it asks; and what it held when it is killed."""
    pod = cluster.deploy("elastic", guard=True)
    uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
    wanted = 32 * unit
    before = Page().histogram(GRANTS)
    said = cluster.start("elastic", "take", "driver_cases.py", "take", wanted, unit).says("taken")
    until("the guard is connected", 5, lambda: (Page().of(name, "highwater_guard_processes") or 0) >= 1)
    page = Page()
    grants = page.histogram(GRANTS) - before
    report.claim(said["code"] == 0 and page.strength(name) == "Guard" and grants.within(0.5) <= GRANT_GOAL,
                 "pool: 1 GiB is granted to a guard within 3 ms",
                 f"the agent, from question to answer: {grants.count} questions, mean {grants.mean * 1e3:.2f} ms, half "
                 f"within {upto(grants.within(0.5))}, 90 % within {upto(grants.within(0.9))}, all within "
                 f"{upto(grants.within(1))}; granted {mib(page.of(name, 'highwater_pool_granted_bytes') or 0)}, strength "
                 f"{page.strength(name)}")
    report.say(f"      the program, its own allocation included: {said['pieces']} x {mib(unit)}, code {said['code']}, median "
               f"{said['median_ms']:.1f} ms, 90 % within {said['p90_ms']:.1f}, worst {said['worst_ms']:.1f}; in a static "
               f"grant median {static['median_ms']:.1f} ms")
    until("all is held again", 20, lambda: nvml.memory().free <= MARGIN + 2 * unit + CONTEXT)
    time.sleep(4 * INTERVAL)
    before = nvml.settled()
    pids = cluster.processes(pod, nvml)
    size = by_pod(before).get(uid, (0, 0))[0]
    watchers = [os.pidfd_open(pid) for pid in pids]
    with Watch() as watch:
        killed = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for watcher in watchers:
            # Nobody's child here, so it cannot be waited for; but its descriptor becomes readable.
            await_readable(watcher)
        ended = time.monotonic()
        goal = 0.050 + 0.004 * size / GIB
        fell = until("its memory is free", 5, lambda: watch.first(killed, lambda used: used < before.used - size // 2))
        back = until("what it held is in the ballast again", 20,
                     lambda: watch.first(fell, lambda used: used >= before.used - SLACK),
                     lambda: f"({mib(nvml.memory().used)} in use, {mib(before.used)} before)")
    for watcher in watchers:
        os.close(watcher)
    report.claim(back - ended <= goal, "pool: what a killed process held is back",
                 f"{mib(size)} of {len(pids)} processes: {(back - ended) * 1e3:.0f} ms after its exit (goal "
                 f"{goal * 1e3:.0f} ms), exit {(ended - killed) * 1e3:.0f} ms after SIGKILL")


def upto(seconds):
    """A bucket's upper bound for people."""
    return "more than any bucket" if seconds == math.inf else f"{seconds * 1e3:g} ms"


def await_readable(descriptor):
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if not poll.poll(10_000):
        raise Failed("a killed process does not end")


def steal(report, nvml, cluster, unit):
    """Two that take what they can get: one that no list shows, one that its guard does not see."""
    neighbour = cluster.pod("static")
    for app, how, guard, what in (("thief", "handles", False, "a thief without a context"),
                                  ("avoider", "copy", True, "a program that avoids its guard")):
        pod = cluster.deploy(app, guard=guard)
        name = pod["metadata"]["name"]
        until(f"the agent knows {app}", 10, lambda: Page().of(name, "highwater_pod_overshoot_bytes") is not None)
        time.sleep(3 * INTERVAL)
        before = Page()
        overshoot, ballast = (before.of(name, "highwater_pod_overshoot_bytes"),
                              before.device("highwater_pool_ballast_bytes"))
        job = cluster.start(app, "steal", "thief.py", how)
        said = job.says("taken")
        time.sleep(3 * INTERVAL)
        page = Page()
        left = page.device("highwater_pool_ballast_bytes")
        bound = 2 * unit + overshoot + SLACK
        report.claim(said["taken"] <= bound and left >= ballast - 2 * unit - SLACK, f"pool: {what} is contained",
                     f"it took {mib(said['taken'])} before it was refused; its own {mib(2 * unit)} and an overshoot of "
                     f"{mib(overshoot)} at most; ballast {mib(ballast)} before, {mib(left)} after")
        if how == "handles":
            event = until("the candidate is named", 15, lambda: cluster.events(pod, "UnlistedMemory"))[0]
            named = time.monotonic() - said["at"]
            report.claim(named <= 2, "pool: the thief that no list shows is named as a candidate",
                         f"{named:.1f} s after it had taken all: {event['message'][:200]}")
        job.stop()
    now = cluster.pod("static")
    restarts = sum(one["restartCount"] for one in now["status"]["containerStatuses"])
    found = cluster.api.get(f"{GROUP}/namespaces/{NAMESPACE}/gpumemoryincidents")["items"]
    about = [one for one in found if one["spec"].get("subject", {}).get("uid") == neighbour["metadata"]["uid"]]
    report.claim(now["metadata"]["uid"] == neighbour["metadata"]["uid"] and restarts == 0 and not about,
                 "pool: the neighbour is untouched", f"same pod, {restarts} restarts, {len(about)} incidents about it")


def sizes(report, cluster):
    for part in ("keeper", "agent"):
        for pid, program in sorted(component(cluster, part).items()):
            if program == part:
                report.say(f"      {part} (PID {pid}) is {mib(resident(pid))} resident: {mib(resident(pid, 'RssAnon'))} of "
                           f"its own, {mib(resident(pid, 'RssFile'))} of files")
