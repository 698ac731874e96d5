"""What the cluster says, for waiting and for looking around.

    describe.py                          nodes, pods, policies, nodes' GPU state, incidents, warnings
    describe.py ready-node NAME          exit 0 once the node is Ready
    describe.py allocatable NAME COUNT   ... once it offers so many nvidia.com/gpu
    describe.py monitored NAME           ... once its GpuMemoryNode says Monitored
    describe.py available NS DEPLOYMENT  ... once the Deployment is Available
    describe.py rolled-out NS DAEMONSET  ... once all pods of the DaemonSet are ready
    describe.py csi-driver NODE DRIVER   ... once the node's kubelet knows the volume driver
"""

import json
import sys

from kube import Api

GROUP = "/apis/highwater.dev/v1alpha1"


def condition(thing, kind):
    for entry in (thing or {}).get("status", {}).get("conditions", []):
        if entry["type"] == kind:
            return entry
    return {"status": "absent", "reason": "", "message": ""}


def expect(true, thing, kind):
    found = condition(thing, kind)
    if found["status"] != true:
        raise SystemExit(f"{kind} is {found['status']} {found['reason']} {found['message']}")


def pod_line(pod):
    status = pod.get("status", {})
    states = []
    for container in status.get("containerStatuses", []):
        state = dict(container.get("state", {}), last=container.get("lastState", {}))
        waiting = state.get("waiting") or state.get("terminated") or state["last"].get("terminated") or {}
        states.append(f"{container['name']} ready={container['ready']} restarts={container['restartCount']} "
                      f"{waiting.get('reason', '')} {waiting.get('message', '')}".strip())
    blocked = [c["message"] for c in status.get("conditions", []) if c["status"] == "False" and c.get("message")]
    name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    return f"pod {name}: {status.get('phase')} {status.get('reason', '')} {'; '.join(states or blocked)}"


def everything(api):
    for node in api.get("/api/v1/nodes")["items"]:
        print("node", node["metadata"]["name"], "Ready", condition(node, "Ready")["status"],
              "allocatable", node["status"].get("allocatable", {}).get("nvidia.com/gpu"),
              "taints", node["spec"].get("taints", []))
    for pod in api.get("/api/v1/pods")["items"]:
        print(pod_line(pod))
    for plural in ("gpumemorypolicies", "gpumemorynodes", "gpumemoryincidents"):
        found = api.find(f"{GROUP}/{plural}")
        for thing in (found or {}).get("items", []):
            print(f"{plural} {thing['metadata']['name']}: spec {json.dumps(thing['spec'])} "
                  f"status {json.dumps(thing.get('status', {}))}")
    for event in api.get("/api/v1/events")["items"]:
        if event.get("type") == "Warning" or event["involvedObject"].get("namespace") == "gpu-check":
            about = event["involvedObject"]
            print(f"event {event['type']} {about['kind']}/{about['name']} {event['reason']}: {event['message']}")


def main():
    api = Api()
    command, *rest = sys.argv[1:] or ["everything"]
    if command == "everything":
        everything(api)
    elif command == "ready-node":
        expect("True", api.get(f"/api/v1/nodes/{rest[0]}"), "Ready")
    elif command == "allocatable":
        offered = api.get(f"/api/v1/nodes/{rest[0]}")["status"].get("allocatable", {}).get("nvidia.com/gpu")
        if int(offered or 0) < int(rest[1]):
            raise SystemExit(f"the node offers {offered} nvidia.com/gpu, not {rest[1]}")
    elif command == "monitored":
        expect("True", api.find(f"{GROUP}/gpumemorynodes/{rest[0]}"), "Monitored")
    elif command == "available":
        expect("True", api.get(f"/apis/apps/v1/namespaces/{rest[0]}/deployments/{rest[1]}"), "Available")
    elif command == "rolled-out":
        status = api.get(f"/apis/apps/v1/namespaces/{rest[0]}/daemonsets/{rest[1]}")["status"]
        if not status["desiredNumberScheduled"] or status.get("numberReady") != status["desiredNumberScheduled"]:
            raise SystemExit(f"{status.get('numberReady')} of {status['desiredNumberScheduled']} pods are ready")
    elif command == "csi-driver":
        drivers = (api.find(f"/apis/storage.k8s.io/v1/csinodes/{rest[0]}") or {}).get("spec", {}).get("drivers") or []
        if rest[1] not in [driver["name"] for driver in drivers]:
            raise SystemExit(f"the node has the volume drivers {drivers}")
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
