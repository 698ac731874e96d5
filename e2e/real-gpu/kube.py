"""A small client of the Kubernetes API, for machines without kubectl.

    kube.py apply FILE.yaml...     server-side apply of every document
    kube.py get PATH               print what the API server answers, for instance /api/v1/nodes

KUBECONFIG_FOLDER holds ca.crt, admin.crt and admin.key; KUBE_SERVER is host:port.
"""

import http.client
import json
import os
import re
import ssl
import sys
import time
import urllib.parse

# What the bundle applies. Everything else is named in full by its caller.
PLURALS = {
    "ClusterRole": "clusterroles", "ClusterRoleBinding": "clusterrolebindings", "ConfigMap": "configmaps",
    "CSIDriver": "csidrivers", "CustomResourceDefinition": "customresourcedefinitions", "DaemonSet": "daemonsets",
    "Deployment": "deployments", "FlowSchema": "flowschemas", "GpuMemoryPolicy": "gpumemorypolicies",
    "MutatingAdmissionPolicy": "mutatingadmissionpolicies",
    "MutatingAdmissionPolicyBinding": "mutatingadmissionpolicybindings",
    "Namespace": "namespaces", "PodDisruptionBudget": "poddisruptionbudgets",
    "PriorityLevelConfiguration": "prioritylevelconfigurations", "Role": "roles",
    "RoleBinding": "rolebindings", "Service": "services", "ServiceAccount": "serviceaccounts",
    "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": "validatingadmissionpolicybindings",
}


class ApiError(Exception):
    """The API server refused a request."""

    def __init__(self, status, message):
        super().__init__(f"{status}: {message}")
        self.status = status


class Api:
    """One connection to the API server, opened anew where it broke."""

    def __init__(self, folder=None, server=None):
        folder = folder or os.environ["KUBECONFIG_FOLDER"]
        self.server = server or os.environ.get("KUBE_SERVER", "127.0.0.1:6443")
        self.context = ssl.create_default_context(cafile=os.path.join(folder, "ca.crt"))
        self.context.load_cert_chain(os.path.join(folder, "admin.crt"), os.path.join(folder, "admin.key"))
        self.connection = None

    def request(self, method, path, body=None, kind="application/json"):
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        for last in (False, True):
            if self.connection is None:
                self.connection = http.client.HTTPSConnection(self.server, context=self.context, timeout=10)
            try:
                self.connection.request(method, path, data, {"Content-Type": kind, "Accept": "application/json"})
                response = self.connection.getresponse()
                answer = response.read()
                break
            except (http.client.HTTPException, OSError):
                self.connection.close()
                self.connection = None
                if last:
                    raise
        text = answer.decode(errors="replace")
        if response.status >= 300:
            try:
                text = json.loads(text)["message"]
            except (ValueError, KeyError, TypeError):
                pass
            raise ApiError(response.status, text)
        return json.loads(text) if text.startswith(("{", "[")) else text

    def get(self, path):
        return self.request("GET", path)

    def find(self, path):
        """What is there, or None."""
        try:
            return self.get(path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def delete(self, path, grace=None):
        try:
            self.request("DELETE", path, None if grace is None else {"gracePeriodSeconds": grace})
        except ApiError as error:
            if error.status != 404:
                raise

    def apply(self, document):
        """Server-side apply of a dictionary, or of one document of YAML."""
        if isinstance(document, dict):
            document = json.dumps(document)  # JSON is YAML
        path = locate(document)
        for attempt in range(40):
            try:
                return self.request("PATCH", f"{path}?fieldManager=e2e-real-gpu&force=true",
                                    document.encode(), "application/apply-patch+yaml")
            except ApiError as error:
                # A kind or a namespace may be a moment old.
                if error.status != 404 or attempt == 39:
                    raise ApiError(error.status, f"{path}: {error}") from error
                time.sleep(0.25)
        raise AssertionError("the loop returns or raises")


def locate(document):
    """The path of a document's object."""
    if document.startswith("{"):
        value = json.loads(document)
        version, kind, metadata = value["apiVersion"], value["kind"], value["metadata"]
    else:
        version, kind = (_field(document, name) for name in ("apiVersion", "kind"))
        block = re.search(r"^metadata:[ \t]*\n((?:[ #].*\n|\n)+)", document + "\n", re.MULTILINE)
        if not block:
            raise SystemExit(f"a document without a metadata block:\n{document[:300]}")
        metadata = dict(re.findall(r"^  (name|namespace): *[\"']?([^\"'\n]+)", block.group(1), re.MULTILINE))
    if kind not in PLURALS:
        raise SystemExit(f"kube.py does not know the plural of {kind}: add it to PLURALS")
    root = "/api/v1" if version == "v1" else f"/apis/{version}"
    namespace = f"/namespaces/{metadata['namespace']}" if "namespace" in metadata else ""
    return f"{root}{namespace}/{PLURALS[kind]}/{urllib.parse.quote(metadata['name'])}"


def _field(document, name):
    found = re.search(rf"^{name}: *[\"']?([^\"'\s]+)", document, re.MULTILINE)
    if not found:
        raise SystemExit(f"a document without {name}:\n{document[:300]}")
    return found.group(1)


def documents(text):
    """The documents of a YAML stream that hold anything."""
    for document in re.split(r"^---[^\n]*\n", text, flags=re.MULTILINE):
        if re.search(r"^[^#\s]", document, re.MULTILINE):
            yield document


def main():
    command, *rest = sys.argv[1:]
    api = Api()
    if command == "apply":
        for path in rest:
            with open(path, encoding="utf-8") as file:
                for document in documents(file.read()):
                    made = api.apply(document)
                    print(f"{made['kind']} {made['metadata']['name']}")
    elif command == "get":
        print(json.dumps(api.get(rest[0]), indent=1))
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
