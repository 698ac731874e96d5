//! The objects that scenarios apply.

use highwater_crds::names;
use serde_json::{Value, json};

use crate::NODE;

/// Where pods find the pressure file.
pub const PRESSURE_FILE: &str = "/var/run/highwater/pressure";

/// A model server: one pod of a Deployment that follows a workload script on one GPU share.
#[derive(Clone, Debug)]
pub struct ModelServer {
    name: String,
    script: String,
    labels: Value,
    annotations: Value,
    grace_period_seconds: i64,
    replicas: i32,
    gpus: i32,
    env: Vec<Value>,
    restricted: bool,
    node: Option<String>,
    spread: bool,
    ports: Vec<Value>,
    readiness: Value,
    priority_class: Option<String>,
}

impl ModelServer {
    /// A server with a name and the script that it follows.
    pub fn new(name: &str, script: &str) -> Self {
        Self {
            name: name.to_owned(),
            script: script.to_owned(),
            labels: json!({"app": name}),
            annotations: json!({}),
            grace_period_seconds: 1,
            replicas: 1,
            gpus: 1,
            env: Vec::new(),
            restricted: false,
            node: Some(NODE.to_owned()),
            spread: false,
            ports: Vec::new(),
            readiness: Value::Null,
            priority_class: None,
        }
    }

    /// Lets its pods run on another node than the one that scenarios look at.
    #[must_use]
    pub fn on(mut self, node: &str) -> Self {
        self.node = Some(node.to_owned());
        self
    }

    /// Lets its pods run on any node.
    #[must_use]
    pub fn anywhere(mut self) -> Self {
        self.node = None;
        self
    }

    /// Spreads its pods over the nodes.
    #[must_use]
    pub fn spread(mut self) -> Self {
        self.spread = true;
        self
    }

    /// Opts its pods in to `Hook`: the script serves the preset's endpoints at this port.
    #[must_use]
    pub fn hook(mut self, preset: &str, port: u16) -> Self {
        self.ports.push(json!({"name": "http", "containerPort": port}));
        self.annotation(names::POD_HOOK, preset)
    }

    /// Opts its pods in to `Unready`: their readiness probe runs the helper of the guard's volume.
    #[must_use]
    pub fn unready(mut self) -> Self {
        self.readiness = json!({
            "exec": {"command": [names::READY_HELPER, PRESSURE_FILE]},
            "periodSeconds": 1, "failureThreshold": 1, "timeoutSeconds": 5,
        });
        self.guarded()
    }

    /// Opts its pods in to `Park`.
    #[must_use]
    pub fn parkable(self) -> Self {
        self.label(names::PARK_LABEL, "true")
    }

    /// Lets its pods be restarted where they are.
    #[must_use]
    pub fn restarts_in_place(self) -> Self {
        self.annotation(names::POD_RESTART, names::RESTART_IN_PLACE)
    }

    /// Sets the priority class of its pods.
    #[must_use]
    pub fn priority_class(mut self, name: &str) -> Self {
        self.priority_class = Some(name.to_owned());
        self
    }

    /// Adds a label to its pods.
    #[must_use]
    pub fn label(mut self, key: &str, value: &str) -> Self {
        if let Some(labels) = self.labels.as_object_mut() {
            labels.insert(key.to_owned(), json!(value));
        }
        self
    }

    /// Adds an annotation to its pods.
    #[must_use]
    pub fn annotation(mut self, key: &str, value: &str) -> Self {
        if let Some(annotations) = self.annotations.as_object_mut() {
            annotations.insert(key.to_owned(), json!(value));
        }
        self
    }

    /// Sets `terminationGracePeriodSeconds` of its pods.
    #[must_use]
    pub fn grace_period_seconds(mut self, seconds: i64) -> Self {
        self.grace_period_seconds = seconds;
        self
    }

    /// Sets the number of its pods.
    #[must_use]
    pub fn replicas(mut self, replicas: i32) -> Self {
        self.replicas = replicas;
        self
    }

    /// Sets how many GPU shares each pod asks for; 0 for a pod that asks for none.
    #[must_use]
    pub fn gpus(mut self, gpus: i32) -> Self {
        self.gpus = gpus;
        self
    }

    /// Opts its pods in to the guard.
    #[must_use]
    pub fn guarded(self) -> Self {
        self.label(names::GUARD_LABEL, "true")
    }

