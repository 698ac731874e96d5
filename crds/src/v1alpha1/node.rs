//! `GpuMemoryNode`: the operator's plan for one node, and what its agent found there.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Breaker, ByteSize, DriverReserve, HostMemory, Leaks, Mode, Partition, Pool, Quota, Strength};

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
    printcolumn(
        name = "Enforced",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Enforced')].status",
        priority = 1
    ),
    printcolumn(name = "Strength", type_ = "string", json_path = ".status.baseStrength", priority = 1),
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

    /// The reservation pool. Absent: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<PlanPool>,

    /// The breakers, one a scope, with the marks of a preset filled in.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 3))]
    pub breakers: Vec<PlanBreaker>,

    /// The rule on the host memory of the pods that use these devices. A pod that uses several
    /// kinds of device has the rule of the first that has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_memory: Option<PlanHostMemory>,

    /// Leak detection for the pods that use these devices. For the host memory of a pod that uses
    /// several kinds of device, the first rule that has it holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leaks: Option<PlanLeaks>,
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

/// A reservation pool and the policies it came from.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlanPool {
    /// The policy that everything but `maxPercent` came from.
    #[schemars(length(max = 253))]
    pub policy: String,
    /// The policy whose `maxPercent` holds, where that is another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub max_policy: Option<String>,
    /// Its value, with the `maxPercent` that holds, a `sizePercent` no greater than that, and no
    /// `driverReserve` (the rule has that apart).
    pub value: Pool,
}

/// A part of a policy, the policy it came from, and whom that policy lets it act on.
#[derive(JsonSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Planned<T> {
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
    pub value: T,
}

/// A breaker of a plan.
pub type PlanBreaker = Planned<Breaker>;
/// A rule on host memory of a plan.
pub type PlanHostMemory = Planned<HostMemory>;
/// Leak detection by a plan.
pub type PlanLeaks = Planned<Leaks>;
/// The quotas of one policy in a plan.
pub type PlanQuota = Planned<Quota>;

/// The state of one node.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuMemoryNodeStatus {
    /// Generation of the plan that the agent follows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,

    /// `Monitored`: every device is being measured. `Attention`: something here needs a person
    /// (zombie memory, memory that no process explains, a pool that does not cover what is
    /// promised). `Enforced`: every pod has the strength that its quota asks for.
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

    /// How the host of the node fares. Absent: nothing is known of it, or left out for the size of the
    /// object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(merge_strategy = MapMerge::Atomic)]
    pub host: Option<HostStatus>,

    /// The strength that a pod without a guard has on every device here, as far as it depends on
    /// the node: what its driver and its pools can do. Absent: `Observe`.
    #[serde(default, skip_serializing_if = "is_observe")]
    pub base_strength: Strength,

    /// Number of pods and devices where the strength is less than the quota asks for. Absent: none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub below_count: i32,

    /// Some of them with the reason, at most 4: one of each policy, then those furthest below.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 4))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub below_strength: Vec<BelowStrength>,
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
    /// What a CUDA context was seen to take on such a device, rounded up to 64Mi. Absent: none was
    /// seen yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context: Option<ByteSize>,
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
    /// Number of pods by the enforcement that holds for them, where it is not the same for all.
    /// Absent: all have `strength`, or left out for the size of the object.
    #[serde(default, skip_serializing_if = "StrengthCounts::is_empty")]
    pub strengths: StrengthCounts,
    /// What is wrong with the reservation pool. Absent: there is none, or it covers what is
    /// promised.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<PoolTrouble>,
    /// The most that a pod without a guard could take beyond its due here: the free bytes that are
    /// owed to others or to nobody, rounded up to a power of two of GiB. Absent: there is no pool,
    /// or left out for the size of the object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overshoot: Option<ByteSize>,
    /// Number of pods that use the device. Absent: none, or left out for the size of the object.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub pods: i32,
    /// Number of pods over their due. Absent: none, or left out for the size of the object.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub over: i32,
    /// Number of pods whose memory here is parked on the host. Absent: none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub parked: i32,
    /// Something is wrong with the device: why it is not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<DeviceFault>,
    /// The highest mode in which a breaker holds here and that asks for Freeze at this level.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub freeze: Option<Freeze>,
}

/// How many pods have which enforcement.
#[derive(KubeSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StrengthCounts {
    /// Pods that are only measured.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub observe: i32,
    /// Pods that can take no more than little beyond their due.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub reservation: i32,
    /// Pods whose allocations are refused at the call.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub guard: i32,
    /// Pods whose allocations the driver refuses.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub kernel: i32,
}

impl StrengthCounts {
    /// Counts one more pod.
    pub fn add(&mut self, strength: Strength) {
        let count = match strength {
            Strength::Observe => &mut self.observe,
            Strength::Reservation => &mut self.reservation,
            Strength::Guard => &mut self.guard,
            Strength::Kernel => &mut self.kernel,
        };
        *count = count.saturating_add(1);
    }

