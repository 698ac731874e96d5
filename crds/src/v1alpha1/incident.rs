//! `GpuMemoryIncident`: one episode of a pod or device, what was seen and what was done.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{ActionType, BreakerScope, LeakFinding, Level, Mode, Strength, StrengthReason};

/// One episode: evidence (`spec`, by the agent), what is seen now (`status.observation`, by the
/// agent) and what was decided (`status.decision`, by the operator).
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "highwater.dev",
    version = "v1alpha1",
    kind = "GpuMemoryIncident",
    plural = "gpumemoryincidents",
    shortname = "gmi",
    category = "highwater",
    namespaced,
    status = "GpuMemoryIncidentStatus",
    derive = "PartialEq",
    selectable = ".spec.node",
    printcolumn(name = "Kind", type_ = "string", json_path = ".spec.kind"),
    printcolumn(name = "Pod", type_ = "string", json_path = ".spec.subject.name"),
    printcolumn(name = "Node", type_ = "string", json_path = ".spec.node"),
    printcolumn(name = "Act", type_ = "string", json_path = ".spec.proposed.action"),
    printcolumn(name = "Decision", type_ = "string", json_path = ".status.decision.state"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.decision.reason"),
    printcolumn(name = "Policy", type_ = "string", json_path = ".spec.policy", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self == oldSelf").message("the evidence of an incident is written once"))]
pub struct GpuMemoryIncidentSpec {
    /// What happened.
    pub kind: IncidentKind,

    /// Mode of the policy that asks for the act.
    pub mode: Mode,

    /// The policy that asks for the act.
    #[schemars(length(max = 253))]
    pub policy: String,

    /// The node.
    #[schemars(length(max = 253))]
    pub node: String,

    /// UUID of the device.
    #[schemars(length(max = 64))]
    pub device: String,

    /// Which episode of this subject on this device it is, from 1.
    #[schemars(range(min = 1))]
    pub episode: i64,

    /// The pod it is about. Absent where no pod is to blame.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subject: Option<Subject>,

    /// What was measured when the episode began.
    pub evidence: Evidence,

    /// What ought to be done.
    pub proposed: Proposal,
}

/// What an incident is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum IncidentKind {
    /// A pod holds more than its limit.
    QuotaBreach,
    /// A breaker tripped.
    Breaker,
    /// A pod's host memory passed its mark.
    HostMemory,
    /// Memory of a device is listed for processes that are gone.
    ZombieMemory,
    /// A pod's memory grows and will not come back. Opened at suspicion; an act is due only once the
    /// observation says so.
    Leak,
}

/// The pod that an incident is about.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Subject {
    /// Namespace of the pod.
    #[schemars(length(max = 63))]
    pub namespace: String,
    /// Name of the pod.
    #[schemars(length(max = 253))]
    pub name: String,
    /// UID of the pod: a later pod of the same name is another subject.
    #[schemars(length(max = 64))]
    pub uid: String,
}

/// What was measured when an episode began, in bytes.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Evidence {
    /// When the sample was taken that satisfied the hold.
    pub at: MicroTime,

    /// What the breaker that tripped measures. Absent: the device, or no breaker tripped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<BreakerScope>,

    /// Level by the breaker that tripped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<Level>,

    /// The level was entered before its mark was reached, because memory rose fast.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub early: bool,

    /// Use of what the breaker measures, in percent of what can be used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level_percent: Option<i32>,

    /// The mark that was passed, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trip_percent: Option<i32>,

    /// Memory of the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_total_bytes: Option<i64>,

    /// Memory of the device that is free.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_free_bytes: Option<i64>,

    /// What the subject holds: on the device, or on the host where the incident is about host memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_bytes: Option<i64>,

    /// The subject's limit; where the incident is about host memory, what that may come to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<i64>,

    /// What the subject is owed: its guarantee, else its limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub due_bytes: Option<i64>,

    /// The quota rule that gave the limit (`default` where none matched).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota_rule: Option<String>,

    /// What the other pods on the device hold, largest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub neighbour_bytes: Vec<i64>,

    /// Bytes of processes that belong to no pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub foreign_bytes: Option<i64>,

    /// Bytes that no process explains (signed).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unexplained_bytes: Option<i64>,

    /// The enforcement that was active for the subject.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strength: Option<Strength>,

    /// Why it was no stronger. Absent where it was the strongest there is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strength_reason: Option<StrengthReason>,

    /// What a pod without a guard could have taken beyond its due: the free bytes of the device
    /// that were not owed to it. Absent where there is no pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overshoot_bytes: Option<i64>,

    /// What its guard had charged, where it has one. The driver's number is `usedBytes`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub charged_bytes: Option<i64>,

    /// What was known of the leak when it was first suspected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leak: Option<LeakFinding>,

    /// Why this pod and no other.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 1024))]
    pub explanation: String,
}

/// What ought to be done.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Proposal {
    /// The act.
    pub action: ActionType,

    /// Grace period in seconds. Absent: the pod's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 3600))]
    pub grace_period_seconds: Option<i32>,

    /// Restart the containers where they are instead of evicting the pod.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_place: bool,

    /// Bytes that the act should free.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frees_bytes: Option<i64>,

    /// What else was weighed, a line each: the act, on whom, what it would free, and why it was not
    /// chosen or was not enough.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 12), inner(length(max = 256)))]
    pub alternatives: Vec<String>,
}

