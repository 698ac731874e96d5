"""Checks Highwater's ledger and acts, its pool and its guard on a real GPU against an independent reader of NVML.

Prints one line a claim with its numbers and `ok` or `FAIL`; exits 0 if every claim held.
"""

import argparse
import os
import statistics
import sys
import time
import traceback
from datetime import datetime

import check_actions
import check_guard
import check_leaks
import check_pool
from common import (
    GIB, GROUP, INTERVAL, MIB, NOISE, ROUND, Cluster, Failed, Page, Reader, Report, by_pod, component, mib, resident, until,
)
from kube import ApiError
from nvml import Nvml

# --- the checks ---------------------------------------------------------------------------------


def call_cost(report, nvml):
    def microseconds(call):
        taken = []
        for _ in range(2000):
            begin = time.perf_counter()
            call()
            taken.append((time.perf_counter() - begin) * 1e6)
        taken.sort()
        return f"median {statistics.median(taken):.0f} us, p99 {taken[int(len(taken) * 0.99)]:.0f} us"

    report.say(f"      NVML through Python: memory {microseconds(nvml.memory)}; "
               f"three process lists {microseconds(nvml.processes)}")


def at_rest(report, nvml, pods):
    """The ledger against the driver while nothing moves."""
    worst, residual, sums, missing = 0, 0, True, 0
    for _ in range(20):
        before, page, after = nvml.settled(), Page(), nvml.settled()
        if before.processes != after.processes or before.used != after.used:
            continue
        held = by_pod(after)
        for name, uid in pods.items():
            said, (size, count) = page.pod(name), held.get(uid, (0, 1))
            missing += said is None
            worst = max(worst, abs((said or 0) - size) / count)
        buckets = page.buckets()
        sums &= sum(buckets.values()) == int(page.value("highwater_device_capacity_bytes", device="0") or -1)
        listed = sum(size for size, _ in held.values())
        residual = max(residual, abs(buckets.get("unexplained", 0) - (after.used - listed)))
        time.sleep(INTERVAL)
    processes = len(after.processes)
    report.claim(missing == 0 and worst <= NOISE, "at rest: each pod against NVML, at most 2 MiB a process",
                 f"largest difference {mib(worst)}, {len(pods)} pods, {processes} processes")
    report.claim(sums, "at rest: the buckets add up to the device",
                 f"sum of {len(buckets)} buckets = {sum(buckets.values())} bytes; "
                 + ", ".join(f"{name} {mib(size)}" for name, size in sorted(buckets.items()) if size))
    report.claim(residual <= NOISE * processes, "at rest: what no process explains, as NVML says it",
                 f"used {mib(after.used)}, in process lists {mib(listed)}, unexplained {mib(after.used - listed)}, "
                 f"largest difference to the agent {mib(residual)}")


def agent_process(cluster):
    for pid, program in component(cluster, "agent").items():
        if program == "agent":
            return pid
    raise Failed("the agent's process is not found")


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cost(report, cluster, seconds):
    """What the agent costs while it samples and nobody asks it anything."""
    pid = agent_process(cluster)
    before, cpu, begin = Page(), cpu_seconds(pid), time.monotonic()
    time.sleep(seconds)
    cpu, took, after = cpu_seconds(pid) - cpu, time.monotonic() - begin, Page()

    def grown(name, **labels):
        return (after.value(name, **labels) or 0) - (before.value(name, **labels) or 0)

    count = grown("highwater_sample_duration_seconds_count")
    mean = grown("highwater_sample_duration_seconds_sum") / count if count else float("nan")
    bounds = sorted((float(labels["le"]), labels["le"]) for labels, _ in
                    after.series.get("highwater_sample_duration_seconds_bucket", []))
    p99 = next((bound for bound, text in bounds
                if grown("highwater_sample_duration_seconds_bucket", le=text) >= 0.99 * count), float("inf"))
    rate = grown("highwater_samples_total") / took
    report.claim(rate >= 0.95 / INTERVAL, "the agent keeps its interval of 100 ms",
                 f"{rate:.2f} rounds a second over {took:.0f} s")
    report.claim(cpu / took <= 0.01, "the agent takes at most 1 % of a core",
                 f"{100 * cpu / took:.2f} % over {took:.0f} s; a round of samples {mean * 1e6:.0f} us mean, "
                 f"99 % within {p99 * 1e6:.0f} us")
    of = f"{mib(resident(pid))}: {mib(resident(pid, 'RssAnon'))} of its own, {mib(resident(pid, 'RssFile'))} of files (program and libraries)"
    report.claim(resident(pid) <= 25 * MIB, "the agent is at most 25 MiB resident", of)


