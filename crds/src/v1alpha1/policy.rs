//! `GpuMemoryPolicy`: what a platform team asks of a set of GPUs and of the pods on them.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{ByteSize, Leaks};

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
    printcolumn(
        name = "Enforced",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Enforced')].status",
        priority = 1
    ),
    printcolumn(name = "Nodes", type_ = "integer", json_path = ".status.nodes", priority = 1),
    printcolumn(name = "Devices", type_ = "integer", json_path = ".status.devices", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.mode != 'Enforce' || (has(self.remediation) && has(self.remediation.budget))")
        .message("mode Enforce needs remediation.budget: say how many pods may be down at once")
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

    /// The reservation pool: memory that is really held on each device, for those to whom it is
    /// promised.
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

    /// A rule on the host memory of the pods that use the devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_memory: Option<HostMemory>,

    /// Leak detection: growth that will not end by itself. `{}` watches and acts on nothing.
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

/// The reservation pool of a device: memory that Highwater holds and gives out as *grants* to the
/// pods that have a quota.
///
/// Its size comes from `sizePercent` and `minSize`, whichever is more, and never passes
/// `maxPercent`. All three are of the memory that is left after the driver's reserve and after what
/// belongs to no pod. Where several policies govern a device, everything but `maxPercent` and
/// `driverReserve` comes from one of them; of several `maxPercent` the least holds.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.sizePercent) || !has(self.maxPercent) || self.sizePercent <= self.maxPercent")
        .message("sizePercent must not be above maxPercent: the pool could never reach it"),
    validation = Rule::new("has(self.sizePercent) || has(self.minSize) || !(has(self.stepSize) || has(self.marginSize) || has(self.startHoldSeconds) || has(self.allocationWaitSeconds) || has(self.decayPercent) || has(self.overshootLimit) || has(self.adaptive))")
        .message("these settings of a pool need a pool: give sizePercent or minSize, or remove them")
)]
pub struct Pool {
    /// Share of the device that the pool holds at first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100))]
    pub size_percent: Option<i32>,

    /// Least size of the pool, as far as `maxPercent` lets it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_size: Option<ByteSize>,

    /// Greatest share of the device that the pool may have, whatever else is set. A cap: of several
    /// policies the least holds, whatever their priority. Absent everywhere: 75, or `sizePercent`
    /// where that is more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100))]
    pub max_percent: Option<i32>,

    /// How much a grant of a guarded pod grows at once, ahead of use. Absent: 1Gi.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_size: Option<ByteSize>,

    /// How much of the device is left free whatever the pool would still like to hold, so that
    /// reserving never pushes a pod's managed memory out. Absent: 512Mi.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub margin_size: Option<ByteSize>,

    /// For so long after a pod came to the device no memory is given out there ahead of use, since
    /// engines measure what is free while they start. 0: no such hold. Absent: 120.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 3600))]
    pub start_hold_seconds: Option<i32>,

    /// How long an allocation of a guarded pod waits for memory that is promised to nobody else but
    /// not free now, before it fails. Limits may add up to more than the pool; this says what
    /// happens then. Absent: 0, 300 ms, in which the agent looks again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 60))]
    pub allocation_wait_seconds: Option<i32>,

    /// Share of the idle part of a grant above the guarantee that goes back to the pool each
    /// minute. 0: none. Absent: 8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 100))]
    pub decay_percent: Option<i32>,

    /// What a pod without a guard may be able to take beyond its due, at most, for its quota to
    /// still count as strength `Reservation`: the free bytes of the device that are not owed to it.
    /// Where there are more, it counts as `Observe`. Absent: 2Gi.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overshoot_limit: Option<ByteSize>,

    /// Let the pool grow and shrink with what is asked of it. Absent: it keeps its size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adaptive: Option<AdaptivePool>,

    /// Memory set aside for the driver itself, never promised to a pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver_reserve: Option<DriverReserve>,
}

impl Pool {
    /// `maxPercent` where it is absent and `sizePercent` is no more.
    pub const DEFAULT_MAX_PERCENT: i32 = 75;
    /// `stepSize` where it is absent.
    pub const DEFAULT_STEP: ByteSize = ByteSize::gib(1);
    /// `marginSize` where it is absent.
    pub const DEFAULT_MARGIN: ByteSize = ByteSize::mib(512);
    /// `startHoldSeconds` where it is absent.
    pub const DEFAULT_START_HOLD_SECONDS: i32 = 120;
    /// `decayPercent` where it is absent.
    pub const DEFAULT_DECAY_PERCENT: i32 = 8;
    /// `overshootLimit` where it is absent.
    pub const DEFAULT_OVERSHOOT_LIMIT: ByteSize = ByteSize::gib(2);

