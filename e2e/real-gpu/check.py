"""Checks Highwater's ledger and acts on a real GPU against an independent reader of NVML.

Prints one line a claim with its numbers and `ok` or `FAIL`; exits 0 if every claim held.
"""

import argparse
import bisect
import json
import os
import re
import shutil
import statistics
import sys
import threading
import time
import traceback
import urllib.request
from datetime import datetime

from describe import condition
from kube import Api, ApiError
from nvml import Nvml

MIB, GIB = 1 << 20, 1 << 30
NAMESPACE = "gpu-check"
GROUP = "/apis/highwater.dev/v1alpha1"
NOISE = 2 * MIB  # what rounding may leave, a process
INTERVAL = 0.1  # of the agent's samples, in seconds
ROUND = 0.02  # a round of samples may begin or last this much later
METRICS = "http://127.0.0.1:9440/metrics"
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Failed(Exception):
    """Something that was waited for did not come."""


class Report:
    """Claims as they are decided."""

    def __init__(self, path):
        self.file = open(path, "w", encoding="utf-8")
        self.lines = []

    def say(self, text=""):
        print(text, flush=True)
        print(text, file=self.file, flush=True)

    def claim(self, holds, claim, numbers):
        self.lines.append(bool(holds))
        self.say(f"{'ok  ' if holds else 'FAIL'}  {claim:<58} {numbers}")

    def summary(self):
        held = sum(self.lines)
        self.say(f"\n{held} of {len(self.lines)} claims hold")
        return bool(self.lines) and held == len(self.lines)


def until(what, seconds, attempt, detail=lambda: ""):
    """Calls `attempt` until it returns something true; `detail` says why it did not."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        last = attempt()
        if last:
            return last
        time.sleep(0.05)
    raise Failed(f"after {seconds} s still not: {what} {detail()}".rstrip())


def mib(size):
    return f"{size / MIB:.1f} MiB" if abs(size) < 100 * GIB else f"{size / GIB:.2f} GiB"


# --- what the agent says ------------------------------------------------------------------------


class Page:
    """One scrape of the agent's metrics."""

    LINE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
    LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

    def __init__(self):
        self.asked = time.monotonic()
        with DIRECT.open(METRICS, timeout=5) as answer:
            text = answer.read().decode()
        self.answered = time.monotonic()
        self.series = {}
        for line in text.splitlines():
            found = self.LINE.match(line)
            if found:
                labels = dict(self.LABEL.findall(found.group(2) or ""))
                self.series.setdefault(found.group(1), []).append((labels, float(found.group(3))))

    def value(self, name, **labels):
        """The one series with these labels; None if it is missing."""
        for have, value in self.series.get(name, []):
            if all(have.get(key) == wanted for key, wanted in labels.items()):
                return value
        return None

    def buckets(self):
        return {labels["bucket"]: int(value) for labels, value in
                self.series.get("highwater_device_memory_bytes", []) if labels["device"] == "0"}

    def pod(self, name):
        value = self.value("highwater_pod_memory_used_bytes", namespace=NAMESPACE, pod=name, device="0")
        return None if value is None else int(value)


# --- what the driver says -----------------------------------------------------------------------


OWNERS = {}  # of processes: a process does not change its pod


def pod_of(pid):
    """UID of the pod that a process belongs to."""
    if pid not in OWNERS:
        try:
            with open(f"/proc/{pid}/cgroup", encoding="utf-8") as file:
                found = re.search(r"pod([0-9a-f]{8}[-_][0-9a-f_-]{27})", file.read())
        except OSError:
            return None
        OWNERS[pid] = found.group(1).replace("_", "-") if found else None
    return OWNERS[pid]


def by_pod(sample):
    """Pod UID -> (bytes, number of processes)."""
    pods = {}
    for pid, used in sample.processes.items():
        size, count = pods.get(pod_of(pid), (0, 0))
        pods[pod_of(pid)] = (size + (used or 0), count + 1)
    return pods


