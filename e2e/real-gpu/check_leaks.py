"""Programs that leak, and programs that use much rightly (leaks/), as pods under a policy with `leaks`: four hours of
each in four minutes, side by side, the policy's times divided by as much.

Nobody is restarted (`DryRun`), so that each lives its story to its end.
"""

import os
import subprocess
import sys
import time

from common import GROUP, MIB, NAMESPACE, Failed, Page, by_pod, mib, until
from kube import ApiError

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "leaks"))

import variants  # noqa: E402

SPEED = 68  # so many times as fast as the clock
CAPACITY = variants.CAPACITY * MIB
PORT = 9500  # of the pods' endpoints, each at its own address
STAGGER = 0.3  # seconds from the start of one program to the next
START = 80  # seconds in which programs come up
LIMIT = 290  # seconds for all of it
LEAD = 10  # minutes of the story: an act that comes later comes too late
OUT_OF_MEMORY = 9  # how programs.py exits then
SUSPECT, ACT = 1, 2
# A node keeps at most 16 incidents of this kind open. The last of each five; of managed memory one that a process list shows;
# no ranks, since each of them would have a device, or a pod, of its own.
CHOSEN = ("tensor-4", "tensor-5", "graph-5", "cache-5", "raw-4", "raw-5", "replay-4", "replay-5", "managed-4",
          "warmup-5", "doubling-5", "batch-5", "fragmentation-5", "kv-5", "swing-5", "swap-5")
MODES = {"tensor": "HeldByFramework", "graph": "HeldByFramework", "cache": "HeldByFramework", "raw": "OutsideFramework",
         "replay": "PerReplay", "managed": "HostOrManaged"}
NEED_TORCH = ("graph", "managed")  # to be what they are


def policy():
    return {"mode": "DryRun", "nodes": {}, "namespaces": {"matchLabels": {"highwater-check": "yes"}},
            "quota": {"default": {"limit": str(CAPACITY)}},
            "leaks": {"sampleMilliseconds": 150, "bucketMilliseconds": 900,
                      "blockMilliseconds": [2700, 9000, 26100, 105300], "warmUpMilliseconds": 8800,
                      "horizonMilliseconds": 52900, "leadMilliseconds": 8800, "actions": [{"type": "Restart"}]},
            "remediation": {"victims": {"ownerKinds": ["ReplicaSet"]},
                            "budget": {"maxUnavailable": 1, "haltAtCondemnedPercent": 100}}}


class Watched:
    """A program in its pod, and what was seen of it. Times are of the clock."""

    def __init__(self, variant):
        self.variant, self.app = variant, variant.name
        self.pod, self.job, self.begun, self.ended, self.ending = None, None, None, None, None
        self.peak, self.restarts = 0, 0
        self.stages = {}  # (memory, stage) -> when the agent's page first showed it
        self.told = {}  # stage -> when an incident first showed it
        self.mode, self.proposed, self.shape = None, "", ""

    def minute(self, at):
        """Of the story."""
        return None if at is None or self.begun is None else (at - self.begun) * SPEED / 60

    def first(self, stage, memory="Device"):
        """In which minute the agent first went so far."""
        found = [at for (of, reached), at in self.stages.items() if of == memory and reached >= stage]
        return self.minute(min(found, default=None))

    def end(self, how, at):
        self.ending, self.ended = how, at

    @property
    def is_told(self):
        """Whether it came to the end that its story has."""
        return self.begun is not None and self.ending == ("out of memory" if self.variant.leaks else "story told")

    @property
    def lead(self):
        """Minutes from the act to the end; `None` where one of them did not come, or the act came before the leak."""
        act, end = self.first(ACT), self.minute(self.ended)
        if act is None or not self.is_told or act < (self.variant.onset or 0):
            return None
        return end - act


# --- pods ---------------------------------------------------------------------------------------


def start(cluster, programs):
    """Pods first, then what answers at their addresses, then in each pod its program. The process that answers."""
    kind = "cuda" if cluster.backend == "torch" else "simulated"
    served = []
    for one in programs:
        cluster.create(one.app, own_address=True, annotations={"highwater.dev/metrics": str(PORT)})
    for one in programs:
        try:
            one.pod = cluster.running(one.app)
            served.append(f"{address(cluster, one)}={cluster.folder(one.app)}/story")
        except (Failed, ApiError) as error:
            one.end(f"did not start: {error}"[:160], time.monotonic())
    command = [sys.executable, os.path.join(os.path.dirname(os.path.abspath(__file__)), "leaks_case.py"), "serve", str(PORT)]
    server = subprocess.Popen([*command, *served], stdin=subprocess.DEVNULL)
    for one in programs:
        if one.ending is None:
            one.job = cluster.start(one.app, "story", "leaks_case.py", "run", one.app, SPEED, kind, "/control/story",
                                    OMP_NUM_THREADS=1, MALLOC_MMAP_THRESHOLD_=1048576, **one.variant.environment)
            time.sleep(STAGGER)
    return server


