//! One series: the memory of a pod on a device, or on the host, by the policies of one mode.

use std::sync::Arc;

use highwater_crds::{LeakFinding, LeakMemory, LeakStage, Leaks, Mode};
use highwater_policy::{
    leak::{Circumstances, Detector, Finding, LifeEnd, Sample, Settings, Workload, capacity, life_end},
    time::Millis,
};
use jiff::Timestamp;
use tracing::info;

use super::{Counts, workloads::Workloads};
use crate::{decide::Held, world::Pod};

/// What a number counts for, in samples,
const FRESH: u64 = 3;
/// and in milliseconds; the longer counts.
const FRESH_MILLISECONDS: u64 = 2_000;

/// How long a number counts that was read by the pace of these settings, in milliseconds.
pub(super) fn freshness(settings: &Settings) -> u64 {
    settings.sample_milliseconds.saturating_mul(FRESH).max(FRESH_MILLISECONDS)
}

/// What tells a series from the others of its pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Of {
    pub memory: LeakMemory,
    pub mode: Mode,
    /// UUID of the device; of host memory that at which it is told.
    pub device: Arc<str>,
}

impl Of {
    /// Whether another is the same series: host memory may be told at another device.
    pub(super) fn same(&self, other: &Self) -> bool {
        self.memory == other.memory
            && self.mode == other.mode
            && (self.memory == LeakMemory::Host || self.device == other.device)
    }
}

/// The series.
#[derive(Debug)]
pub(super) struct Series {
    pub of: Of,
    pub workload: Workload,
    pub settings: Arc<Settings>,
    pub detector: Detector,
    /// When its present life was first seen, on the clock of the samples.
    pub began: Millis,
    /// The life was seen from its start.
    pub whole: bool,
    /// What it is like is known, for it was seen from its start or an earlier agent had seen it.
    pub known: bool,
    /// When this agent took it over from an earlier one.
    resumed: Option<Millis>,
    /// What is thought of it, if it is suspect.
    pub finding: Option<LeakFinding>,
    /// What policy says of it; `None` while nobody does.
    pub rule: Option<Arc<Leaks>>,
    /// When it is sampled next, on the clock of the agent.
    pub due: Millis,
    /// What it can come to, as last told.
    pub capacity: Option<u64>,
    /// What it was, as last sampled.
    pub used: Option<u64>,
    /// When it was last sampled, on the clock of the samples.
    pub sampled: Millis,
    /// When it last had a number.
    measured: Option<Millis>,
    renewed: Millis,
}

impl Series {
    /// One that begins now.
    pub(super) fn new(
        of: Of,
        workload: Workload,
        settings: Arc<Settings>,
        detector: Detector,
        at: Millis,
    ) -> Self {
        Self {
            of,
            workload,
            settings,
            detector,
            began: at,
            whole: false,
            known: false,
            resumed: None,
            finding: None,
            rule: None,
            due: Millis(0),
            capacity: None,
            used: None,
            sampled: at,
            measured: None,
            renewed: at,
        }
    }

    /// Takes a sample. `at` is on the clock of samples. Returns whether what is thought of it changed.
    pub(super) fn take(&mut self, pod: &Pod, sample: &Sample, wall: Timestamp, counts: &mut Counts) -> bool {
        let at = sample.at;
        counts.samples += 1;
        if sample.bytes.is_none() {
            counts.missing += 1;
        }
        (self.used, self.sampled) = (sample.bytes, at);
        self.measured = sample.bytes.map_or(self.measured, |_| Some(at));
        let sample = Sample {
            capacity: sample.capacity.map(|next| capacity::in_steps(self.capacity, next)),
            ..*sample
        };
        self.capacity = sample.capacity.or(self.capacity);
        if let Some(finding) = self.detector.push(&sample) {
            self.found(pod, &finding, wall, counts);
            self.renewed = at;
            return true;
        }
        let [shortest, ..] = self.settings.block_milliseconds;
        if self.finding.is_some() && at.since(self.renewed) >= shortest {
            self.renewed = at;
            let present = self.detector.present(at);
            self.finding = present.and_then(|finding| self.told(&finding, wall));
        }
        false
    }