    /// The number of pods with this strength.
    pub const fn of(&self, strength: Strength) -> i32 {
        match strength {
            Strength::Observe => self.observe,
            Strength::Reservation => self.reservation,
            Strength::Guard => self.guard,
            Strength::Kernel => self.kernel,
        }
    }

    /// The weakest strength of any pod; `Observe` where there is none.
    pub fn weakest(&self) -> Strength {
        Strength::ALL.into_iter().find(|s| self.of(*s) > 0).unwrap_or_default()
    }

    /// Whether nobody is counted.
    pub fn is_empty(&self) -> bool {
        Strength::ALL.into_iter().all(|s| self.of(s) == 0)
    }

    /// Whether not all have the same.
    pub fn differ(&self) -> bool {
        Strength::ALL.into_iter().filter(|s| self.of(*s) > 0).count() > 1
    }
}

/// What is wrong with a reservation pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum PoolTrouble {
    /// It does not cover the guarantees that are not yet granted: too much is promised, or memory
    /// is in use that is nobody's due.
    Short,
    /// The keeper that holds the memory does not answer.
    KeeperAway,
    /// The driver does not let memory be held here (some do not for MIG instances).
    Unsupported,
}

/// A pod whose quota holds less firmly than it asks for.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BelowStrength {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// UUID of the device.
    pub device: String,
    /// The policy that asks for the strength.
    #[schemars(length(max = 253))]
    pub policy: String,
    /// What its quota asks for.
    pub asked: Strength,
    /// What holds. Absent: `Observe`.
    #[serde(default, skip_serializing_if = "is_observe")]
    pub active: Strength,
    /// Why it is no more.
    pub reason: StrengthReason,
}

/// Why a pod has no greater strength.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum StrengthReason {
    /// The plan is too old to bind, or none was ever received: the node only measures.
    NoPlan,
    /// Nothing in its spec brings in the guard: it did not opt in.
    NotOptedIn,
    /// It opted in, and none of its processes has a guard connected while some hold memory.
    GuardNotConnected,
    /// It has a guard, and one of its processes holds memory outside it: a static program, a
    /// private copy of the driver's library, or the like.
    OutsideGuard,
    /// It has a guard, and a process in another root (a nested or ephemeral container, a chroot)
    /// holds memory outside it.
    OtherRoot,
    /// It has the guard, and a program of it has looked up functions of the driver that the guard does
    /// not cover: a table without names, a second copy of the library, a form that a newer driver
    /// brought. Memory that these give is found by comparison only.
    Uncovered,
    /// The guard is off in clients of an MPS server.
    Mps,
    /// The guard does not know this version of the driver, and stays out of it.
    UnknownDriver,
    /// The guard in the pod speaks no version that the agent speaks.
    GuardVersion,
    /// No policy gives the device a pool.
    NoPool,
    /// The pool does not cover what is promised.
    PoolShort,
    /// The keeper, which holds the pool and serves the guard, does not answer.
    KeeperAway,
    /// More is free on the device, and not owed to this pod, than the policy's `overshootLimit`.
    Overshoot,
    /// The policy has `kernelLimits: Off`, or does not enforce.
    KernelLimitsOff,
    /// The driver has no memory limits (R615 and later do).
    NoKernelLimits,
    /// The driver has no memory limits for MIG instances.
    KernelLimitsMig,
    /// The agent may not set the driver's limits: the chart has `agent.kernelLimits: false`.
    KernelLimitsDisabled,
    /// The node has no cgroup v2, which the driver's limits need.
    NoCgroupV2,
    /// The driver refused the limit; the agent's log has its words.
    KernelLimitRefused,
    /// The limit is below what the pod holds already: it is given to the driver once that fell.
    AboveLimit,
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

/// How the host of a node fares, in bands with hysteresis, so that it changes seldom enough to be
/// stored. Less room is told soon, more only after it has lasted for five minutes.
#[derive(KubeSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HostStatus {
    /// Idle share of its processors. Absent: not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_idle: Option<CpuIdleBand>,
    /// Its available memory. Absent: not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<HostMemoryBand>,
    /// A process was killed within ten minutes for want of memory, be it the host's or that of a
    /// cgroup with a limit: the kernel counts both as one. Absent: not known, for instance because
    /// the agent has watched for less than ten minutes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oom_kills: Option<bool>,
}

/// Idle share of a host's processors over half a minute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum CpuIdleBand {
    /// More than 40 %.
    Above40,
    /// No more than 40 %.
    Below40,
}

/// Memory of a host that is available without swapping, by `MemAvailable`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum HostMemoryBand {
    /// More than 1.2 GB.
    Above1200M,
    /// More than 800 MB, up to 1.2 GB.
    Below1200M,
    /// No more than 800 MB.
    Below800M,
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