    /// Whether it asks for a pool, and not only for a reserve or a cap.
    pub const fn is_sized(&self) -> bool {
        self.size_percent.is_some() || self.min_size.is_some()
    }

    /// Greatest share of the device in percent.
    pub fn max_percent(&self) -> i32 {
        let default = Self::DEFAULT_MAX_PERCENT.max(self.size_percent.unwrap_or(0));
        self.max_percent.unwrap_or(default)
    }

    /// How much a grant grows at once.
    pub fn step(&self) -> ByteSize {
        self.step_size.unwrap_or(Self::DEFAULT_STEP)
    }

    /// What is left free on the device.
    pub fn margin(&self) -> ByteSize {
        self.margin_size.unwrap_or(Self::DEFAULT_MARGIN)
    }

    /// The start hold in seconds.
    pub fn start_hold_seconds(&self) -> i32 {
        self.start_hold_seconds.unwrap_or(Self::DEFAULT_START_HOLD_SECONDS)
    }

    /// How long an allocation waits in seconds.
    pub fn allocation_wait_seconds(&self) -> i32 {
        self.allocation_wait_seconds.unwrap_or(0)
    }

    /// The share of an idle grant that goes back each minute, in percent.
    pub fn decay_percent(&self) -> i32 {
        self.decay_percent.unwrap_or(Self::DEFAULT_DECAY_PERCENT)
    }

    /// The overshoot up to which a quota counts as `Reservation`.
    pub fn overshoot_limit(&self) -> ByteSize {
        self.overshoot_limit.unwrap_or(Self::DEFAULT_OVERSHOOT_LIMIT)
    }
}

/// How a pool follows what is asked of it. Its use is what is granted of what it is.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.shrinkBelowPercent < self.growAbovePercent")
        .message("shrinkBelowPercent must be below growAbovePercent: the pool needs room between them, or it flaps")
)]
pub struct AdaptivePool {
    /// It grows where its use is above this.
    #[serde(default = "default_grow_above")]
    #[schemars(range(min = 1, max = 100))]
    pub grow_above_percent: i32,

    /// It shrinks where its use is below this.
    #[serde(default = "default_shrink_below")]
    #[schemars(range(min = 0, max = 99))]
    pub shrink_below_percent: i32,

    /// By how much it grows or shrinks, of what it is.
    #[serde(default = "default_change")]
    #[schemars(range(min = 1, max = 100))]
    pub change_percent: i32,

    /// It is looked at after so many requests.
    #[serde(default = "default_every_requests")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub every_requests: i32,

    /// And after so many minutes.
    #[serde(default = "default_every_minutes")]
    #[schemars(range(min = 1, max = 1440))]
    pub every_minutes: i32,
}

impl Default for AdaptivePool {
    fn default() -> Self {
        Self {
            grow_above_percent: default_grow_above(),
            shrink_below_percent: default_shrink_below(),
            change_percent: default_change(),
            every_requests: default_every_requests(),
            every_minutes: default_every_minutes(),
        }
    }
}

fn default_grow_above() -> i32 {
    90
}

fn default_shrink_below() -> i32 {
    50
}

fn default_change() -> i32 {
    10
}

fn default_every_requests() -> i32 {
    100
}

fn default_every_minutes() -> i32 {
    10
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
#[x_kube(
    validation = Rule::new("self.kernelLimits != 'Off' || !has(self.rules) || !self.rules.exists(r, has(r.minimumStrength) && r.minimumStrength == 'Kernel')")
        .message("a rule asks for minimumStrength Kernel while kernelLimits is Off: set it to IfAvailable, or ask for less")
)]
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

    /// Whether the limit is given to the driver as well, where the driver can hold a pod to one.
    /// Only mode Enforce does so.
    #[serde(default)]
    pub kernel_limits: KernelLimits,
}

/// Whether limits are given to the driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum KernelLimits {
    /// Never.
    Off,
    /// Where driver, cgroups and device allow it (driver R615 or later, cgroup v2, no MIG).
    #[default]
    IfAvailable,
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
        .message("guarantee must not be above limit")
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

    /// The weakest enforcement with which a new pod may run. In mode Enforce a new pod is refused
    /// that could not have it: for `Guard` one without the guard's volume; for `Kernel` and
    /// `Reservation` one that may land on a node without it. A running pod that loses it is
    /// reported, never acted on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minimum_strength: Option<Strength>,

    /// What a guard does about managed memory, which the driver lists for nobody and moves to the
    /// host when the device is full. Of several policies the strictest holds. Absent: `Charge`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub managed_memory: Option<ManagedMemory>,
}

