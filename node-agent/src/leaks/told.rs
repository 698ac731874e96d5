//! What is said of a pod's growth: to incidents, to the pod and in metrics.

use std::{cmp::Reverse, sync::Arc};

use highwater_crds::{ActionType, LeakFinding, LeakMemory, LeakStage, Level, Mode};
use highwater_policy::time::Millis;

use super::{Leaks, series::Series};
use crate::decide::{Because, HOST, Held, Wanted};

/// What is thought of a pod on a device.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Seen {
    /// It cannot be measured, or was not seen for long enough.
    Unknown,
    /// Nothing is suspected.
    Calm,
    /// It may leak.
    Suspect,
}

/// What a pod is suspected of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Suspected<'a> {
    /// What was found.
    pub(crate) finding: &'a LeakFinding,
    /// What it holds of the memory that this is about.
    pub(crate) held: Held,
}

/// What metrics show of a series.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shown<'a> {
    /// UUID of the device.
    pub(crate) device: &'a str,
    /// Which memory.
    pub(crate) memory: LeakMemory,
    /// What is thought of it.
    pub(crate) finding: Option<&'a LeakFinding>,
}

impl Leaks {
    /// The series of a pod in a mode that are told at a device.
    fn at_device(&self, pod: &str, mode: Mode, device: &str) -> impl Iterator<Item = &Series> {
        let series = self.pods.get(pod).into_iter().flat_map(|watched| &watched.series);
        series.filter(move |s| s.rule.is_some() && s.of.mode == mode && *s.of.device == *device)
    }

    /// The one of these that is suspected furthest; of two alike that of the device.
    fn furthest(&self, pod: &str, mode: Mode, device: &str) -> Option<&Series> {
        let suspected = self.at_device(pod, mode, device).filter(|series| series.finding.is_some());
        suspected.max_by_key(|series| (series.stage(), Reverse(series.of.memory)))
    }

    /// What is thought of a pod on a device by the policies of a mode; `None` where none of them says
    /// anything of leaks.
    pub(crate) fn seen(&self, pod: &str, mode: Mode, device: &str, now: Millis) -> Option<Seen> {
        let at = self.at(now);
        if let Some(worst) = self.furthest(pod, mode, device) {
            return Some(if worst.is_measured() { Seen::Suspect } else { Seen::Unknown });
        }
        // Host memory need not be readable for a device to be known.
        let unknown = |series: &Series| {
            series.of.memory == LeakMemory::Device && !(series.is_known(at) && series.is_measured())
        };
        let each = self.at_device(pod, mode, device).map(unknown);
        each.reduce(|a, b| a || b).map(|unknown| if unknown { Seen::Unknown } else { Seen::Calm })
    }

    /// What a pod on a device is suspected of, measured or not.
    pub(crate) fn suspected(&self, pod: &str, mode: Mode, device: &str) -> Option<Suspected<'_>> {
        let series = self.furthest(pod, mode, device)?;
        Some(Suspected { finding: series.finding.as_ref()?, held: series.held() })
    }

    /// What a pod that is told of at a device holds of a memory.
    pub(crate) fn held(&self, pod: &str, mode: Mode, device: &str, memory: LeakMemory) -> Held {
        let mut series = self.at_device(pod, mode, device).filter(|series| series.of.memory == memory);
        series.next().map(Series::held).unwrap_or_default()
    }

    /// What a pod ought to be told, if an enforced rule says so.
    pub(crate) fn wanted(&self, pod: &str) -> Option<Wanted> {
        let of = |series: &Series| {
            let rule = series.rule.as_ref().filter(|_| series.stage() == Some(LeakStage::Act))?;
            let asks = |type_| rule.actions.iter().any(|action| action.type_ == type_);
            let device = match series.of.memory {
                LeakMemory::Device => Arc::clone(&series.of.device),
                LeakMemory::Host => HOST.into(),
            };
            let Held { used, limit } = series.held();
            asks(ActionType::Signal).then(|| Wanted {
                level: Level::Critical,
                device,
                used,
                limit,
                restart: asks(ActionType::Restart),
                because: Because::Leak,
            })
        };
        let watched = self.pods.get(pod)?;
        let mut enforced: Vec<&Series> =
            watched.series.iter().filter(|series| series.of.mode == Mode::Enforce).collect();
        enforced.sort_by(|a, b| (a.of.memory, &a.of.device).cmp(&(b.of.memory, &b.of.device)));
        enforced.into_iter().find_map(of)
    }

    /// What is shown of a pod: of each series by the strictest mode that watches it.
    pub(crate) fn shown(&self, pod: &str) -> Vec<Shown<'_>> {
        let Some(watched) = self.pods.get(pod) else { return Vec::new() };
        // Of what was never measured, nothing is known.
        let told = |s: &&Series| s.rule.is_some() && (s.is_measured() || s.finding.is_some());
        let mut series: Vec<&Series> = watched.series.iter().filter(told).collect();
        series.sort_by_key(|series| Reverse(series.of.mode));
        let mut shown: Vec<Shown<'_>> = Vec::new();
        for Series { of, finding, .. } in series {
            if shown.iter().all(|other| other.memory != of.memory || *other.device != *of.device) {
                shown.push(Shown { device: &of.device, memory: of.memory, finding: finding.as_ref() });
            }
        }
        shown
    }
}

/// A share from 0 to 1 in percent.
pub(super) fn percent(share: f64) -> i32 {
    (0..=100).rev().find(|percent| f64::from(*percent) <= share * 100.0).unwrap_or(0)
}
