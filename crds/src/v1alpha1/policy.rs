//! `GpuMemoryPolicy`: what a platform team asks of a set of GPUs and of the pods on them.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::ByteSize;

/// A policy for the memory of the GPUs that it selects.
///
/// Watermarks bind devices, whoever uses them; `namespaces` and pod rules bound only whom
/// Highwater may act on.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "highwater.dev",
    version = "v1alpha1",
    kind = "GpuMemoryPolicy",
    plural = "gpumemorypolicies",
    shortname = "gmp",
    category = "highwater",
    status = "GpuMemoryPolicyStatus",
    derive = "PartialEq",
    printcolumn(name = "Mode", type_ = "string", json_path = ".spec.mode"),
    printcolumn(name = "Priority", type_ = "integer", json_path = ".spec.priority"),
    printcolumn(
        name = "Accepted",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Accepted')].status"
    ),
    printcolumn(
        name = "Programmed",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Programmed')].status"
    ),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Programmed')].reason"
    ),
    printcolumn(name = "Nodes", type_ = "integer", json_path = ".status.nodes", priority = 1),
    printcolumn(name = "Devices", type_ = "integer", json_path = ".status.devices", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.mode != 'Enforce' || (has(self.remediation) && has(self.remediation.budget))")
        .message("mode Enforce needs remediation.budget: say how many pods may be down at once"),
    validation = Rule::new("!has(self.leaks)")
        .message("leaks is not yet served by this version: remove it")
)]
pub struct GpuMemoryPolicySpec {
    /// What this policy may do. `Observe` measures; `DryRun` also writes incidents that say what
    /// it would have done; `Enforce` acts.
    #[serde(default)]
    pub mode: Mode,

    /// Which policy wins where two set the same tuning field: the higher, then the older object,
    /// then the name. Caps (limits and budgets) do not look at it: the stricter one holds.
    #[serde(default = "default_priority")]
    #[schemars(range(min = 0, max = 1000))]
    pub priority: i32,

    /// The nodes whose devices this policy governs. `{}` selects every node that has a GPU.
    pub nodes: LabelSelector,

    /// The devices of these nodes. Absent: all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices: Option<DeviceSelector>,

    /// The namespaces whose pods quota and acts may concern. Absent: every namespace. System
    /// namespaces and the release namespace never match.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespaces: Option<LabelSelector>,

    /// The reservation pool. Of it, `driverReserve` is served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<Pool>,

    /// How much memory a pod may have on each device that it uses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota: Option<Quota>,

    /// Watermarks, at most one set a scope.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 3))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["scope".into()]))]
    pub breakers: Vec<Breaker>,

    /// Leak detection. Not yet served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leaks: Option<Leaks>,

    /// Whom acts may concern and how many of them there may be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remediation: Option<Remediation>,
}

fn default_priority() -> i32 {
    100
}

/// What a policy may do.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
pub enum Mode {
    /// Measure only.
    #[default]
    Observe,
    /// Measure, and write incidents that say what would have been done.
    DryRun,
    /// Act, within the budget.
    Enforce,
}

/// Which devices of a node.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceSelector {
    /// Product names as the driver gives them, exact or with one trailing `*`. Empty: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(length(min = 1, max = 96), pattern(r"^[^*]*\*?$")))]
    pub products: Vec<String>,

    /// Whole devices, MIG instances, or both. Empty: both.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 2))]
    pub partitions: Vec<Partition>,
}

/// How a device is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum Partition {
    /// An undivided GPU.
    Whole,
    /// A MIG instance.
    Mig,
}

/// The reservation pool of a device.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.sizePercent) && !has(self.minSize) && !has(self.maxPercent)")
        .message("pool.sizePercent, pool.minSize and pool.maxPercent are not yet served by this version: remove them (driverReserve is served)")
)]
pub struct Pool {
    /// Share of the device that the pool holds at first. Not yet served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100))]
    pub size_percent: Option<i32>,

    /// Least size of the pool. Not yet served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_size: Option<ByteSize>,

    /// Greatest share of the device that the pool may grow to. Not yet served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100))]
    pub max_percent: Option<i32>,

    /// Memory set aside for the driver itself, never promised to a pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver_reserve: Option<DriverReserve>,
}

/// Memory set aside for the driver: the larger of the two, and never less than the driver
/// itself says it has reserved.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DriverReserve {
    /// Share of the device's memory.
    #[serde(default)]
    #[schemars(range(min = 0, max = 50))]
    pub percent: i32,

    /// Least size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_size: Option<ByteSize>,
}

/// Quotas, for each pod and device: all containers together, CUDA contexts included.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Quota {
    /// For a pod that matches no rule, so that dropping a label never frees it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default: Option<DefaultQuota>,

    /// The first rule that matches a pod holds for it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub rules: Vec<QuotaRule>,

    /// What happens when a pod holds more than its limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub breach: Option<Breach>,
}

/// The quota of pods that match no rule.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.guarantee) || quantity(string(self.guarantee)).compareTo(quantity(string(self.limit))) <= 0")
        .message("guarantee must not be above limit")
)]
pub struct DefaultQuota {
    /// Memory the pod is owed on the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guarantee: Option<ByteSize>,

