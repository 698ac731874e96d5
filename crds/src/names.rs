//! Names that more than one component must agree on.

/// The API group.
pub const GROUP: &str = "highwater.dev";

/// Annotation (`"true"`) that stops new acts: on the release namespace it holds for the whole
/// install, on a Node, a Namespace or a Pod for that object alone. Recovery goes on.
pub const PAUSED: &str = "highwater.dev/paused";

/// Label (`"true"`) on a Node that makes the agent close every device handle and report
/// Unmonitored.
pub const STAND_DOWN: &str = "highwater.dev/stand-down";

/// Label that NVIDIA's GPU operator puts on a Node while it upgrades the driver there. At
/// [`DRIVER_UPGRADE_RESTARTS`] the driver is about to be unloaded, which an open handle would stop:
/// like [`STAND_DOWN`].
pub const DRIVER_UPGRADE: &str = "nvidia.com/gpu-driver-upgrade-state";

/// The value of [`DRIVER_UPGRADE`] at which the driver is unloaded.
pub const DRIVER_UPGRADE_RESTARTS: &str = "pod-restart-required";

/// Pod annotation: a quantity that lowers the pod's quota. It can never raise it.
pub const POD_LIMIT: &str = "highwater.dev/limit";

/// Pod annotation: a quantity of memory that the pod preallocates by design and that does not
/// count towards a device's level. At most the pod's limit.
pub const POD_DECLARED: &str = "highwater.dev/declared";

/// Pod annotation by which a pod opts in to `Hook`: what its engine serves, and on which named
/// port, as `Preset` or `Preset:port` (without a port: `http`).
pub const POD_HOOK: &str = "highwater.dev/hook";

/// Pod annotation beside [`POD_HOOK`]: the model that Triton is to unload.
pub const POD_HOOK_MODEL: &str = "highwater.dev/hook-model";

/// Pod annotation: where the pod serves its framework's numbers in Prometheus' text format, on its own
/// address, as `port` or `port/path` (without a path: `/metrics`). Leak detection reads them.
pub const POD_METRICS: &str = "highwater.dev/metrics";

/// Pod label (`"true"`) by which a pod opts in to `Park`.
pub const PARK_LABEL: &str = "highwater.dev/park";

/// Pod annotation by which a pod agrees to be restarted where it is, at [`RESTART_IN_PLACE`].
pub const POD_RESTART: &str = "highwater.dev/restart";

/// The value of [`POD_RESTART`] that agrees.
pub const RESTART_IN_PLACE: &str = "InPlace";

/// The program in [`GUARD_VOLUME`] that a pod's readiness probe runs to opt in to `Unready`, by its
/// path in a container. It is given the path of the pressure file.
pub const READY_HELPER: &str = "/opt/highwater/ready";

/// Node annotation: the incident (`namespace/name/uid`) for which Highwater cordoned the node. Only
/// a cordon that has it is undone.
pub const CORDONED_FOR: &str = "highwater.dev/cordoned-for";

/// Node annotation: UUIDs of devices, with commas between, whose memory only a reset brings back.
/// Somebody who can reset them may take it as a request; it goes when the memory is back.
pub const RESET_REQUESTED: &str = "highwater.dev/reset-requested";

/// Label on every `DeviceTaintRule` that Highwater made: the node.
pub const TAINTED_NODE_LABEL: &str = "highwater.dev/tainted-node";

/// Incident annotation (an RFC 3339 time): the operator asks for an observation made after it.
pub const OBSERVE: &str = "highwater.dev/observe";

/// Annotation (an RFC 3339 time) on the leader election Lease: the release is being uninstalled.
/// Until then no operator that was running sets a taint, writes a plan or evicts.
pub const UNINSTALLING: &str = "highwater.dev/uninstalling";

/// Key of the node taint that `Freeze` sets (effect `NoSchedule`; the value is the level).
pub const PRESSURE_TAINT: &str = "highwater.dev/memory-pressure";

/// Name of the emptyDir volume by which a pod opts in to `Signal`.
pub const SIGNAL_VOLUME: &str = "highwater";

/// Name of the file in [`SIGNAL_VOLUME`] that carries the signal.
pub const SIGNAL_FILE: &str = "pressure";

/// Pod label (`"true"`) by which a pod opts in to the guard.
pub const GUARD_LABEL: &str = "highwater.dev/guard";

/// Name of the CSI driver whose inline volume brings the guard into a pod.
pub const GUARD_DRIVER: &str = "guard.highwater.dev";

