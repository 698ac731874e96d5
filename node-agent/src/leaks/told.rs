//! What is said of a pod's growth: to incidents, to the pod and in metrics.

use std::{cmp::Reverse, sync::Arc};

use highwater_crds::{ActionType, LeakFinding, LeakMemory, LeakStage, Level, Mode};
use highwater_policy::time::Millis;

use super::{Leaks, series::Series};
use crate::decide::{Because, Wanted};

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
    /// The series of a pod in a mode that are told at a device: of the device first.
    fn at_device(&self, pod: &str, mode: Mode, device: &str) -> impl Iterator<Item = &Series> {
        let series = self.pods.get(pod).into_iter().flat_map(|watched| &watched.series);
        let mut found: Vec<&Series> =
            series.filter(|s| s.rule.is_some() && s.of.mode == mode && *s.of.device == *device).collect();
        found.sort_by_key(|series| series.of.memory);
        found.into_iter()
    }

    /// What is thought of a pod on a device by the policies of a mode; `None` where none of them says
    /// anything of leaks.
    pub(crate) fn seen(&self, pod: &str, mode: Mode, device: &str, now: Millis) -> Option<Seen> {
        let at = self.at(now);
        let mut seen = None;
        let mut worst: Option<&Series> = None;
        for series in self.at_device(pod, mode, device) {
            if series.stage() > worst.and_then(Series::stage) {
                worst = Some(series);
            }
            // Host memory need not be readable for a device to be known.
            let known = series.is_known(at) && series.is_measured();
            let unknown = series.of.memory == LeakMemory::Device && !known;
            seen = match seen {
                _ if unknown => Some(Seen::Unknown),
                None => Some(Seen::Calm),
                before => before,
            };
        }
        match worst {
            Some(series) if !series.is_measured() => Some(Seen::Unknown),
            Some(_) => Some(Seen::Suspect),
            None => seen,
        }
    }

    /// What a pod on a device is suspected of, measured or not.
    pub(crate) fn suspected(&self, pod: &str, mode: Mode, device: &str) -> Option<&LeakFinding> {
        let found = self.at_device(pod, mode, device).filter_map(|series| series.finding.as_ref());
        found.max_by_key(|finding| (finding.stage, Reverse(finding.memory)))
    }

    /// What a pod ought to be told, if an enforced rule says so.
    pub(crate) fn wanted(&self, pod: &str) -> Option<Wanted> {
        let of = |series: &Series| {
            let rule = series.rule.as_ref().filter(|_| series.stage() == Some(LeakStage::Act))?;
            let asks = |type_| rule.actions.iter().any(|action| action.type_ == type_);
            let device = match series.of.memory {
                LeakMemory::Device => Arc::clone(&series.of.device),
                LeakMemory::Host => "host".into(),
            };
            asks(ActionType::Signal).then(|| Wanted {
                level: Level::Critical,
                device,
                used: series.used,
                limit: series.capacity,
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
