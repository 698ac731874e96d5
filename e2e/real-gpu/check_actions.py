"""Acts of a breaker that end nobody: `Park`, `Reclaim`, and how soon after a sample an act is begun."""

import json
import os
import subprocess
import sys
import threading
import time

from common import GIB, INTERVAL, MIB, Failed, Page, Reader, by_pod, mib, until
from torch_cases import allocator

PARKABLE = {"highwater.dev/park": "true"}
PARKED = "highwater_pod_parked_bytes"
FINAL = ("Succeeded", "Suppressed", "Cancelled", "Failed")
CONTEXT = 768 * MIB
# From the sample that satisfies the hold to the act.
GOAL = 1.5 * INTERVAL + 0.005
TRIP, CLEAR = 90, 88  # percent; a park that makes room ends below
KEPT = 20  # of so many parts of what was idle, one may stay: steps go on, and pieces in use hold what lies beside them
KUBELET = "/var/lib/kubelet"


def policy(trip, clear, actions, limit, hold=200, stay=500):
    return {"mode": "Enforce", "nodes": {}, "namespaces": {"matchLabels": {"highwater-check": "yes"}},
            "quota": {"default": {"guarantee": "1Gi", "limit": str(limit)}},
            "breakers": [{"scope": "Device", "minimumStayMilliseconds": stay,
                          "critical": {"tripPercent": trip, "clearPercent": clear, "holdMilliseconds": hold,
                                       "actions": [{"type": action} for action in actions]}}],
            "remediation": {"victims": {"ownerKinds": ["ReplicaSet"]},
                            "budget": {"maxUnavailable": 1, "haltAtCondemnedPercent": 100,
                                       "rates": [{"scope": "Policy", "maxActions": 100, "windowMinutes": 60}]}}}


def usable(sample):
    return sample.total - sample.reserved


def first(reader, what, holds, since=0.0):
    """When the driver first showed something, from that time on."""
    for at, (used, pods) in zip(reader.times, reader.samples):
        if at >= since and holds(used, pods):
            return at
    raise Failed(f"the driver was not seen to show that {what}")


def same(cluster, pod, app):
    """Whether a pod is the same, with its containers never started anew; how often they were."""
    now = cluster.pod(app)
    restarts = sum(one["restartCount"] for one in now["status"]["containerStatuses"])
    return now["metadata"]["uid"] == pod["metadata"]["uid"] and restarts == 0, restarts


class HostMemory:
    """Some machines get their memory as they use it, and the agent parks only where it is at hand."""

    def __init__(self, wanted):
        with open("/proc/meminfo", encoding="utf-8") as file:
            lines = dict(line.split(":", 1) for line in file)
        available = int(lines["MemAvailable"].split()[0]) * 1024
        self.process = None
        if available < wanted:
            code = ("import mmap,sys\nm=mmap.mmap(-1,int(sys.argv[1]),flags=mmap.MAP_PRIVATE|mmap.MAP_ANONYMOUS)\n"
                    "for at in range(0,len(m),4096): m[at]=1")
            size = min(wanted, 2 * available)
            self.process = subprocess.Popen([sys.executable, "-c", code, str(size)], stderr=subprocess.DEVNULL)

    def wait(self):
        if self.process is not None:
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()


# --- Park ---------------------------------------------------------------------------------------


