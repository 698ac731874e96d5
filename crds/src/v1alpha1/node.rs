//! `GpuMemoryNode`: the operator's plan for one node, and what its agent found there.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Breaker, ByteSize, DriverReserve, Mode, Partition, Quota, Strength};

/// The plan for one node (`spec`, by the operator) and its state (`status`, by the agent).
///
/// Written on change only; live bytes are metrics.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "highwater.dev",
    version = "v1alpha1",
    kind = "GpuMemoryNode",
    plural = "gpumemorynodes",
    shortname = "gmn",
    category = "highwater",
    status = "GpuMemoryNodeStatus",
    derive = "PartialEq",
    derive = "Default",
    printcolumn(
        name = "Monitored",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Monitored')].status"
    ),
    printcolumn(name = "Level", type_ = "string", json_path = ".status.level"),
    printcolumn(name = "Devices", type_ = "integer", json_path = ".status.deviceCount"),
    printcolumn(name = "Driver", type_ = "string", json_path = ".status.driverVersion"),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Monitored')].reason",
        priority = 1
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct GpuMemoryNodeSpec {
    /// How long the agent may go on with this plan without contact with the API server, in
    /// seconds. After that it only measures.
    #[serde(default = "default_plan_life")]
    #[schemars(range(min = 60, max = 86_400))]
    pub plan_life_seconds: i32,

    /// Close every device handle and report Unmonitored.
    #[serde(default)]
    pub stand_down: bool,

    /// One layer a mode in use. Only the `Enforce` layer binds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 3))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["mode".into()]))]
    pub layers: Vec<PlanLayer>,
}

fn default_plan_life() -> i32 {
    600
}

/// What the policies of one mode ask of this node.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlanLayer {
    /// The mode of the policies that this layer was made of.
    pub mode: Mode,

    /// One rule for each product and partition on the node that a policy concerns.
    #[schemars(length(max = 16))]
    pub rules: Vec<DeviceRule>,

    /// Quotas, in order of precedence. A pod's limit is the strictest of all that match; the
    /// rest comes from the first that does.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub quotas: Vec<PlanQuota>,
}

/// What holds for the devices of one product and partition.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceRule {
    /// Product name as the driver gives it.
    #[schemars(length(max = 96))]
    pub product: String,

    /// How the device is cut.
    pub partition: Partition,

    /// Names of the policies whose quotas (in the layer's `quotas`) hold on these devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub quota_policies: Vec<String>,

    /// Memory set aside for the driver.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver_reserve: Option<PlanDriverReserve>,

    /// The breakers, one a scope.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 3))]
    pub breakers: Vec<PlanBreaker>,
}

/// A driver reserve and the policy it came from.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlanDriverReserve {
    /// The policy.
    #[schemars(length(max = 253))]
    pub policy: String,
    /// Its value.
    pub value: DriverReserve,
}

/// A breaker, the policy it came from, and whom that policy lets it act on.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlanBreaker {
    /// The policy.
    #[schemars(length(max = 253))]
    pub policy: String,
    /// Its namespaces. Absent: every one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespaces: Option<LabelSelector>,
    /// The owner kinds whose pods it may restart.
    #[schemars(length(max = 16))]
    pub owner_kinds: Vec<String>,
    /// Its value.
    pub value: Breaker,
}

/// The quotas of one policy.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlanQuota {
    /// The policy.
    #[schemars(length(max = 253))]
    pub policy: String,
    /// Its namespaces. Absent: every one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespaces: Option<LabelSelector>,
    /// The owner kinds whose pods it may restart.
    #[schemars(length(max = 16))]
    pub owner_kinds: Vec<String>,
    /// Its value.
    pub value: Quota,
}