    /// Memory the pod may have on the device.
    pub limit: ByteSize,
}

/// The quota of the pods that a selector matches.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.guarantee) || quantity(string(self.guarantee)).compareTo(quantity(string(self.limit))) <= 0")
        .message("guarantee must not be above limit"),
    validation = Rule::new("!has(self.minimumStrength) || self.minimumStrength == 'Observe'")
        .message("of minimumStrength only Observe is served by this version")
)]
pub struct QuotaRule {
    /// Name of the rule, shown wherever it decided something.
    #[schemars(length(min = 1, max = 63), pattern(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))]
    pub name: String,

    /// The pods.
    pub pods: LabelSelector,

    /// Memory the pod is owed on the device. Its *due* is this, else the limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guarantee: Option<ByteSize>,

    /// Memory the pod may have on the device.
    pub limit: ByteSize,

    /// The weakest enforcement with which a new pod may run. Of these, `Observe` is served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minimum_strength: Option<Strength>,
}

/// How firmly a quota is enforced, from weakest to strongest.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
pub enum Strength {
    /// Measured: a breach is found afterwards.
    #[default]
    Observe,
    /// What nobody is owed is held back.
    Reservation,
    /// Refused at the call, in the pod.
    Guard,
    /// Refused by the driver.
    Kernel,
}

/// What happens when a pod holds more than its limit.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.actions) || self.actions.all(a, a.type != 'Freeze')")
        .message("Freeze is an action of breakers, not of a quota breach: remove it")
)]
pub struct Breach {
    /// How far above the limit is still let pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tolerance: Option<ByteSize>,

    /// How long the pod must stay above before anything is done, in milliseconds.
    #[serde(default = "default_breach_hold")]
    #[schemars(range(min = 0, max = 600_000))]
    pub hold_milliseconds: i32,

    /// What is done, cheapest first. Restart must be asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub actions: Vec<Action>,
}

fn default_breach_hold() -> i32 {
    2000
}

/// A set of watermarks. Levels are in percent of the memory that can be used, after the driver's
/// reserve and after memory that pods declared as preallocated.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.scope == 'Device'")
        .message("of breakers only scope Device is served by this version"),
    validation = Rule::new("has(self.warning) || has(self.critical) || has(self.emergency)")
        .message("give at least one of warning, critical and emergency"),
    validation = Rule::new("!has(self.warning) || !has(self.critical) || (self.warning.tripPercent < self.critical.tripPercent && self.warning.clearPercent <= self.critical.clearPercent)")
        .message("levels are out of order: warning must trip below critical, and clear no higher"),
    validation = Rule::new("!has(self.critical) || !has(self.emergency) || (self.critical.tripPercent < self.emergency.tripPercent && self.critical.clearPercent <= self.emergency.clearPercent)")
        .message("levels are out of order: critical must trip below emergency, and clear no higher"),
    validation = Rule::new("!has(self.warning) || !has(self.emergency) || (self.warning.tripPercent < self.emergency.tripPercent && self.warning.clearPercent <= self.emergency.clearPercent)")
        .message("levels are out of order: warning must trip below emergency, and clear no higher")
)]
pub struct Breaker {
    /// What the levels are measured on.
    pub scope: BreakerScope,

    /// How long a level lasts at least before it may fall again, in milliseconds.
    #[serde(default = "default_minimum_stay")]
    #[schemars(range(min = 0, max = 600_000))]
    pub minimum_stay_milliseconds: i32,

    /// The lowest mark.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<Watermark>,

    /// The middle mark.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub critical: Option<Watermark>,

    /// The highest mark.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub emergency: Option<Watermark>,

    /// Whom Restart may concern when no pod is over its due.
    #[serde(default)]
    pub when_nobody_is_over: WhenNobodyIsOver,
}

fn default_minimum_stay() -> i32 {
    2000
}

/// What a breaker measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum BreakerScope {
    /// Use of a whole device or MIG instance.
    Device,
    /// Use of the reservation pool. Not yet served.
    Pool,
    /// Use of one pod against its limit. Not yet served.
    Pod,
}

/// One mark of a breaker.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.clearPercent < self.tripPercent")
        .message("clearPercent must be below tripPercent: a breaker needs room between them, or it flaps")
)]
pub struct Watermark {
    /// The level is entered at this percentage or above.
    #[schemars(range(min = 1, max = 100))]
    pub trip_percent: i32,

    /// The level is left below this percentage.
    #[schemars(range(min = 0, max = 99))]
    pub clear_percent: i32,

    /// How long use must stay at or above `tripPercent` before the level is entered, in
    /// milliseconds.
    #[serde(default = "default_breaker_hold")]
    #[schemars(range(min = 0, max = 600_000))]
    pub hold_milliseconds: i32,

    /// What is done on entering the level, once an episode.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub actions: Vec<Action>,
}

fn default_breaker_hold() -> i32 {
    500
}

/// Whom Restart may concern when no pod is over its due.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum WhenNobodyIsOver {
    /// Nobody: the incident ends `Suppressed/NoCulprit`.
    #[default]
    None,
    /// The pod with the lowest priority, then the largest use.
    LowestPriority,
}