def address(cluster, one):
    return until(f"the pod of {one.app} has an address", 20, lambda: cluster.pod(one.app)["status"].get("podIP"))


def remove(cluster, programs):
    """All at once, then waits for each."""
    for one in programs:
        cluster.api.delete(f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{one.app}")
        for pod in cluster.pods(one.app):
            cluster.api.delete(f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}", grace=1)
    for one in programs:
        cluster.remove(one.app)


# --- what is seen -------------------------------------------------------------------------------


def follow(one, page, held, at, started):
    """What the program says, what the driver says of it, and what the agent thinks."""
    words = {key: line[key] for line in one.job.lines() for key in ("begun", "ended") if key in line}
    one.begun = words.get("begun", one.begun)
    if "ended" in words:
        code = words["ended"]
        one.end({OUT_OF_MEMORY: "out of memory", 0: "story told"}.get(code, f"ended with {code} {one.job.trouble()}"[:300]), at)
        return
    if one.job.ended():
        one.end(f"its pod's job ended {one.job.trouble()}"[:300], at)
        return
    if one.begun is None:
        if at - started > START:
            halt(one)
            one.end(f"did not come up {one.job.trouble()}"[:300], at)
        return
    size = held.get(one.pod["metadata"]["uid"], (0, 0))[0]
    one.peak = max(one.peak, size)
    for labels, stage in page.series.get("highwater_pod_leak_stage", []):
        if labels["pod"] == one.pod["metadata"]["name"] and stage >= SUSPECT:
            one.stages.setdefault((labels["memory"], int(stage)), at)
    if size >= CAPACITY:
        # As a device of that size would do.
        halt(one)
        one.end("out of memory", at)


def halt(one):
    with open(one.job.path("stop"), "w", encoding="utf-8"):
        pass


def hear(cluster, programs):
    """What incidents say."""
    found = cluster.api.get(f"{GROUP}/namespaces/{NAMESPACE}/gpumemoryincidents")["items"]
    by_uid = {one.pod["metadata"]["uid"]: one for one in programs if one.pod}
    for incident in found:
        spec = incident["spec"]
        one = by_uid.get(spec.get("subject", {}).get("uid"))
        if one is None or spec["kind"] != "Leak":
            continue
        one.proposed = spec.get("proposed", {}).get("action", "")
        for finding in (spec["evidence"].get("leak"), incident.get("status", {}).get("observation", {}).get("leak")):
            if finding:
                one.told.setdefault(finding["stage"], time.monotonic())
                one.mode, one.shape = finding.get("mode") or one.mode, finding["class"]


def watch(nvml, cluster, programs, deadline):
    """Until every story is told."""
    started, turn = time.monotonic(), 0
    while time.monotonic() < deadline and any(one.ending is None for one in programs):
        at, page, held = time.monotonic(), Page(), by_pod(nvml.sample())
        for one in programs:
            if one.ending is None:
                follow(one, page, held, at, started)
        turn += 1
        if turn % 8 == 0:
            hear(cluster, programs)
        time.sleep(max(at + 0.25 - time.monotonic(), 0))
    for one in programs:
        if one.ending is None:
            halt(one)
            one.end("cut off", time.monotonic())
    time.sleep(1)
    hear(cluster, programs)
    for one in programs:
        for pod in cluster.pods(one.app) if one.pod else []:
            same = pod["metadata"]["uid"] == one.pod["metadata"]["uid"]
            one.restarts += sum(c["restartCount"] for c in pod["status"].get("containerStatuses", [])) + (not same)


# --- what is said -------------------------------------------------------------------------------


def minutes(number):
    return "-" if number is None else f"{number:.0f}"


def table(report, programs):
    report.say(f"      {'program':16} {'onset':>5} {'suspect':>7} {'act':>5} {'end':>5} {'lead':>5} {'peak':>5} "
               f"{'class':12} {'mode':18} {'incident':16} what became of it (minutes of the story)")
    for one in programs:
        incident = ("Act" if "Act" in one.told else "Suspect" if one.told else "-") + (f" {one.proposed}" if one.told else "")
        host = one.first(SUSPECT, "Host")
        report.say(f"      {one.app:16} {minutes(one.variant.onset if one.variant.leaks else None):>5} "
                   f"{minutes(one.first(SUSPECT)):>7} {minutes(one.first(ACT)):>5} {minutes(one.minute(one.ended)):>5} "
                   f"{minutes(one.lead):>5} {100 * one.peak // CAPACITY:>4}% {one.shape or '-':12} {one.mode or '-':18} "
                   f"{incident:16} {one.ending}" + ("" if host is None else f"; host memory suspected at {host:.0f}"))


def judge(report, programs):
    leaks = [one for one in programs if one.variant.leaks]
    right = [one for one in programs if not one.variant.leaks]
    odd = [f"{one.app} {one.ending}" for one in programs if not one.is_told]
    report.claim(not odd, "leaks: every program lives its story",
                 f"{len(programs) - len(odd)} of {len(programs)}" + "".join(f"; {what}" for what in odd))
    found = [one for one in leaks if one.lead is not None and one.lead >= LEAD and one.told]
    leads = sorted(one.lead for one in found)
    missed = [f"{one.app} (suspect {minutes(one.first(SUSPECT))}, act {minutes(one.first(ACT))}, "
              f"end {minutes(one.minute(one.ended))}, {len(one.told)} stages told)"
              for one in leaks if one not in found]
    report.claim(len(found) == len(leaks), f"leaks: an act is due {LEAD} minutes or more before each end",
                 f"{len(found)} of {len(leaks)}" + (f", {leads[0]:.0f} to {leads[-1]:.0f} minutes before it" if leads else "")
                 + (": " + ", ".join(f"{one.app} {one.lead:.0f}" for one in found) if found else "")
                 + (f"; not: {', '.join(missed)}" if missed else ""))
    said = [one for one in found if "Act" in one.told]
    report.claim(len(said) == len(found) > 0, "leaks: the incident is raised to act as well",
                 f"{len(said)} of {len(found)}"
                 + "".join(f"; {one.app} stays at {'/'.join(sorted(one.told))}" for one in found if one not in said))
    acted = [one for one in right if "Act" in one.told or one.first(ACT) is not None or one.first(ACT, "Host") is not None]
    suspected = [one.app for one in right if one not in acted and (one.told or one.stages)]
    # One that did not live would be left alone for nothing.
    lived = [one for one in right if one.begun is not None and one.peak]
    touched = [one.app for one in programs if one.restarts]
    report.claim(not acted and len(lived) == len(right) and not touched, "leaks: what uses much rightly is left alone",
                 f"{len(right) - len(acted)} of {len(right)} without an act; suspected: {', '.join(suspected) or 'none'}"
                 + (f"; acted on: {', '.join(one.app for one in acted)}" if acted else "")
                 + (f"; restarted: {', '.join(touched)}" if touched else "; nobody restarted"))
    named = [one for one in leaks if one.mode == MODES[one.variant.kind]]
    report.claim(len(named) == len(leaks), "leaks: who holds what grows is named",
                 f"{len(named)} of {len(leaks)}: " + ", ".join(
                     f"{one.app} {one.mode}" + ("" if one in named else f" (is {MODES[one.variant.kind]})") for one in leaks))


def scrapes():
    """What came of the agent's readings of the programs' numbers."""
    found = Page().series.get("highwater_framework_scrapes_total", [])
    return ", ".join(f"{labels['result']} {count:.0f}" for labels, count in found) or "none"


def check(report, nvml, cluster):
    until("the device is in nobody's use", 20, lambda: not nvml.sample().processes)
    begun, names = time.monotonic(), CHOSEN
    if cluster.backend != "torch":
        names = [name for name in CHOSEN if variants.BY_NAME[name].kind not in NEED_TORCH]
    programs = [Watched(variants.BY_NAME[name]) for name in names]
    cluster.policy("leaks", policy())
    server = None
    try:
        server = start(cluster, programs)
        watch(nvml, cluster, programs, begun + LIMIT)
        up = [one.begun - begun for one in programs if one.begun is not None]
        report.say(f"      leaks: {len(up)} of {len(programs)} programs are up, the last after {max(up, default=0):.0f} s; each "
                   f"may come to {mib(CAPACITY)}; {variants.MINUTES} minutes of each story, {SPEED} times as fast as the clock; "
                   f"their numbers read: {scrapes()}")
        table(report, programs)
        judge(report, programs)
    finally:
        if server:
            server.kill()
            server.wait()
        remove(cluster, programs)
        cluster.without_policy("leaks")