class Reader(threading.Thread):
    """Reads the driver every few milliseconds and keeps what it read."""

    def __init__(self, nvml):
        super().__init__(daemon=True)
        self.nvml, self.times, self.samples, self.ended = nvml, [], [], threading.Event()

    def run(self):
        while not self.ended.is_set():
            sample = self.nvml.sample()
            pods = {uid: size for uid, (size, _) in by_pod(sample).items()}
            self.samples.append((sample.used, pods))
            self.times.append(sample.at)
            time.sleep(0.004)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.join()

    def window(self, begin, end):
        """What was read in that time, and the last before and the first after."""
        first = max(bisect.bisect_left(self.times, begin) - 1, 0)
        return self.samples[first:bisect.bisect_right(self.times, end) + 1]


# --- pods ---------------------------------------------------------------------------------------


class Cluster:
    """The pods of the check."""

    def __init__(self, arguments):
        self.api, self.work, self.backend, self.node = Api(), arguments.work, arguments.backend, arguments.node
        with open(os.path.join(self.work, "needs.json"), encoding="utf-8") as file:
            self.needs = json.load(file)
        self.api.apply({"apiVersion": "v1", "kind": "Namespace",
                        "metadata": {"name": NAMESPACE, "labels": {"highwater-check": "yes"}}})

    def folder(self, name):
        return os.path.join(self.work, "control", name)

    def target(self, name, size, rate):
        """Tells a pod up to how much it holds, and how fast it gets there."""
        path = os.path.join(self.folder(name), "target.json")
        with open(path + ".new", "w", encoding="utf-8") as file:
            json.dump({"bytes": size, "bytesPerSecond": rate}, file)
        os.rename(path + ".new", path)

    def state(self, name):
        try:
            with open(os.path.join(self.folder(name), "state.json"), encoding="utf-8") as file:
                return json.load(file)
        except (OSError, ValueError):
            return {"bytes": 0, "turn": 0, "reached": False}

    def deploy(self, name, size, stubborn=False):
        """A Deployment of one pod that holds `size`; the pod once it does."""
        shutil.rmtree(self.folder(name), ignore_errors=True)
        os.makedirs(self.folder(name))
        self.target(name, size, 4 * GIB)
        folders = self.needs["folders"]
        mounts = [{"name": f"python-{i}", "mountPath": path, "readOnly": True} for i, path in enumerate(folders)]
        mounts += [{"name": "program", "mountPath": "/highwater", "readOnly": True},
                   {"name": "control", "mountPath": "/control"}]
        volumes = [{"name": f"python-{i}", "hostPath": {"path": path, "type": "Directory"}}
                   for i, path in enumerate(folders)]
        volumes += [{"name": "program", "hostPath": {"path": os.path.join(self.work, "pod")}},
                    {"name": "control", "hostPath": {"path": self.folder(name)}}]
        command = [self.needs["executable"], "/highwater/workload.py", "run", "/control",
                   "--backend", self.backend] + (["--ignore-sigterm"] if stubborn else [])
        env = {"PYTHONPATH": ":".join(self.needs["packages"]), "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/tmp"}
        container = {"name": "main", "image": "highwater.local/python:dev", "imagePullPolicy": "Never",
                     "command": command, "env": [{"name": key, "value": value} for key, value in env.items()],
                     "resources": {"limits": {"nvidia.com/gpu": "1"}}, "volumeMounts": mounts,
                     "terminationMessagePolicy": "FallbackToLogsOnError"}
        self.api.apply({
            "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {"replicas": 1, "selector": {"matchLabels": {"app": name}}, "template": {
                "metadata": {"labels": {"app": name}},
                "spec": {"hostNetwork": True, "dnsPolicy": "Default", "terminationGracePeriodSeconds": 20,
                         "automountServiceAccountToken": False, "containers": [container], "volumes": volumes}}}})
        until(f"{name} holds {mib(size)}", 60, lambda: self.state(name)["reached"],
              lambda: f"(it says {self.state(name)}, its pod {self.statuses(name)})")
        return self.pod(name)

    def pods(self, name):
        return self.api.get(f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector=app%3D{name}")["items"]

    def statuses(self, name):
        return [json.dumps(pod["status"].get("containerStatuses", pod["status"].get("conditions")))[:600]
                for pod in self.pods(name)]

    def pod(self, name):
        live = [pod for pod in self.pods(name) if "deletionTimestamp" not in pod["metadata"]]
        if len(live) != 1:
            raise Failed(f"{name} has {len(live)} pods, not 1")
        return live[0]

    def remove(self, name):
        self.api.delete(f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{name}")
        for pod in self.pods(name):
            self.api.delete(f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}", grace=1)
        until(f"the pods of {name} are gone", 40, lambda: not self.pods(name))

    def incidents(self, uid):
        found = self.api.get(f"{GROUP}/namespaces/{NAMESPACE}/gpumemoryincidents")["items"]
        return [one for one in found if one["spec"].get("subject", {}).get("uid") == uid]

    def policy(self, name, spec):
        self.api.apply({"apiVersion": "highwater.dev/v1alpha1", "kind": "GpuMemoryPolicy",
                        "metadata": {"name": name}, "spec": spec})
        path = f"{GROUP}/gpumemorypolicies/{name}"

        def is_(kind):
            return condition(self.api.get(path), kind)

        until(f"policy {name} is Programmed", 20, lambda: is_("Programmed")["status"] == "True",
              lambda: f"({is_('Accepted')} {is_('Programmed')})")
        plan = f"{GROUP}/gpumemorynodes/{self.node}"

        def followed():
            node = self.api.get(plan)
            return node["spec"].get("layers") and \
                node.get("status", {}).get("observedGeneration") == node["metadata"]["generation"]

        until(f"the agent follows the plan of {name}", 20, followed)


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
    pods = cluster.api.get("/api/v1/namespaces/highwater-system/pods?"
                           "labelSelector=app.kubernetes.io%2Fcomponent%3Dagent")["items"]
    uid = pods[0]["metadata"]["uid"]
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if pod_of(int(entry)) == uid and os.path.basename(os.readlink(f"/proc/{entry}/exe")) == "agent":
                return int(entry)
        except OSError:
            continue
    raise Failed("the agent's process is not found")


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(pid, kind="VmRSS"):
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        return int(re.search(kind + r":\s+(\d+) kB", file.read()).group(1)) * 1024


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
    if decision.get("evictedAt"):
        reaction = seconds_between(found[0], lambda i: i["spec"]["evidence"]["at"],
                                   lambda i: i["status"]["decision"]["evictedAt"])
        closing = seconds_between(found[0], lambda i: i["status"]["decision"]["evictedAt"],
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


def check(report, arguments):
    nvml, cluster = Nvml(), Cluster(arguments)
    total = machine(report, nvml, cluster)
    call_cost(report, nvml)
    pods = {}

    def ledger():
        for name in ("one", "two"):
            pod = cluster.deploy(name, 4 * GIB if total > 40 * GIB else total // 20)
            pods[pod["metadata"]["name"]] = pod["metadata"]["uid"]
        until("the agent has both pods", 10, lambda: all(Page().pod(name) for name in pods))
        time.sleep(1)
        at_rest(report, nvml, pods)

    def growing():
        names = {cluster.pod(app)["metadata"]["name"]: app for app in ("one", "two")}
        grow = Growing(cluster, names)
        while_growing(report, nvml, grow, pods, arguments.grow_seconds, total // 5 // arguments.grow_seconds)
        cluster.remove("two")

    sections = [
        ("ledger at rest", ledger),
        ("cost of the agent", lambda: cost(report, cluster, arguments.cost_seconds)),
        ("ledger under growth", growing),
        ("quota", lambda: quota_story(report, nvml, cluster, total)),
        ("breaker", lambda: breaker_story(report, nvml, cluster, total)),
    ]
    for title, section in sections:
        try:
            section()
        except (Failed, ApiError, RuntimeError, OSError, LookupError, ValueError) as error:
            report.claim(False, f"{title}: could not be carried through", f"{type(error).__name__}: {error}")
            traceback.print_exc()


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
    arguments = parser.parse_args()
    report = Report(arguments.report)
    check(report, arguments)
    sys.exit(0 if report.summary() else 1)


if __name__ == "__main__":
    main()