/// Name of the volume of [`GUARD_DRIVER`] in a pod.
pub const GUARD_VOLUME: &str = "highwater-guard";

/// Where [`GUARD_VOLUME`] is mounted in a container.
pub const GUARD_MOUNT: &str = "/opt/highwater";

/// The file of [`GUARD_VOLUME`] that makes the loader bring the guard in, by its path in a
/// container. Its name in the volume is [`GUARD_PRELOAD_FILE`].
pub const GUARD_PRELOAD: &str = "/etc/ld.so.preload";

/// Name of the file behind [`GUARD_PRELOAD`] in [`GUARD_VOLUME`].
pub const GUARD_PRELOAD_FILE: &str = "ld.so.preload";

/// Node label (`"true"`, by the operator): every pod has at least strength `Reservation` on every
/// device of the node. A pod that must have it selects it.
pub const RESERVATION_LABEL: &str = "highwater.dev/reservation";

/// Node label (`"true"`, by the operator): every pod has strength `Kernel` on every device of the
/// node. A pod that must have it selects it.
pub const KERNEL_LIMITS_LABEL: &str = "highwater.dev/kernel-limits";

/// Label on every incident: the node whose agent reported it.
pub const NODE_LABEL: &str = "highwater.dev/node";

/// ConfigMap in the release namespace that holds the reserved remediation tokens.
pub const BUDGET_CONFIG_MAP: &str = "highwater-budget";

/// Name of the leader election Lease in the release namespace.
pub const LEADER_LEASE: &str = "highwater-operator";

/// `spec.controllerName`-like identity used as `reportingComponent` of Events by the operator.
pub const OPERATOR_COMPONENT: &str = "highwater-operator";

/// Reporting component of the agent's Events.
pub const AGENT_COMPONENT: &str = "highwater-agent";

/// Field managers for server-side apply. One a component and concern; no two may be equal.
pub mod manager {
    /// Agent: creates `GpuMemoryNode`, writes its status.
    pub const AGENT_NODE: &str = "highwater-agent/node";
    /// Agent: incident spec.
    pub const AGENT_INCIDENT: &str = "highwater-agent/incident";
    /// Agent: incident `status.observation`.
    pub const AGENT_OBSERVATION: &str = "highwater-agent/observation";
    /// Operator: policy status.
    pub const OPERATOR_POLICY: &str = "highwater-operator/policy-status";
    /// Operator: `GpuMemoryNode.spec`.
    pub const OPERATOR_PLAN: &str = "highwater-operator/node-plan";
    /// Operator: incident `status.decision`.
    pub const OPERATOR_DECISION: &str = "highwater-operator/decision";
    /// Operator: node labels that say what strength a node gives.
    pub const OPERATOR_STRENGTH: &str = "highwater-operator/strength";
    /// Operator: node taints.
    pub const OPERATOR_TAINT: &str = "highwater-operator/taint";
    /// Operator: reserved tokens.
    pub const OPERATOR_BUDGET: &str = "highwater-operator/budget";
    /// Operator: cordons of nodes and requests to reset devices.
    pub const OPERATOR_CORDON: &str = "highwater-operator/cordon";
    /// Operator: taints of DRA devices.
    pub const OPERATOR_DEVICE_TAINT: &str = "highwater-operator/device-taint";
    /// Operator: what an uninstall undoes.
    pub const OPERATOR_CLEANUP: &str = "highwater-operator/cleanup";

    /// Every manager, for the uniqueness test.
    pub const ALL: [&str; 12] = [
        AGENT_NODE,
        AGENT_INCIDENT,
        AGENT_OBSERVATION,
        OPERATOR_POLICY,
        OPERATOR_PLAN,
        OPERATOR_DECISION,
        OPERATOR_STRENGTH,
        OPERATOR_TAINT,
        OPERATOR_BUDGET,
        OPERATOR_CORDON,
        OPERATOR_DEVICE_TAINT,
        OPERATOR_CLEANUP,
    ];
}

/// Namespaces in which no act is ever taken, whatever a policy selects. The release namespace
/// is added to these at run time.
pub const SYSTEM_NAMESPACES: [&str; 3] = ["kube-system", "kube-public", "kube-node-lease"];

#[cfg(test)]
mod tests {
    use super::manager;

    #[test]
    fn field_managers_are_unique() {
        let mut all = manager::ALL.to_vec();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), manager::ALL.len());
    }
}