def while_growing(report, nvml, cluster, pods, seconds, step):
    """The ledger against the driver while both pods grow."""
    outside, worst, scrapes, sums, missing, growth = 0, 0, 0, True, 0, 0
    unexplained = (0, 0)
    with Reader(nvml) as reader:
        time.sleep(2 * INTERVAL)
        for name in pods:
            held = cluster.state(name)["bytes"]
            cluster.target(name, held + step * seconds, step)
        end = time.monotonic() + seconds
        pages = []
        while time.monotonic() < end:
            pages.append(Page())
            time.sleep(0.21)  # not a multiple of the interval
        time.sleep(INTERVAL)
    first, last = reader.samples[0][1], reader.samples[-1][1]
    grown = {name: last.get(uid, 0) - first.get(uid, 0) for name, uid in pods.items()}
    for page in pages:
        window = reader.window(page.asked - INTERVAL - ROUND, page.answered)
        scrapes += 1
        for name, uid in pods.items():
            read = [held.get(uid, 0) for _, held in window]
            said = page.pod(name)
            missing += said is None
            beyond = max(min(read) - (said or 0), (said or 0) - max(read), 0)
            outside = max(outside, beyond)
            worst = max(worst, abs((said or 0) - read[-1]))
            growth = max(growth, max(read) - min(read))
        buckets = page.buckets()
        sums &= sum(buckets.values()) == int(page.value("highwater_device_capacity_bytes", device="0") or -1)
        unexplained = (min(unexplained[0], buckets.get("unexplained", 0)),
                       max(unexplained[1], buckets.get("unexplained", 0)))
    grew = min(grown.values()) >= 0.8 * step * seconds
    report.claim(grew, f"two pods grow for {seconds} s",
                 ", ".join(f"{name} by {mib(size)}" for name, size in grown.items())
                 + f", {mib(step)} a second asked; {len(reader.times)} readings of the driver")
    report.claim(scrapes > 0 and missing == 0 and outside <= NOISE,
                 "growing: each pod within one interval's growth",
                 f"{scrapes} scrapes x {len(pods)} pods: beyond it by at most {mib(outside)}; largest difference to "
                 f"the driver {mib(worst)}, largest growth in an interval {mib(growth)}")
    report.claim(sums, "growing: the buckets add up to the device", f"on each of {scrapes} pages")
    bound = len(pods) * (growth + NOISE) + 64 * MIB
    torn = [page.value("highwater_device_torn_samples_total", device="0") or 0 for page in (pages[0], pages[-1])]
    report.claim(max(-unexplained[0], unexplained[1]) <= bound, "growing: unexplained stays in what can grow meanwhile",
                 f"from {mib(unexplained[0])} to {mib(unexplained[1])}; {torn[1] - torn[0]:.0f} torn samples")


def seconds_between(incident, begin, end):
    """From one RFC 3339 time of an incident to another."""
    def parse(text):
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    return parse(end(incident)) - parse(begin(incident))


def story(report, nvml, cluster, title, kind, neighbour, size, rate):
    """A pod grows until it is evicted: everything that must be true of it."""
    quiet = cluster.pod(neighbour)
    quiet_uid, quiet_turn = quiet["metadata"]["uid"], cluster.state(neighbour)["turn"]
    hog = cluster.deploy("hog", 512 * MIB, stubborn=True)
    uid = hog["metadata"]["uid"]
    quiet_bytes = by_pod(nvml.settled()).get(quiet_uid, (0, 0))[0]
    level = 0
    with Reader(nvml) as reader:
        cluster.target("hog", size, rate)

        def incident():
            nonlocal level
            level = max(level, Page().value("highwater_device_level", device="0", mode="Enforce") or 0)
            return cluster.incidents(uid)

        until(f"an incident about {hog['metadata']['name']}", 40, incident, lambda: f"(it holds {cluster.state('hog')})")
        cluster.target("hog", 512 * MIB, 4 * GIB)  # for its successor: who has more keeps it

        def closed():
            decision = cluster.incidents(uid)[0].get("status", {}).get("decision", {})
            return decision if decision.get("state") in ("Succeeded", "Suppressed", "Cancelled", "Failed") else None

        try:
            decision = until("the incident is closed", 45, closed)
        except Failed:
            decision = cluster.incidents(uid)[0].get("status", {}).get("decision", {})
        until("its processes are gone", 10, lambda: uid not in by_pod(nvml.sample()))
    found = cluster.incidents(uid)
    spec = found[0]["spec"]
    report.claim(len(found) == 1 and spec["kind"] == kind and spec["mode"] == "Enforce", f"{title}: one incident",
                 f"{len(found)} of kind {spec['kind']}; used {mib(spec['evidence'].get('usedBytes', 0))}, "
                 f"limit {mib(spec['evidence'].get('limitBytes', 0))}, level {spec['evidence'].get('level')} at "
                 f"{spec['evidence'].get('levelPercent')} %: {spec['evidence'].get('explanation', '')}")
    reached = ""
    if decision.get("actedAt"):
        reaction = seconds_between(found[0], lambda i: i["spec"]["evidence"]["at"],
                                   lambda i: i["status"]["decision"]["actedAt"])
        closing = seconds_between(found[0], lambda i: i["status"]["decision"]["actedAt"],
                                  lambda i: i["status"]["decision"]["since"])
        reached = f"; sample to eviction {reaction * 1000:.0f} ms, eviction to verified {closing:.1f} s"
    report.claim(decision.get("state") == "Succeeded", f"{title}: the pod is evicted, and that is verified",
                 f"{decision.get('state')}/{decision.get('reason')}: {decision.get('message', '')}{reached}")
    peak = max((held.get(uid, 0) for _, held in reader.samples), default=0)
    after = nvml.settled()
    listed = sum(size for size, _ in by_pod(after).values())
    left = after.used - listed
    report.claim(uid not in by_pod(after) and abs(left) <= NOISE * max(len(after.processes), 1) + 64 * MIB,
                 f"{title}: its memory is back (NVML)",
                 f"it held {mib(peak)}; used now {mib(after.used)}, all but {mib(left)} of it by living processes")
    quiet_now = cluster.pod(neighbour)
    restarts = sum(one["restartCount"] for one in quiet_now["status"]["containerStatuses"])
    held = by_pod(after).get(quiet_uid, (0, 0))[0]
    turn = until("the neighbour works on", 5, lambda: max(cluster.state(neighbour)["turn"] - quiet_turn, 0))
    report.claim(quiet_now["metadata"]["uid"] == quiet_uid and restarts == 0 and held == quiet_bytes,
                 f"{title}: the neighbour is untouched",
                 f"same pod, {restarts} restarts, {mib(held)} before and after, worked {turn} turns meanwhile")
    return level