/// Something that is done when a mark is passed.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.type in ['Signal', 'Freeze', 'Restart']")
        .message("this action is not yet served by this version: served are Signal, Freeze and Restart"),
    validation = Rule::new("!has(self.restart) || self.type == 'Restart'")
        .message("restart may be set only where type is Restart"),
    validation = Rule::new("!has(self.freeze) || self.type == 'Freeze'")
        .message("freeze may be set only where type is Freeze")
)]
pub struct Action {
    /// What is done.
    #[serde(rename = "type")]
    pub type_: ActionType,

    /// Settings of `Restart`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart: Option<RestartAction>,

    /// Settings of `Freeze`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub freeze: Option<FreezeAction>,
}

/// The acts, gentlest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum ActionType {
    /// Write the pressure file of pods that opted in.
    Signal,
    /// Call the pod's own endpoint. Not yet served.
    Hook,
    /// Take the pod out of its Services. Not yet served.
    Unready,
    /// No new work on the node: a `NoSchedule` taint.
    Freeze,
    /// Take idle grants back. Not yet served.
    Reclaim,
    /// Move the pod's GPU memory to host memory. Not yet served.
    Park,
    /// Evict the pod; its owner starts it anew.
    Restart,
    /// Drain the node. Not yet served.
    Drain,
}

/// Settings of `Restart`.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RestartAction {
    /// Grace period of the eviction in seconds. Absent: the pod's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 3600))]
    pub grace_period_seconds: Option<i32>,
}

/// Settings of `Freeze`.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FreezeAction {
    /// When the node is tainted.
    #[serde(default)]
    pub taint_node_when: TaintNodeWhen,
}

/// When `Freeze` taints the node.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
pub enum TaintNodeWhen {
    /// When every device of the node is at a level that asks for Freeze.
    #[default]
    AllDevices,
    /// When one device is.
    AnyDevice,
}

/// Leak detection. Not yet served.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Leaks {}

/// Whom acts may concern and how many of them there may be.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Remediation {
    /// Which pods may be restarted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub victims: Option<Victims>,

    /// How many pods may be restarted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget: Option<Budget>,
}

/// Which pods may be restarted. Bare, mirror, DaemonSet and system-priority pods never are.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!self.ownerKinds.exists(k, k in ['DaemonSet', 'Node', 'Pod'])")
        .message("pods of a DaemonSet, of a Node (static pods) and of a Pod are never restarted: remove these from ownerKinds")
)]
pub struct Victims {
    /// Kinds of controller whose pods may be restarted.
    #[schemars(length(min = 1, max = 16), inner(length(min = 1, max = 63), pattern(r"^[A-Z][A-Za-z0-9]*$")))]
    pub owner_kinds: Vec<String>,
}

impl Victims {
    /// The owner kinds of a policy that names none.
    pub const DEFAULT_OWNER_KINDS: [&str; 2] = ["ReplicaSet", "StatefulSet"];
}

/// How many pods may be restarted.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Budget {
    /// How many pods of the victim's top owner may be unready at once, whatever the cause, the
    /// victim included.
    #[serde(default = "default_max_unavailable")]
    #[schemars(range(min = 1, max = 10_000))]
    pub max_unavailable: i32,

    /// When more than this share of the fleet's devices has somebody to be restarted at once,
    /// that is a fault of measurement: stop.
    #[serde(default = "default_halt")]
    #[schemars(range(min = 1, max = 100))]
    pub halt_at_condemned_percent: i32,

    /// How many acts there may be in a window of time. Absent: 4 a policy and 2 a workload in 60
    /// minutes.
    #[serde(default = "default_rates")]
    #[schemars(length(min = 1, max = 5))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["scope".into()]))]
    pub rates: Vec<Rate>,
}

fn default_max_unavailable() -> i32 {
    1
}

fn default_halt() -> i32 {
    20
}

fn default_rates() -> Vec<Rate> {
    vec![
        Rate { scope: RateScope::Policy, max_actions: 4, window_minutes: 60 },
        Rate { scope: RateScope::Workload, max_actions: 2, window_minutes: 60 },
    ]
}

/// At most so many acts in a window of time.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Rate {
    /// What the acts are counted over.
    pub scope: RateScope,

    /// How many acts.
    #[schemars(range(min = 0, max = 10_000))]
    pub max_actions: i32,

    /// The window in minutes.
    #[schemars(range(min = 1, max = 10_080))]
    pub window_minutes: i32,
}

/// What acts are counted over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum RateScope {
    /// Acts of this policy.
    Policy,
    /// Acts on the pods of one top owner.
    Workload,
    /// Acts on one node.
    Node,
    /// Acts in one namespace.
    Namespace,
    /// All acts of Highwater.
    Fleet,
}

/// What became of a policy.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuMemoryPolicyStatus {
    /// `Accepted` (the policy makes sense and concerns something) and `Programmed` (it holds).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,

    /// Number of nodes that it selects.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nodes: Option<i32>,

    /// Number of devices that it selects.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices: Option<i32>,
}