/// What a guard does about managed memory, from loosest to strictest.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
pub enum ManagedMemory {
    /// Let it pass uncharged: it may be more than the device has.
    Ignore,
    /// Charge it in full, as if all of it were on the device.
    #[default]
    Charge,
    /// Refuse it.
    Refuse,
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

impl Strength {
    /// From weakest to strongest.
    pub const ALL: [Self; 4] = [Self::Observe, Self::Reservation, Self::Guard, Self::Kernel];
}

/// What happens when a pod holds more than its limit.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.actions) || self.actions.all(a, !(a.type in ['Freeze', 'Drain']))")
        .message("Freeze and Drain are actions of breakers, not of a quota breach: remove them")
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
    validation = Rule::new("has(self.preset) || has(self.warning) || has(self.critical) || has(self.emergency)")
        .message("give a preset, or at least one of warning, critical and emergency"),
    validation = Rule::new("self.scope == 'Device' || ((!has(self.warning) || !has(self.warning.actions) || self.warning.actions.all(a, a.type != 'Drain')) && (!has(self.critical) || !has(self.critical.actions) || self.critical.actions.all(a, a.type != 'Drain')) && (!has(self.emergency) || !has(self.emergency.actions) || self.emergency.actions.all(a, a.type != 'Drain')))")
        .message("only a breaker of scope Device may ask for Drain: remove it"),
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

    /// Marks and actions to start from. A mark that is given as well holds instead of the preset's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preset: Option<BreakerPreset>,

    /// Enter a level early, while memory rises so fast that the device would soon be full.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rise: Option<Rise>,

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

/// Marks and actions that belong together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum BreakerPreset {
    /// 75 %: `Signal`; 88 %: also `Hook`, `Reclaim` and `Freeze`; 95 %: also `Restart` with a grace
    /// period of 10 s. Cleared at 72, 84 and 90 %.
    WarnBreakEmergency,
    /// 80 %: `Signal` and `Reclaim`; 90 %: also `Hook`; 95 %: also `Freeze`, so that nothing more is
    /// granted. Cleared at 76, 86 and 91 %. Nobody is restarted.
    ReclaimRefuse,
}

/// Trips a breaker before its mark is reached. The rate is the slope of use over the last seconds;
/// a level is entered when, at that rate, 95 % would be reached within the lead.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Rise {
    /// The level that is entered early.
    #[serde(default = "default_rise_level")]
    pub level: RiseLevel,

    /// How long before 95 % would be reached, in seconds.
    #[schemars(range(min = 1, max = 3600))]
    pub lead_seconds: i32,

    /// Below this percentage nothing is entered early, however fast memory rises.
    #[serde(default = "default_rise_floor")]
    #[schemars(range(min = 1, max = 95))]
    pub above_percent: i32,
}

fn default_rise_level() -> RiseLevel {
    RiseLevel::Critical
}

fn default_rise_floor() -> i32 {
    60
}

/// A level that [`Rise`] may enter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum RiseLevel {
    /// The lowest mark.
    Warning,
    /// The middle mark.
    Critical,
}

/// A rule on the host memory of pods, for nodes with cgroup v2. Without cgroup v2 it does not hold,
/// and the node's status says so.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.clearPercent < self.tripPercent")
        .message("clearPercent must be below tripPercent: a rule needs room between them, or it flaps"),
    validation = Rule::new("!has(self.actions) || self.actions.all(a, a.type in ['Signal', 'Hook', 'Unready', 'Restart'])")
        .message("host memory is given back by the pod alone: only Signal, Hook, Unready and Restart can help")
)]
pub struct HostMemory {
    /// Trips where a pod's memory that cannot be dropped (anonymous, shared, swapped) is at or above
    /// this share of its limit, or of the node's memory where it has none.
    #[serde(default = "default_host_trip")]
    #[schemars(range(min = 1, max = 100))]
    pub trip_percent: i32,

    /// Is over below this share.
    #[serde(default = "default_host_clear")]
    #[schemars(range(min = 0, max = 99))]
    pub clear_percent: i32,

    /// How long it must stay at or above `tripPercent`, in milliseconds.
    #[serde(default = "default_host_hold")]
    #[schemars(range(min = 0, max = 600_000))]
    pub hold_milliseconds: i32,

    /// Trips as well where the pod's memory pressure index stayed above this in three windows of
    /// 10 s. Absent: the index is a metric and trips nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100))]
    pub pressure_index_percent: Option<i32>,

    /// What is done, cheapest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub actions: Vec<Action>,
}

fn default_host_trip() -> i32 {
    92
}

fn default_host_clear() -> i32 {
    88
}

fn default_host_hold() -> i32 {
    5000
}