def enforce(total, quota, breakers=()):
    spec = {"mode": "Enforce", "nodes": {}, "namespaces": {"matchLabels": {"highwater-check": "yes"}}, "quota": quota,
            "remediation": {"victims": {"ownerKinds": ["ReplicaSet"]},
                            "budget": {"maxUnavailable": 1, "haltAtCondemnedPercent": 100}}}
    if breakers:
        spec["breakers"] = list(breakers)
    spec["quota"].setdefault("rules", []).append(
        {"name": "neighbour", "pods": {"matchLabels": {"app": "one"}}, "guarantee": str(total // 2),
         "limit": str(total * 9 // 10)})
    return spec


def quota_story(report, nvml, cluster, total):
    limit = total * 8 // 100
    quota = {"default": {"limit": str(limit)},
             "breach": {"tolerance": "256Mi", "holdMilliseconds": 500,
                        "actions": [{"type": "Restart", "restart": {"gracePeriodSeconds": 1}}]}}
    cluster.policy("quota", enforce(total, quota))
    story(report, nvml, cluster, "quota", "QuotaBreach", "one", total * 15 // 100, total * 4 // 100)
    cluster.remove("hog")
    cluster.api.delete(f"{GROUP}/gpumemorypolicies/quota")


def breaker_story(report, nvml, cluster, total):
    sample = nvml.settled()
    base = 100 * sample.used // (sample.total - sample.reserved)
    quota = {"default": {"guarantee": str(total // 50), "limit": str(total * 9 // 10)}}
    breaker = {"scope": "Device", "minimumStayMilliseconds": 500,
               "warning": {"tripPercent": base + 12, "clearPercent": base + 9, "holdMilliseconds": 0,
                           "actions": [{"type": "Signal"}]},
               "emergency": {"tripPercent": base + 20, "clearPercent": base + 16, "holdMilliseconds": 0,
                             "actions": [{"type": "Restart", "restart": {"gracePeriodSeconds": 0}}]}}
    cluster.policy("breaker", enforce(total, quota, [breaker]))
    level = story(report, nvml, cluster, "breaker", "Breaker", "one", total * 30 // 100, total * 4 // 100)

    def normal():
        return Page().value("highwater_device_level", device="0", mode="Enforce") == 0.0

    until("the level falls to Normal", 15, normal)
    report.claim(level == 3, "breaker: the device's level rises to Emergency and falls again",
                 f"from {base} % in use; Emergency at {base + 20} %, left below {base + 16} %")
    cluster.remove("hog")
    cluster.api.delete(f"{GROUP}/gpumemorypolicies/breaker")


def machine(report, nvml, cluster):
    cores = os.cpu_count()
    version = "v2" if os.path.exists("/sys/fs/cgroup/cgroup.controllers") else "v1"
    daemon_set = cluster.api.get("/apis/apps/v1/namespaces/highwater-system/daemonsets/highwater-agent")
    pod = daemon_set["spec"]["template"]["spec"]
    privileged = pod["containers"][0]["securityContext"].get("privileged", False)
    sample = nvml.settled()
    report.say(f"{nvml.product()}, driver {nvml.driver()}, {mib(sample.total)} ({mib(sample.reserved)} reserved); "
               f"kernel {os.uname().release}, {cores} cores, cgroup {version}, {datetime.now().date()}")
    report.say(f"pods: {cluster.backend}; the agent opens the devices by driver.privileged={str(privileged).lower()}, "
               f"runtime class {pod.get('runtimeClassName', 'none')}; before the first pod NVML says "
               f"{mib(sample.used)} used, {len(sample.processes)} processes\n")
    return sample.total


# What is checked unless sections are named: with the others it would take longer than such a machine is lent for.
USUAL = ("rest", "cost", "growth", "quota", "breaker", "pool", "guard")
SECTIONS = (*USUAL, "park", "reclaim", "reaction", "leaks")


class Sections:
    """The parts of the check, each by its name; what one needs of another it makes."""

    def __init__(self, report, arguments):
        self.report, self.arguments = report, arguments
        self.nvml, self.cluster = Nvml(), Cluster(arguments)
        self.total = machine(report, self.nvml, self.cluster)
        self.pods = {}

    def have(self, *apps):
        """Pods that hold some memory."""
        for app in apps:
            if not self.cluster.pods(app):
                pod = self.cluster.deploy(app, 4 * GIB if self.total > 40 * GIB else self.total // 20)
                self.pods[pod["metadata"]["name"]] = pod["metadata"]["uid"]

    def rest(self):
        call_cost(self.report, self.nvml)
        self.have("one", "two")
        until("the agent has both pods", 10, lambda: all(Page().pod(name) for name in self.pods))
        time.sleep(1)
        at_rest(self.report, self.nvml, self.pods)

    def cost(self):
        self.have("one", "two")
        cost(self.report, self.cluster, self.arguments.cost_seconds)

    def growth(self):
        self.have("one", "two")
        names = {self.cluster.pod(app)["metadata"]["name"]: app for app in ("one", "two")}
        grow, seconds = Growing(self.cluster, names), self.arguments.grow_seconds
        while_growing(self.report, self.nvml, grow, self.pods, seconds, self.total // 5 // seconds)
        self.cluster.remove("two")

    def quota(self):
        self.have("one")
        quota_story(self.report, self.nvml, self.cluster, self.total)

    def breaker(self):
        self.have("one")
        breaker_story(self.report, self.nvml, self.cluster, self.total)

    def pool(self):
        check_pool.check(self.report, self.nvml, self.cluster, self.total)

    def guard(self):
        check_guard.check(self.report, self.nvml, self.cluster, self.total)

    def park(self):
        check_actions.park(self.report, self.nvml, self.cluster, self.total)

    def reclaim(self):
        check_actions.reclaim(self.report, self.nvml, self.cluster, self.total)

    def reaction(self):
        check_actions.reaction(self.report, self.nvml, self.cluster, self.total)

    def leaks(self):
        check_leaks.check(self.report, self.nvml, self.cluster)


def check(report, arguments):
    sections = Sections(report, arguments)
    for name in SECTIONS:
        if name not in arguments.only:
            continue
        begun = time.monotonic()
        if name in ("pool", "guard", "park", "reclaim", "reaction", "leaks"):
            # They want the device for themselves.
            for app in ("one", "two", "hog"):
                sections.cluster.remove(app)
        try:
            getattr(sections, name)()
        except (Failed, ApiError, RuntimeError, OSError, LookupError, ValueError, TypeError) as error:
            report.claim(False, f"{name}: could not be carried through", f"{type(error).__name__}: {error}")
            traceback.print_exc()
        report.say(f"      ({name}: {time.monotonic() - begun:.0f} s)")


def chosen(text):
    names = text.split(",") if text else list(USUAL)
    unknown = set(names) - set(SECTIONS)
    if unknown:
        raise argparse.ArgumentTypeError(f"no section {', '.join(sorted(unknown))}; there are: {', '.join(SECTIONS)}")
    return names


class Growing:
    """Targets and states by the name of the pod rather than of its Deployment."""

    def __init__(self, cluster, names):
        self.cluster, self.names = cluster, names

    def state(self, pod):
        return self.cluster.state(self.names[pod])

    def target(self, pod, size, rate):
        self.cluster.target(self.names[pod], size, rate)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--node", required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--report", required=True)
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--grow-seconds", type=int, default=120)
    parser.add_argument("--cost-seconds", type=int, default=30)
    parser.add_argument("--only", type=chosen, default=list(USUAL))
    arguments = parser.parse_args()
    report = Report(arguments.report)
    check(report, arguments)
    sys.exit(0 if report.summary() else 1)


if __name__ == "__main__":
    main()
