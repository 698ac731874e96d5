//! `spec.leaks` of a `GpuMemoryPolicy`, and what an incident says of a leak.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Action, ByteSize};

/// Leak detection: what a pod holds on a device, and on the host, is watched for growth that will
/// not end by itself.
///
/// All times scale together: a policy that divides each of them by sixty judges a load that runs
/// sixty times as fast in the same way. `{}` watches with the defaults and opens incidents; nothing
/// is done beyond that without `actions`.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.actions) || self.actions.all(a, a.type in ['Signal', 'Hook', 'Restart'])")
        .message("what a pod leaks comes back from its engine or with its end: only Signal, Hook and Restart can help, and a pod that is Unready keeps all that it leaked"),
    validation = Rule::new("!has(self.blockMilliseconds) || (self.blockMilliseconds[0] < self.blockMilliseconds[1] && self.blockMilliseconds[1] < self.blockMilliseconds[2] && self.blockMilliseconds[2] < self.blockMilliseconds[3])")
        .message("blockMilliseconds must rise: each scale looks further back than the one before"),
    validation = Rule::new("!has(self.blockMilliseconds) || self.blockMilliseconds.all(b, b % (has(self.bucketMilliseconds) ? self.bucketMilliseconds : 60000) == 0)")
        .message("every length in blockMilliseconds must be a multiple of bucketMilliseconds"),
    validation = Rule::new("(has(self.bucketMilliseconds) ? self.bucketMilliseconds : 60000) >= (has(self.sampleMilliseconds) ? self.sampleMilliseconds : 10000)")
        .message("bucketMilliseconds must be at least sampleMilliseconds: a bucket needs a sample"),
    validation = Rule::new("has(self.blockMilliseconds) || !has(self.bucketMilliseconds) || 180000 % self.bucketMilliseconds == 0 && 600000 % self.bucketMilliseconds == 0")
        .message("bucketMilliseconds does not divide the default blocks of 3, 10, 30 and 120 minutes: set blockMilliseconds too"),
    validation = Rule::new("(has(self.horizonMilliseconds) ? self.horizonMilliseconds : 3600000) >= (has(self.leadMilliseconds) ? self.leadMilliseconds : 600000)")
        .message("horizonMilliseconds must be at least leadMilliseconds: an act that is due later comes too late"),
    validation = Rule::new("(has(self.actAbovePercent) ? self.actAbovePercent : 75) <= (has(self.actAbovePercentWithoutProfile) ? self.actAbovePercentWithoutProfile : 88)")
        .message("actAbovePercent must be at most actAbovePercentWithoutProfile: less is known without a profile")
)]
pub struct Leaks {
    /// What is done once memory may run out within the horizon, cheapest first: a `Restart` only after
    /// what was seen since a `Hook` says that it did not help. Absent: incidents only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 4))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub actions: Vec<Action>,

    /// How often memory is looked at for leaks, in milliseconds. Absent: 10000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 100, max = 600_000))]
    pub sample_milliseconds: Option<i32>,

    /// The bucket whose median stands for its samples, in milliseconds. Absent: 60000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 100, max = 3_600_000))]
    pub bucket_milliseconds: Option<i32>,

    /// Lengths of the blocks whose floors are watched, one for each of four scales, rising, in
    /// milliseconds. Absent: 3, 10, 30 and 120 minutes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(min = 4, max = 4), inner(range(min = 100, max = 86_400_000)))]
    pub block_milliseconds: Vec<i32>,

    /// Growth is not judged before a pod is so old, in milliseconds: loading and first use grow by
    /// nature. Absent: 600000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 86_400_000))]
    pub warm_up_milliseconds: Option<i32>,

    /// An act is due only where memory may run out within this, in milliseconds. Several times what
    /// a drain, a start and a warm-up take. Absent: 3600000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1000, max = 604_800_000))]
    pub horizon_milliseconds: Option<i32>,

    /// What a drain, a start and a warm-up take together, in milliseconds: an act that comes later
    /// than so much before the end comes too late. Absent: 600000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 100, max = 86_400_000))]
    pub lead_milliseconds: Option<i32>,

    /// Least growth that is worth a word. Absent: 256Mi.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minimum_growth_size: Option<ByteSize>,

    /// The same as a share of what the pod can come to; the larger of the two counts. Absent: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 100))]
    pub minimum_growth_percent: Option<i32>,

    /// No act while the pod's peaks are below this share of what it can come to. Absent: 75.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 100))]
    pub act_above_percent: Option<i32>,

    /// Nor below this while no healthy life of the workload says what is usual. Absent: 88.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 100))]
    pub act_above_percent_without_profile: Option<i32>,

    /// How far above the peak of healthy lives growth must be for an act. Absent: 5.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 100))]
    pub profile_margin_percent: Option<i32>,
}