/// What a breaker measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum BreakerScope {
    /// Use of a whole device or MIG instance.
    Device,
    /// What is granted of the reservation pool. Without a pool it never trips.
    Pool,
    /// Use of each pod on a device against its limit there. A pod without a limit never trips it.
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
    validation = Rule::new("!has(self.restart) || self.type == 'Restart'")
        .message("restart may be set only where type is Restart"),
    validation = Rule::new("!has(self.freeze) || self.type == 'Freeze'")
        .message("freeze may be set only where type is Freeze"),
    validation = Rule::new("!has(self.hook) || self.type == 'Hook'")
        .message("hook may be set only where type is Hook"),
    validation = Rule::new("!has(self.park) || self.type == 'Park'")
        .message("park may be set only where type is Park"),
    validation = Rule::new("!has(self.drain) || self.type == 'Drain'")
        .message("drain may be set only where type is Drain")
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

    /// Settings of `Hook`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hook: Option<HookAction>,

    /// Settings of `Park`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub park: Option<ParkAction>,

    /// Settings of `Drain`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<DrainAction>,
}

impl Action {
    /// An action without settings.
    pub const fn of(type_: ActionType) -> Self {
        Self { type_, restart: None, freeze: None, hook: None, park: None, drain: None }
    }
}

/// The acts, gentlest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum ActionType {
    /// Write the pressure file of pods that opted in.
    Signal,
    /// Call an endpoint of the pods that opted in, by which their engine frees caches.
    Hook,
    /// Take a pod out of its Services, by its own readiness probe, until memory has fallen.
    Unready,
    /// No new work: no new grants on the device, and a taint on the device or on the node.
    Freeze,
    /// Take idle grants back, and let guards trim the driver's pools in their pods.
    Reclaim,
    /// Move the GPU memory of a pod that opted in to host memory, and back when there is room.
    Park,
    /// Evict the pod; its owner starts it anew.
    Restart,
    /// Cordon the node and evict the pods that may be restarted there, if there is room elsewhere.
    Drain,
}

impl ActionType {
    /// Every act, gentlest first.
    pub const ALL: [Self; 8] = [
        Self::Signal,
        Self::Hook,
        Self::Unready,
        Self::Freeze,
        Self::Reclaim,
        Self::Park,
        Self::Restart,
        Self::Drain,
    ];

    /// Those that can help where a pod leaks. One that is not ready keeps all that it leaked, parked
    /// memory comes back with the leak in it, and the other acts free nothing that a pod holds.
    pub const AGAINST_LEAKS: [Self; 3] = [Self::Signal, Self::Hook, Self::Restart];

    /// Whether the operator must allow it, within its budgets.
    pub const fn is_budgeted(self) -> bool {
        matches!(self, Self::Unready | Self::Park | Self::Restart | Self::Drain)
    }
}

/// Settings of `Restart`.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RestartAction {
    /// Grace period of the eviction in seconds. Absent: the pod's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 3600))]
    pub grace_period_seconds: Option<i32>,

    /// Where a pod has agreed to it by its annotation `highwater.dev/restart: InPlace`, its
    /// containers that use the device are stopped and started by the kubelet where they are,
    /// instead of evicting the pod. Absent: false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_place: bool,
}

/// Settings of `Hook`.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HookAction {
    /// How long the endpoint may take to answer, in milliseconds.
    #[serde(default = "default_hook_timeout")]
    #[schemars(range(min = 100, max = 30_000))]
    pub timeout_milliseconds: i32,
}

impl HookAction {
    /// `timeoutMilliseconds` where there are no settings.
    pub const DEFAULT_TIMEOUT_MILLISECONDS: i32 = 2000;
}

fn default_hook_timeout() -> i32 {
    HookAction::DEFAULT_TIMEOUT_MILLISECONDS
}

/// Settings of `Park`.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ParkAction {
    /// Most host memory that parked pods may take on a node. Absent: whatever the node has, less a
    /// tenth of each image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_host_size: Option<ByteSize>,

    /// A pod that could not be restored for so long is restarted instead, in minutes.
    #[serde(default = "default_park_minutes")]
    #[schemars(range(min = 1, max = 1440))]
    pub max_minutes: i32,
}

fn default_park_minutes() -> i32 {
    60
}

/// Settings of `Drain`.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DrainAction {
    /// How long the drain may take before it is given up and undone, in minutes.
    #[serde(default = "default_drain_minutes")]
    #[schemars(range(min = 1, max = 1440))]
    pub timeout_minutes: i32,
}

impl DrainAction {
    /// `timeoutMinutes` where there are no settings.
    pub const DEFAULT_TIMEOUT_MINUTES: i32 = 15;
}

fn default_drain_minutes() -> i32 {
    DrainAction::DEFAULT_TIMEOUT_MINUTES
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
    /// `Accepted` (the policy makes sense) and `Programmed` (all of it holds where it selects). In
    /// mode Enforce also `Enforced` (its quotas hold as firmly as they ask) where it has quotas, and
    /// `PoolShort` (a pool does not cover what is promised) where it has a pool.
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