    /// Sets a variable of its environment.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push(json!({"name": name, "value": value}));
        self
    }

    /// Lets its pods ask for no more than namespaces of level `restricted` allow.
    #[must_use]
    pub fn restricted(mut self) -> Self {
        self.restricted = true;
        self
    }

    /// The pod template.
    pub fn template(&self) -> Value {
        let (pod_security, container_security) = if self.restricted {
            (
                json!({"runAsNonRoot": true, "runAsUser": 65534, "seccompProfile": {"type": "RuntimeDefault"}}),
                json!({"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}}),
            )
        } else {
            (json!({}), json!({}))
        };
        let mut template = json!({
            "metadata": {"labels": self.labels, "annotations": self.annotations},
            "spec": {
                "terminationGracePeriodSeconds": self.grace_period_seconds,
                "securityContext": pod_security,
                "containers": [{
                    "name": "server",
                    "image": "highwater.local/workload:dev",
                    "imagePullPolicy": "Never",
                    "args": ["--script", self.script],
                    "env": self.env,
                    "securityContext": container_security,
                    "ports": self.ports,
                    "resources": {"limits": if self.gpus == 0 { json!({}) } else { json!({"nvidia.com/gpu": self.gpus.to_string()}) }},
                    "volumeMounts": [{"name": "highwater", "mountPath": "/var/run/highwater"}],
                }],
                "volumes": [{"name": "highwater", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}],
            },
        });
        // Scenarios look at one node; a second one may be up.
        if let Some(node) = &self.node {
            template["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": node});
        }
        if self.spread {
            template["spec"]["topologySpreadConstraints"] = json!([{
                "maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule",
                "labelSelector": {"matchLabels": {"app": self.name}},
            }]);
        }
        if let Some(class) = &self.priority_class {
            template["spec"]["priorityClassName"] = json!(class);
        }
        if !self.readiness.is_null() {
            template["spec"]["containers"][0]["readinessProbe"] = self.readiness.clone();
        }
        template
    }

    /// The Deployment.
    pub fn deployment(&self) -> Value {
        json!({
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": self.name},
            "spec": {
                "replicas": self.replicas,
                "selector": {"matchLabels": {"app": self.name}},
                "strategy": {"type": "Recreate"},
                "template": self.template(),
            },
        })
    }

    /// A bare pod, owned by nobody.
    pub fn bare_pod(&self) -> Value {
        let template = self.template();
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": self.name, "labels": self.labels, "annotations": self.annotations},
            "spec": template["spec"],
        })
    }
}

/// The Deployment of a model server, for short.
pub fn deployment(name: &str, script: &str) -> Value {
    ModelServer::new(name, script).deployment()
}

/// A policy with this spec.
#[allow(clippy::needless_pass_by_value)] // made on the spot by every caller
pub fn policy(name: &str, spec: Value) -> Value {
    json!({
        "apiVersion": "highwater.dev/v1alpha1",
        "kind": "GpuMemoryPolicy",
        "metadata": {"name": name},
        "spec": spec,
    })
}

/// The spec of a policy that restarts pods of one namespace which hold more than `limit` for
/// half a second, and nothing else.
pub fn enforce(namespace: &str, limit: &str) -> Value {
    json!({
        "mode": "Enforce",
        "nodes": {},
        "namespaces": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "quota": {
            "default": {"limit": limit},
            "breach": {
                "tolerance": "256Mi",
                "holdMilliseconds": 500,
                "actions": [{"type": "Signal"}, {"type": "Restart", "restart": {"gracePeriodSeconds": 1}}],
            },
        },
        "remediation": {
            "budget": {
                "maxUnavailable": 1,
                "haltAtCondemnedPercent": 100,
                "rates": [{"scope": "Workload", "maxActions": 1, "windowMinutes": 60}],
            },
        },
    })
}

/// A policy's breaker on devices, with `Critical` alone.
pub fn critical(trip_percent: i32, clear_percent: i32, actions: &Value) -> Value {
    json!({
        "scope": "Device", "minimumStayMilliseconds": 500,
        "critical": {"tripPercent": trip_percent, "clearPercent": clear_percent, "holdMilliseconds": 200, "actions": actions},
    })
}

/// The spec of a policy that does nothing but what this breaker asks for, in one namespace, as often
/// as need be. Each pod may hold `limit`, and is owed so little that every pod with memory is over.
pub fn broken_by(namespace: &str, limit: &str, breaker: &Value) -> Value {
    let mut spec = enforce(namespace, limit);
    spec["quota"]["breach"]["actions"] = json!([]);
    spec["quota"]["default"]["guarantee"] = json!("1Gi");
    spec["breakers"] = json!([breaker]);
    spec["remediation"]["budget"]["rates"] =
        json!([{"scope": "Policy", "maxActions": 100, "windowMinutes": 60}]);
    spec
}

/// A priority class.
pub fn priority_class(name: &str, value: i32) -> Value {
    json!({"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}, "value": value})
}