    fn told(&self, finding: &Finding, wall: Timestamp) -> Option<LeakFinding> {
        finding.told(self.of.memory, self.detector.profile(), wall)
    }

    fn found(&mut self, pod: &Pod, finding: &Finding, wall: Timestamp, counts: &mut Counts) {
        self.finding = self.told(finding, wall);
        *counts.findings.entry((stage(finding), class(finding))).or_default() += 1;
        let Of { memory, mode, device } = &self.of;
        let (name, namespace) = (&pod.facts.name, &pod.facts.namespace);
        info!(pod = name, namespace, %device, ?memory, ?mode, kind = ?finding.kind, reason = finding.reason,
            "what is thought of a pod's growth changed");
    }

    /// Goes on with what an earlier agent thought.
    pub(super) fn resume(&mut self, at: Millis, wall: Timestamp) {
        (self.renewed, self.sampled) = (at, at);
        self.resumed = Some(at);
        self.finding = self.detector.present(at).and_then(|finding| self.told(&finding, wall));
    }

    /// Judges by other settings from now on. With other lengths of blocks it begins anew.
    pub(super) fn set(&mut self, settings: &Arc<Settings>, at: Millis) {
        if *self.settings == **settings {
            return;
        }
        self.settings = Arc::clone(settings);
        let state = self.detector.state();
        match Detector::restore(Arc::clone(settings), state, at) {
            Ok(detector) => self.detector = detector,
            // It is of this version: there is none other.
            Err(error) => info!(%error, "a series begins anew"),
        }
        if self.detector.present(at).is_none() {
            self.finding = None;
        }
    }

    /// Its life ends so, and the next begins, seen from its start or not.
    pub(super) fn end(&mut self, known: Circumstances, whole: bool, at: Millis, workloads: &mut Workloads) {
        let thought = self.finding.as_ref().map(|finding| (finding.stage, finding.class));
        let ended = life_end(Circumstances { whole: self.whole, thought, ..known });
        let ended = workloads.once(&self.workload, ended, self.began, at);
        self.detector.know(&workloads.profile(&self.workload, at));
        self.detector.begin_life(at, ended);
        if ended != LifeEnd::Unknown {
            workloads.learn(&self.workload, self.detector.profile().clone(), at);
        }
        self.finding = None;
        self.began = at;
        self.whole = whole;
        self.known = true;
        self.measured = None;
    }

    /// Whether it is measured.
    pub(super) fn is_measured(&self) -> bool {
        self.measured.is_some_and(|measured| self.sampled.since(measured) <= freshness(&self.settings))
    }

    /// Whether enough was seen to say that it does not leak. What an earlier agent came to suspect
    /// after it last wrote down what it saw is seen again within the blocks that a suspicion takes.
    pub(super) fn is_known(&self, at: Millis) -> bool {
        let [shortest, ..] = self.settings.block_milliseconds;
        let again = shortest.saturating_mul(u64::from(self.settings.suspect_blocks).saturating_add(1));
        if self.finding.is_none() && self.resumed.is_some_and(|resumed| at.since(resumed) < again) {
            return false;
        }
        let needed = shortest.saturating_mul(u64::from(self.settings.act_blocks));
        self.known || at.since(self.began) >= self.settings.warm_up_milliseconds.saturating_add(needed)
    }

    /// What the pod holds of its memory.
    pub(super) fn held(&self) -> Held {
        Held { used: self.used, limit: self.capacity }
    }

    /// How far the suspicion goes.
    pub(super) fn stage(&self) -> Option<LeakStage> {
        self.finding.as_ref().map(|finding| finding.stage)
    }
}

fn stage(finding: &Finding) -> &'static str {
    use highwater_policy::leak::FindingKind::{Act, Cleared, Suspect};
    match finding.kind {
        Suspect => "Suspect",
        Act => "Act",
        Cleared => "Cleared",
    }
}

fn class(finding: &Finding) -> &'static str {
    use highwater_crds::LeakClass::{Exponential, Linear, PerReplay, Saturating, Step};
    match finding.class {
        Linear => "Linear",
        Step => "Step",
        Exponential => "Exponential",
        Saturating => "Saturating",
        PerReplay => "PerReplay",
    }
}