/// What is seen now and what was decided.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuMemoryIncidentStatus {
    /// What the agent sees now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observation: Option<Observation>,

    /// What the operator decided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decision: Option<Decision>,
}

/// What the agent sees now. Renewed every 2 s while an act is being decided or verified.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Observation {
    /// Whether the reason for the incident still holds.
    pub state: ObservationState,

    /// What the subject holds: on the device, or on the host where that is what the incident is about now.
    /// Absent where it cannot be measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<i64>,

    /// When this was measured, by the node's clock.
    pub at: MicroTime,

    /// What is known of the leak now. An act is due where its stage says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leak: Option<LeakFinding>,

    /// How it stands with the hook that comes before a restart because of a leak. Absent: none does,
    /// or no act was due yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hook: Option<HookReport>,

    /// The `actedAt` of the decision that the agent knew of when it measured this. It tells what was
    /// seen after the act, whatever the clocks of the two machines say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_act: Option<MicroTime>,

    /// What became of an act that the agent carries out once it is approved (`Unready`, `Park`, a
    /// restart in place). Absent: nothing was begun.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub act: Option<ActReport>,
}

/// The hook that comes before a restart because of a leak.
#[derive(KubeSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HookReport {
    /// What came of it.
    pub effect: HookEffect,
    /// What the pod held on the device when its engine was asked. Absent: it is still to be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_bytes: Option<i64>,
}

/// What came of a hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum HookEffect {
    /// The engine is to be asked, or was, and what it frees is awaited: no other act is begun.
    Awaited,
    /// The pod holds less than when it was asked.
    Helped,
    /// It failed or freed too little, or what it freed is in use again. It is not asked twice.
    InVain,
}

/// What became of an act that the agent carries out.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ActReport {
    /// How far it is.
    pub state: ActState,
    /// Why, in a sentence with the numbers.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 256))]
    pub message: String,
    /// Bytes that lie on the host because of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parked_bytes: Option<i64>,
}

/// How far an act is that the agent carries out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum ActState {
    /// A precondition does not hold: it was not begun.
    Refused,
    /// It is under way.
    Begun,
    /// It is done and lasts.
    Done,
    /// It went wrong.
    Failed,
    /// It was done and has been taken back: the pod is as before.
    Undone,
}

/// Whether the reason for an incident still holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum ObservationState {
    /// It does.
    Over,
    /// It does not: memory fell below the mark.
    Recovered,
    /// The subject holds nothing any more.
    Gone,
    /// It cannot be measured.
    Unknown,
}

/// What the operator decided. Its states follow each other in one direction, whoever writes them.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.state == oldSelf.state || (oldSelf.state in ['Proposed', 'Approved'] && self.state != 'Succeeded') || (oldSelf.state == 'Verifying' && self.state in ['Succeeded', 'Failed'])")
        .message("a decision that ended, or whose act was accepted, cannot be taken back")
)]
pub struct Decision {
    /// Where the incident stands.
    pub state: DecisionState,

    /// Why, in one CamelCase word.
    #[schemars(length(min = 1, max = 64))]
    pub reason: String,

    /// Why, in a sentence with the numbers.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 1024))]
    pub message: String,

    /// When `state` last changed.
    pub since: MicroTime,

    /// The workload (top owner) of the subject, as `Kind/name`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 320))]
    pub workload: Option<String>,

    /// Each budget that was asked, and what it said.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(length(max = 256)))]
    pub budgets: Vec<String>,

    /// When the act was accepted: by the API server where it is an eviction, by the agent where the
    /// agent carries it out, when the node was cordoned where it is a drain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acted_at: Option<MicroTime>,

    /// Where there was room for what had to go, as names of nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8), inner(length(max = 253)))]
    pub targets: Vec<String>,
}

/// Where an incident stands: `Proposed -> Approved -> Verifying -> Succeeded`, or an end
/// without success.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum DecisionState {
    /// Waiting: the reason says for what.
    Proposed,
    /// A token is reserved; the act follows.
    Approved,
    /// The act was accepted; its effect is awaited.
    Verifying,
    /// The memory is back.
    Succeeded,
    /// It will not be done.
    Suppressed,
    /// The reason for it went away before it was done.
    Cancelled,
    /// It was done and did not help, or could not be done.
    Failed,
    /// Another incident took its place.
    Superseded,
}

impl DecisionState {
    /// Every state: first those that something follows, then the ends.
    pub const ALL: [Self; 8] = [
        Self::Proposed,
        Self::Approved,
        Self::Verifying,
        Self::Succeeded,
        Self::Suppressed,
        Self::Cancelled,
        Self::Failed,
        Self::Superseded,
    ];

    /// Whether nothing follows this state.
    pub const fn is_final(self) -> bool {
        matches!(self, Self::Succeeded | Self::Suppressed | Self::Cancelled | Self::Failed | Self::Superseded)
    }
}