def park(report, nvml, cluster, total):
    """A pod that agreed is moved to the host while its neighbour needs the room, and is brought back."""
    until("the device is in nobody's use", 20, lambda: not nvml.sample().processes)
    # A machine that simulates the device has no more memory than this to park to.
    size = 20 * GIB if cluster.backend == "torch" else 6 * GIB
    host = HostMemory(3 * size) if cluster.backend == "torch" else None
    cluster.policy("park", policy(TRIP, CLEAR, ["Park"], total * 95 // 100))
    try:
        cold = cluster.deploy("cold", labels=PARKABLE)
        job = cluster.start("cold", "hold", "actions_cases.py", "hold", size, "--backend", cluster.backend)
        hot = cluster.deploy("hot", 512 * MIB)
        job.says("beat", 90)
        if host:
            host.wait()
        grow(report, nvml, cluster, cold, hot, job, size)
    finally:
        for app in ("cold", "hot"):
            cluster.remove(app)
        cluster.without_policy("park")


def grow(report, nvml, cluster, cold, hot, job, size):
    uid, name = cold["metadata"]["uid"], cold["metadata"]["name"]
    sample = nvml.settled()
    whole, image = usable(sample), by_pod(sample)[uid][0]
    near = whole * TRIP // 100 - image - CONTEXT - whole // 50
    # Below the clear mark by itself, but with the other the device would not be enough.
    last = whole * (CLEAR - 1) // 100 - CONTEXT
    with Reader(nvml) as reader:
        cluster.target("hot", near, 16 * GIB)
        reached(cluster, near)
        # The room that is left lasts for twice as long as a park takes.
        cluster.target("hot", last, whole // 10 // 24)
        parked = until("the cold pod is parked", 60, lambda: (Page().of(name, PARKED) or 0) >= size and Page(),
                       lambda: str([told(one) for one in cluster.incidents(uid)]))
        incident = until("the act is done", 10, lambda: act(cluster, uid) == "Done" and cluster.incidents(uid)[0])
        reached(cluster, last)
        beside = nvml.settled()
        grown = by_pod(beside).get(hot["metadata"]["uid"], (0, 0))[0]
    crossed = first(reader, "the mark was passed", lambda used, _: used >= whole * TRIP / 100)
    gone = first(reader, "it left the device", lambda _, pods: pods.get(uid, 0) < image // 2, crossed)
    report.claim(uid not in by_pod(beside) and parked.of(name, PARKED) >= size,
                 "park: a pod that agreed is moved to the host",
                 f"{mib(image)} by the driver's list, {mib(parked.of(name, PARKED))} parked; {gone - crossed:.1f} s from the mark "
                 f"of {TRIP} % to its end on the device, {image / (gone - crossed) / 1e9:.2f} GB/s; "
                 f"{incident['spec']['evidence'].get('explanation', '')}")
    kept, restarts = same(cluster, hot, "hot")
    crowded = grown + image > whole or cluster.backend != "torch"
    report.claim(kept and crowded, "park: its neighbour grows into the room and is refused nothing",
                 f"{mib(grown)} and {mib(image)} beside the {mib(whole)} of the device; {restarts} restarts, "
                 f"{cluster.state('hot')['turn']} turns")
    back(report, nvml, cluster, cold, job, image)
    decision = until("the incident is closed", 60, lambda: closed(cluster, uid))
    found = cluster.incidents(uid)
    report.claim(len(found) == 1 and decision["state"] == "Succeeded", "park: one incident, and it ends well",
                 f"{len(found)}: {', '.join(told(one) for one in found)}")


def reached(cluster, size):
    until(f"hot holds {mib(size)}", 60, lambda: cluster.state("hot")["bytes"] + 16 * MIB >= size,
          lambda: f"(it says {cluster.state('hot')}, {cluster.statuses('hot')})")


def back(report, nvml, cluster, cold, job, image):
    """The neighbour leaves."""
    uid, name = cold["metadata"]["uid"], cold["metadata"]["name"]
    beats = len([line for line in job.lines() if "beat" in line])
    with Reader(nvml) as reader:
        cluster.remove("hot")
        until("the pod is back on the device", 60, lambda: by_pod(nvml.sample()).get(uid, (0, 0))[0] >= image * 9 // 10)
        until("it goes on", 30, lambda: len([line for line in job.lines() if "beat" in line]) > beats + 2, job.trouble)
    free = first(reader, "the neighbour's memory was free", lambda used, _: used < image // 2)
    there = first(reader, "it was back", lambda _, pods: pods.get(uid, 0) >= image * 9 // 10, free)
    until("nothing is parked any more", 10, lambda: not Page().of(name, PARKED))
    lines = [line for line in job.lines() if "beat" in line]
    kept, restarts = same(cluster, cold, "cold")
    pause = max(after["at"] - before["at"] for before, after in zip(lines, lines[1:]))
    report.claim(kept and all(line["intact"] for line in lines), "park: it is brought back, and its data is as it was",
                 f"{there - free:.1f} s after its neighbour's memory was free; {len(lines)} sums over all of it, those "
                 f"before and the {len(lines) - beats} after alike; it stood still for {pause:.1f} s; {restarts} restarts")


def act(cluster, uid):
    found = cluster.incidents(uid)
    return found and found[0].get("status", {}).get("observation", {}).get("act", {}).get("state")


def closed(cluster, uid):
    found = cluster.incidents(uid)
    decision = found[0].get("status", {}).get("decision", {}) if found else {}
    return decision if decision.get("state") in FINAL else None


def told(incident):
    status = incident.get("status", {})
    decision, carried = status.get("decision", {}), status.get("observation", {}).get("act", {})
    return (f"{incident['spec']['proposed']['action']} {decision.get('state')}/{decision.get('reason')} "
            f"{carried.get('state')} {carried.get('message', '')[:160]}")


# --- Reclaim ------------------------------------------------------------------------------------


def reclaim(report, nvml, cluster, total):
    """Guards have allocators give back what they keep; what PyTorch caches by itself no guard can give back."""
    until("the device is in nobody's use", 20, lambda: not nvml.sample().processes)
    unit = total // 128
    held, kept = 2 * unit, 32 * unit
    cases = {"pooled": allocator("backend:cudaMallocAsync")}
    if cluster.backend == "torch":
        cases["cached"] = allocator("backend:native")
    sizes = {"pooled": kept, "cached": 8 * unit}
    cluster.policy("reclaim", policy(50, 40, ["Reclaim"], total * 60 // 100, hold=0))
    try:
        for app in cases:
            cluster.create(app, guard=True)
        pods, jobs = {app: cluster.running(app, guard=True) for app in cases}, {}
        hot = cluster.deploy("hot", 512 * MIB)
        for app, environment in cases.items():
            jobs[app] = cluster.start(app, "keep", "actions_cases.py", "keep", held, sizes[app],
                                      "--backend", cluster.backend, **environment)
        before = {app: job.says("turn", 90) for app, job in jobs.items()}
        for app in cases:
            name = pods[app]["metadata"]["name"]
            until(f"the strength of {app} is Guard", 15,
                  lambda name=name: Page().strength(name) == "Guard" and Page().of(name, "highwater_guard_processes"))
            until(f"{app} keeps memory", 30, lambda app=app: last(jobs[app])["reserved"] >= sizes[app])
        press(report, nvml, cluster, pods, jobs, before, hot)
    finally:
        for app in (*cases, "hot"):
            cluster.remove(app)
        cluster.without_policy("reclaim")


def last(job):
    return [line for line in job.lines() if "turn" in line][-1]


def idle(line):
    """What a pool has and nobody uses, in bytes."""
    return line["reserved"] - line["allocated"]


def is_small(line, before):
    """Whether little is left of what was idle in a pool before."""
    return idle(line) <= idle(before) // KEPT


def press(report, nvml, cluster, pods, jobs, before, hot):
    sample = nvml.settled()
    whole, had = usable(sample), {app: by_pod(sample)[pod["metadata"]["uid"]][0] for app, pod in pods.items()}
    was = {app: last(job) for app, job in jobs.items()}
    count = Page().value("highwater_reclaims_total") or 0
    with Reader(nvml) as reader:
        cluster.target("hot", whole * 52 // 100 - sample.used + 512 * MIB, 16 * GIB)
        until("the level rises", 20, lambda: (Page().value("highwater_reclaims_total") or 0) > count,
              lambda: f"(in use {mib(nvml.memory().used)} of {mib(whole)})")
        try:
            until("the pool gives back", 10, lambda: is_small(last(jobs["pooled"]), was["pooled"]))
        except Failed:
            pass
        time.sleep(1)
    crossed = first(reader, "the mark was passed", lambda used, _: used >= whole // 2)
    after = {app: last(job) for app, job in jobs.items()}
    now = by_pod(nvml.settled())
    has = {app: now[pod["metadata"]["uid"]][0] for app, pod in pods.items()}
    lines = [line for line in jobs["pooled"].lines() if "turn" in line and line["at"] >= crossed]
    fell = next((line["at"] for line in lines if is_small(line, was["pooled"])), None)
    report.claim(fell is not None and has["pooled"] < had["pooled"] // 2,
                 f"reclaim: {KEPT - 1} of {KEPT} parts of what an allocator keeps come back",
                 f"{was['pooled']['allocator']}: allocated {mib(was['pooled']['allocated'])}, reserved "
                 f"{mib(was['pooled']['reserved'])} -> {mib(after['pooled']['reserved'])}; by the driver {mib(had['pooled'])} -> "
                 f"{mib(has['pooled'])}" + (f", {(fell - crossed) * 1e3:.0f} ms after the mark was passed" if fell else ""))
    if "cached" in jobs:
        report.say(f"      reclaim: {was['cached']['allocator']}: allocated {mib(was['cached']['allocated'])}, reserved "
                   f"{mib(was['cached']['reserved'])} -> {mib(after['cached']['reserved'])}; by the driver {mib(had['cached'])} -> "
                   f"{mib(has['cached'])}: what PyTorch caches is memory in use for the driver, and no guard gives it back")
    until("steps after it", 10, lambda: all(last(job)["turn"] > after[app]["turn"] + 20 for app, job in jobs.items()))
    results = {app: {line["result"] for line in job.lines() if "turn" in line} for app, job in jobs.items()}
    kept = [same(cluster, pod, app)[0] for app, pod in (*pods.items(), ("hot", hot))]
    report.claim(all(len(found) == 1 for found in results.values()) and all(kept),
                 "reclaim: steps after it compute the same, and nobody is ended",
                 ", ".join(f"{app} {last(job)['turn']} steps, results {sorted(results[app])}" for app, job in jobs.items()))
    level = until("the level is Normal", 10,
                  lambda: Page().value("highwater_device_level", device="0", mode="Enforce") == 0.0)
    about = [told(one) for pod in pods.values() for one in cluster.incidents(pod["metadata"]["uid"])]
    report.claim(level and not about, "reclaim: it was enough", f"the level is Normal, {len(about)} incidents {about}")


# --- reaction -----------------------------------------------------------------------------------


class Letters(threading.Thread):
    """Reads a pod's pressure file as often as it can, and keeps every change of its level."""

    def __init__(self, path):
        super().__init__(daemon=True)
        self.path, self.changes, self.ended = path, [], threading.Event()

    def run(self):
        known, level = None, None
        while not self.ended.is_set():
            try:
                found = os.stat(self.path).st_ino, os.stat(self.path).st_mtime_ns
                if found != known:
                    with open(self.path, encoding="utf-8") as file:
                        says = json.load(file)["level"]
                    known = found
                    if says != level:
                        level = says
                        self.changes.append((time.monotonic(), says))
            except (OSError, ValueError):
                pass
            time.sleep(0.0005)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.join()


def reaction(report, nvml, cluster, total, pulses=80):
    """From the moment that memory is taken to the pressure file that says so, the wait for the sample included."""
    until("the device is in nobody's use", 20, lambda: not nvml.sample().processes)
    size = total // 128 // (2 * MIB) * (2 * MIB) * 8
    cluster.policy("reaction", policy(4, 2, ["Signal"], total, hold=0, stay=0))
    try:
        pod = cluster.deploy("told", told=True)
        path = f"{KUBELET}/pods/{pod['metadata']['uid']}/volumes/kubernetes.io~empty-dir/highwater/pressure"
        with Letters(path) as letters:
            job = cluster.start("told", "pulse", "actions_cases.py", "pulse", size, pulses, "--backend", cluster.backend)
            job.says("pulses", 60 + 2 * pulses)
        lines = [line for line in job.lines() if "pulse" in line]
    finally:
        cluster.remove("told")
        cluster.without_policy("reaction")
    taken, silent = [], 0
    for line in lines:
        at = next((at for at, level in letters.changes
                   if level == "Critical" and line["asked"] <= at <= line["freed"] + INTERVAL), None)
        if at is None:
            silent += 1
        else:
            taken.append(at - line["asked"])
    taken.sort()
    if not taken:
        raise Failed(f"no pressure file said Critical: {len(letters.changes)} changes, {len(lines)} pulses at {path}")
    p99 = taken[min(int(len(taken) * 0.99), len(taken) - 1)]
    report.claim(silent == 0 and p99 <= GOAL, f"reaction: memory is taken -> Signal is written, p99 <= {GOAL * 1e3:.0f} ms",
                 f"{len(taken)} times, {silent} without: median {taken[len(taken) // 2] * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms, most "
                 f"{taken[-1] * 1e3:.0f} ms, least {taken[0] * 1e3:.0f} ms; the wait for the sample, {INTERVAL * 1e3:.0f} ms at most, is "
                 f"part of it; it took {(lines[0]['had'] - lines[0]['asked']) * 1e3:.1f} ms to take {mib(size)}")