/// Which memory of a pod grows.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
pub enum LeakMemory {
    /// What it holds on the device.
    #[default]
    Device,
    /// What it holds on the host that is no page cache.
    Host,
}

/// How far a suspicion goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum LeakStage {
    /// Memory grows steadily. Nothing is done.
    Suspect,
    /// It may run out within the horizon, and healthy lives did not do this: an act is due.
    Act,
}

/// How memory grows.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
pub enum LeakClass {
    /// By the same amount in the same time or for the same work.
    #[default]
    Linear,
    /// In few jumps.
    Step,
    /// Faster and faster.
    Exponential,
    /// Slower and slower: a cache that fills, a warm-up. Never acted on.
    Saturating,
    /// By the same amount at each replay of a CUDA graph.
    PerReplay,
}

/// Who holds what grows, as far as it shows from outside the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum LeakMode {
    /// The framework counts it as allocated: tensors, graphs or caches that are kept alive.
    HeldByFramework,
    /// The driver counts it, the framework does not: raw allocations that are never freed.
    OutsideFramework,
    /// The framework reserves ever more without allocating more: fragmentation or retention.
    AllocatorRetention,
    /// It grows with replays of CUDA graphs.
    PerReplay,
    /// One rank of several grows, the others do not.
    OneRank,
    /// The host's memory grows as well or instead: host buffers or managed memory.
    HostOrManaged,
}

/// What is recommended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum LeakAdvice {
    /// Restart it in time.
    Restart,
    /// Set an option of the allocator, such as expandable segments: a restart would only hide it.
    AllocatorOption,
    /// Tell a person: restarts did not lower the slope.
    Ticket,
    /// A cache is filling: no act.
    CacheFilling,
}

/// A value with its bounds.
#[derive(KubeSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bounds {
    /// The lower bound.
    pub low: i64,
    /// The best guess.
    pub mid: i64,
    /// The upper bound.
    pub high: i64,
}

/// What is known of a leak: as evidence when the incident is opened, and renewed in the observation.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LeakFinding {
    /// When this was found, on the node's clock.
    pub at: MicroTime,

    /// How far the suspicion goes.
    pub stage: LeakStage,

    /// Which memory grows. Absent: that of the device.
    #[serde(default, skip_serializing_if = "is_device")]
    pub memory: LeakMemory,

    /// How it grows.
    pub class: LeakClass,

    /// How fast, in bytes an hour.
    pub slope_bytes_per_hour: Bounds,

    /// When it runs out, in seconds from `at`. Absent: not within a year, or nobody knows what the
    /// pod can come to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exhaustion_seconds: Option<Bounds>,

    /// How sure this is.
    #[schemars(range(min = 0, max = 100))]
    pub confidence_percent: i32,

    /// How many of the scales that have seen enough agree,
    #[schemars(range(min = 0, max = 4))]
    pub agreeing_scales: i32,

    /// and how many have seen enough.
    #[schemars(range(min = 0, max = 4))]
    pub eligible_scales: i32,

    /// Who holds what grows. Absent: it does not show.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<LeakMode>,

    /// How sure that is. Absent where `mode` is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 100))]
    pub mode_percent: Option<i32>,

    /// What is recommended. Absent: nothing yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<LeakAdvice>,

    /// What earlier lives of the workload were like on this node. Absent: this is the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<LeakProfile>,

    /// One sentence with the numbers.
    #[schemars(length(max = 512))]
    pub reason: String,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it by reference")]
fn is_device(memory: &LeakMemory) -> bool {
    *memory == LeakMemory::Device
}

/// Earlier lives of a workload on a node, in short: at most 256 bytes as JSON.
#[derive(KubeSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LeakProfile {
    /// Healthy lives that were seen from their start.
    pub lives: i32,
    /// The highest peak of these in bytes. Absent: there were none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak_bytes: Option<i64>,
    /// Lives that ended by an act on a leak, a breaker, or for want of memory.
    pub ended_badly: i32,
    /// Restarts in a row after which memory grew no more slowly.
    pub restarts_without_effect: i32,
    /// Slope of the last life in bytes an hour. Absent: it did not grow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_slope_bytes_per_hour: Option<i64>,
}

#[cfg(test)]
mod tests {
    use kube::CustomResourceExt as _;

    use crate::{ActionType, GpuMemoryPolicy};

    #[test]
    fn the_api_server_takes_just_the_acts_that_can_help() {
        let crd = serde_json::to_string(&GpuMemoryPolicy::crd()).unwrap();
        let acts = ActionType::AGAINST_LEAKS.map(|act| format!("'{act:?}'")).join(", ");
        let rules = crd.matches(&format!("a.type in [{acts}])")).count();
        assert_eq!(rules, 1, "{acts}");
    }
}