/// The state of one node.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuMemoryNodeStatus {
    /// Generation of the plan that the agent follows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,

    /// `Monitored`: every device is being measured. `Attention`: something here needs a person
    /// (zombie memory, memory that no process explains).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,

    /// Version of the GPU driver.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver_version: Option<String>,

    /// Version of the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_version: Option<String>,

    /// The highest level of any device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<Level>,

    /// Number of devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_count: Option<i32>,

    /// The kinds of device on this node, which `devices[].model` counts from 0.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub models: Vec<DeviceModel>,

    /// The devices (an atomic list: it has one writer, and managed fields stay small).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 128))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub devices: Vec<DeviceStatus>,

    /// The pods furthest over their due, at most 4.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 4))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub top_pods: Vec<TopPod>,
}

/// A kind of device.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceModel {
    /// Product name as the driver gives it.
    #[schemars(length(max = 96))]
    pub product: String,
    /// How the device is cut.
    pub partition: Partition,
    /// Memory of one such device. Absent where the driver does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<ByteSize>,
}

/// The state of one device.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceStatus {
    /// UUID as the driver gives it.
    #[schemars(length(max = 64))]
    pub uuid: String,
    /// Index into `models`. Absent: 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub model: i32,
    /// Level of the enforced breaker, else of the first shadow layer that has one. Absent:
    /// `Normal`.
    #[serde(default, skip_serializing_if = "is_normal")]
    pub level: Level,
    /// How much of the device is free. Absent: `Unknown`, or left out for the size of the object.
    #[serde(default, skip_serializing_if = "is_unknown")]
    pub headroom: HeadroomBand,
    /// The weakest enforcement that holds for a pod here. Absent: `Observe`.
    #[serde(default, skip_serializing_if = "is_observe")]
    pub strength: Strength,
    /// Number of pods that use the device. Absent: none, or left out for the size of the object.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub pods: i32,
    /// Number of pods over their due. Absent: none, or left out for the size of the object.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub over: i32,
    /// Something is wrong with the device: why it is not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<DeviceFault>,
    /// The highest mode in which a breaker holds here and that asks for Freeze at this level.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub freeze: Option<Freeze>,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // the signature that serde asks for
fn is_observe(strength: &Strength) -> bool {
    *strength == Strength::Observe
}

#[allow(clippy::trivially_copy_pass_by_ref)] // the signature that serde asks for
fn is_normal(level: &Level) -> bool {
    *level == Level::Normal
}

#[allow(clippy::trivially_copy_pass_by_ref)] // the signature that serde asks for
fn is_unknown(band: &HeadroomBand) -> bool {
    *band == HeadroomBand::Unknown
}

#[allow(clippy::trivially_copy_pass_by_ref)] // the signature that serde asks for
fn is_zero(n: &i32) -> bool {
    *n == 0
}

/// A device whose enforced breaker asks for Freeze at its present level.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Freeze {
    /// Taint the node once every device asks.
    AllDevices,
    /// Taint the node at once.
    AnyDevice,
}

/// How high memory stands.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
pub enum Level {
    /// Below every mark.
    #[default]
    Normal,
    /// The lowest mark was passed.
    Warning,
    /// The middle mark was passed.
    Critical,
    /// The highest mark was passed.
    Emergency,
}

impl Level {
    /// The levels in ascending order.
    pub const ALL: [Self; 4] = [Self::Normal, Self::Warning, Self::Critical, Self::Emergency];
}

/// How much of a device's usable memory is in use, in bands with hysteresis, so that it changes
/// seldom enough to be stored.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
pub enum HeadroomBand {
    /// Not known.
    #[default]
    Unknown,
    /// Less than 60 % in use.
    Below60,
    /// 60 to less than 75 % in use.
    Below75,
    /// 75 to less than 88 % in use.
    Below88,
    /// 88 % or more in use.
    Full,
}

/// Why a device is not measured, or not wholly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum DeviceFault {
    /// The driver reports that the device is lost.
    Lost,
    /// The driver does not say how much memory is used.
    NoMemoryInfo,
    /// The driver does not say what each process uses.
    NoProcessInfo,
    /// The driver does not answer in time.
    Unresponsive,
    /// Another error of the driver; the agent's log has it.
    DriverError,
}

/// A pod over its due.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TopPod {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// UUID of the device.
    pub device: String,
    /// What it is owed.
    pub due: ByteSize,
}
