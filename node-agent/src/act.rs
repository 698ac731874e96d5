//! The act step: pressure files of pods that opted in. The other acts have a file each below this one.

pub(crate) mod carry;
pub(crate) mod hook;
pub(crate) mod hooks;
pub(crate) mod parks;
pub(crate) mod record;
pub(crate) mod restart;

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use highwater_crds::{ByteSize, Level};
use highwater_policy::time::Millis;
use jiff::Timestamp;
use tracing::{info, warn};

use crate::{
    decide::{Because, HOST, Wanted},
    publish::Notice,
    signal::{BatchAdvice, Pressure, SignalError, Signals},
    world::Pod,
};

/// How long after a pod was first measured a file that an earlier agent may have left is cleared,
/// in milliseconds, beyond the longest hold: by then it is known whether there is pressure.
const CLEAR_AFTER: u64 = 10_000;
/// How long to wait after a failure, in milliseconds.
const AGAIN_AFTER: u64 = 5_000;
/// For how long a pod is made unready at a time, in milliseconds: should the agent end, it is ready again
/// then.
const UNREADY_FOR: u64 = 30_000;
/// How often that is renewed, in milliseconds.
const RENEW_EVERY: u64 = 10_000;

/// The moment of a sample.
#[derive(Clone, Copy, Debug)]
pub(crate) struct At {
    /// On the monotonic clock.
    pub(crate) now: Millis,
    /// For people.
    pub(crate) wall: Timestamp,
    /// Since when devices have been measured.
    pub(crate) measured: Millis,
    /// The longest that a reason for a signal must last, in milliseconds.
    pub(crate) hold: u64,
}

/// What pods have been shown.
#[derive(Debug)]
pub(crate) struct Acts {
    signals: Signals,
    shown: HashMap<Arc<str>, Shown>,
    /// Pods that are to be unready.
    unready: HashSet<Arc<str>>,
    /// The earliest time at which something is due that no change announces.
    again: Option<Millis>,
    /// Files written.
    pub(crate) written: u64,
    /// Files that could not be written.
    pub(crate) failed: u64,
}

#[derive(Debug, Default)]
struct Shown {
    /// What the file says; `None` while that is not known.
    state: Option<(Level, Option<Arc<str>>)>,
    /// When the pod was last shown that it is to be unready; `None` where the file does not say so.
    unready: Option<Millis>,
    not_before: Millis,
}

impl Acts {
    /// Nothing is known of what pods were shown before.
    pub(crate) fn new(signals: Signals) -> Self {
        Self { signals, shown: HashMap::new(), unready: HashSet::new(), again: None, written: 0, failed: 0 }
    }

    /// Whether there may be something to show although nothing changed since all pods were looked at.
    pub(crate) fn is_due(&self, now: Millis) -> bool {
        self.again.is_some_and(|at| now >= at)
    }

    /// All pods are about to be looked at.
    pub(crate) fn begin(&mut self) {
        self.again = None;
    }

    /// Shows a pod what it ought to see: `wanted`, or that all is well. While acts are paused a
    /// signal is not raised; it may fall. Returns what there is to tell.
    pub(crate) fn show(
        &mut self,
        pod: &Arc<Pod>,
        wanted: Option<&Wanted>,
        paused: bool,
        at: At,
    ) -> Option<Notice> {
        let At { now, wall, .. } = at;
        let unready = self.unready.contains(&pod.kubelet_uid);
        let shown = self.shown.entry(Arc::clone(&pod.kubelet_uid)).or_default();
        let before = shown.state.as_ref().map_or(Level::Normal, |(level, _)| *level);
        // That acts are not paused any more is a change.
        let held = wanted.filter(|wanted| paused && wanted.level > before);
        let held = held.map(|wanted| Wanted { level: before, ..wanted.clone() });
        let wanted = match &held {
            Some(held) => Some(held).filter(|held| held.level > Level::Normal),
            None => wanted,
        };
        let level = wanted.map_or(Level::Normal, |wanted| wanted.level);
        let renewal = shown.unready.map(|at| at.plus(RENEW_EVERY));
        let stands = match (unready, renewal) {
            (true, Some(renewal)) => now < renewal,
            (unready, renewal) => !unready && renewal.is_none(),
        };
        if let (true, Some(renewal)) = (unready && stands, renewal) {
            self.again = Some(self.again.map_or(renewal, |again| again.min(renewal)));
        }
        let from = match &shown.state {
            None if held.is_some() && !unready => return None,
            None if wanted.is_none() && !unready => {
                pod.first_seen.max(at.measured).plus(CLEAR_AFTER.saturating_add(at.hold))
            }
            Some((shown, device))
                if stands
                    && *shown == level
                    && (held.is_some() || device.as_ref() == wanted.map(|w| &w.device)) =>
            {
                return None;
            }
            _ => now,
        };
        let from = from.max(shown.not_before);
        if now < from {
            self.again = Some(self.again.map_or(from, |again| again.min(from)));
            return None;
        }
        match self.signals.write(&pod.kubelet_uid, &pressure(wanted, unready, wall)) {
            Ok(()) => {
                shown.state = Some((level, wanted.map(|w| Arc::clone(&w.device))));
                shown.unready = unready.then_some(now);
                if unready {
                    let renewal = now.plus(RENEW_EVERY);
                    self.again = Some(self.again.map_or(renewal, |again| again.min(renewal)));
                }
                self.written += 1;
            }
            Err(error) => {
                let from = now.plus(AGAIN_AFTER);
                shown.not_before = from;
                self.again = Some(self.again.map_or(from, |again| again.min(from)));
                self.failed += 1;
                // A volume that is not there yet is no fault: the pod is being started.
                if !matches!(error, SignalError::NoVolume) {
                    warn!(pod = pod.facts.name, namespace = pod.facts.namespace, %error, "cannot signal");
                }
                return None;
            }
        }
        let wanted = wanted.filter(|_| level > before)?;
        info!(pod = pod.facts.name, namespace = pod.facts.namespace, ?level, "signalled");
        Some(Notice::warning(pod, "MemoryPressure", "Signal", note(wanted)))
    }

    /// Pods that were last shown that memory stands high, or that are, or are to be, unready.
    pub(crate) fn raised(&self) -> impl Iterator<Item = &Arc<str>> {
        let raised = |shown: &Shown| {
            shown.unready.is_some() || shown.state.as_ref().is_some_and(|(level, _)| *level > Level::Normal)
        };
        let shown = self.shown.iter().filter(move |(_, shown)| raised(shown)).map(|(uid, _)| uid);
        shown.chain(&self.unready)
    }

    /// Has a pod unready from now on, or no longer. Returns whether that is a change.
    pub(crate) fn set_unready(&mut self, pod: &Arc<str>, unready: bool) -> bool {
        if unready { self.unready.insert(Arc::clone(pod)) } else { self.unready.remove(pod) }
    }

    /// Whether the file of a pod says that it is unready.
    pub(crate) fn is_unready(&self, pod: &str) -> bool {
        self.shown.get(pod).is_some_and(|shown| shown.unready.is_some())
    }

    /// Pods that are to be unready.
    pub(crate) fn unready_pods(&self) -> HashSet<Arc<str>> {
        self.unready.clone()
    }

    /// How many files say that their pod is unready.
    pub(crate) fn unready(&self) -> usize {
        self.shown.values().filter(|shown| shown.unready.is_some()).count()
    }

    /// Forgets pods that are gone.
    pub(crate) fn retain(&mut self, is_there: impl Fn(&str) -> bool) {
        self.shown.retain(|uid, _| is_there(uid));
        self.unready.retain(|uid| is_there(uid));
    }
}

fn pressure(wanted: Option<&Wanted>, unready: bool, wall: Timestamp) -> Pressure {
    let level = wanted.map_or(Level::Normal, |wanted| wanted.level);
    Pressure {
        level,
        device: wanted.map(|w| w.device.to_string()).unwrap_or_default(),
        used_bytes: wanted.and_then(|w| w.used),
        limit_bytes: wanted.and_then(|w| w.limit),
        batch_advice: BatchAdvice::at(level),
        deadline: wanted.filter(|w| w.restart).map(|_| wall),
        unready_until: unready
            .then(|| u64::try_from(wall.as_millisecond()).unwrap_or(0).saturating_add(UNREADY_FOR)),
        at: wall,
    }
}

fn note(wanted: &Wanted) -> String {
    let size = |bytes: Option<u64>| bytes.map_or("an unknown amount".to_owned(), |b| ByteSize(b).rounded());
    let why = match wanted.because {
        Because::Breach => format!("holds {} of a limit of {}", size(wanted.used), size(wanted.limit)),
        Because::Breaker => {
            format!("the device is at level {:?}; the pod holds {}", wanted.level, size(wanted.used))
        }
        Because::Near => format!(
            "the pod is at level {:?}: it holds {} of a limit of {}",
            wanted.level,
            size(wanted.used),
            size(wanted.limit)
        ),
        Because::Leak => {
            let grows = format!(
                "grows and may run out soon; it holds {} and can come to {}",
                size(wanted.used),
                size(wanted.limit)
            );
            if &*wanted.device == HOST {
                return format!("asked to use less host memory: the pod's memory there {grows}");
            }
            format!("the pod's memory there {grows}")
        }
        Because::Host => {
            return format!(
                "asked to use less host memory: holds {} of {}, none of which can be dropped",
                size(wanted.used),
                size(wanted.limit)
            );
        }
    };
    format!("asked to use less memory on {}: {why}", wanted.device)
}

#[cfg(test)]
mod tests {
    use highwater_policy::pod::PodFacts;

    use super::*;

    struct Bench {
        root: tempfile::TempDir,
        acts: Acts,
        pod: Arc<Pod>,
    }

    impl Bench {
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            let volume = root.path().join("pods/abc/volumes/kubernetes.io~empty-dir/highwater");
            std::fs::create_dir_all(volume).unwrap();
            let pod = Arc::new(Pod {
                facts: PodFacts::default(),
                uid: "abc".into(),
                kubelet_uid: "abc".into(),
                first_seen: Millis(0),
                host_oom_kills: 0,
            });
            Self { acts: Acts::new(Signals::new(root.path())), root, pod }
        }

        fn show(&mut self, level: Option<Level>, paused: bool, now: u64) -> bool {
            let wanted = level.map(|level| Wanted {
                level,
                device: "GPU-1".into(),
                used: Some(2),
                limit: Some(1),
                restart: false,
                because: Because::Breach,
            });
            let at =
                At { now: Millis(now), wall: Timestamp::UNIX_EPOCH, measured: Millis(500), hold: 20_000 };
            self.acts.show(&self.pod, wanted.as_ref(), paused, at).is_some()
        }

        fn file(&self) -> Option<serde_json::Value> {
            let path = self.root.path().join("pods/abc/volumes/kubernetes.io~empty-dir/highwater/pressure");
            serde_json::from_slice(&std::fs::read(path).ok()?).unwrap()
        }

        fn level(&self) -> Option<String> {
            Some(self.file()?["level"].as_str().unwrap().to_owned())
        }
    }

    #[test]
    fn a_signal_is_written_once_a_change_and_told_when_it_rises() {
        let mut bench = Bench::new();
        assert!(bench.show(Some(Level::Warning), false, 0));
        assert!(!bench.show(Some(Level::Warning), false, 100));
        assert!(bench.show(Some(Level::Critical), false, 200));
        assert!(!bench.show(Some(Level::Warning), false, 300));
        assert!(!bench.show(None, false, 400));
        assert_eq!(bench.level().as_deref(), Some("Normal"));
        assert_eq!(bench.acts.written, 4);
    }

    #[test]
    fn while_paused_a_signal_may_fall_but_not_rise() {
        let mut bench = Bench::new();
        bench.show(Some(Level::Warning), true, 0);
        assert_eq!(bench.level(), None);
        bench.show(Some(Level::Critical), false, 100);
        bench.show(None, true, 200);
        assert_eq!(bench.level().as_deref(), Some("Normal"));
    }

    #[test]
    fn what_an_earlier_agent_left_is_cleared_once_it_is_known_that_there_is_no_pressure() {
        let mut bench = Bench::new();
        bench.show(None, false, 30_499);
        assert_eq!(bench.level(), None, "a hold of 20 s may be running");
        bench.show(None, false, 30_500);
        assert_eq!(bench.level().as_deref(), Some("Normal"));
    }

    #[test]
    fn an_unready_pod_is_shown_so_renewed_and_made_ready_again_even_while_paused() {
        let mut bench = Bench::new();
        let until = |bench: &Bench| bench.file().map(|file| file["unreadyUntil"].as_u64());
        assert!(bench.acts.set_unready(&"abc".into(), true));
        bench.show(None, false, 0);
        assert_eq!(until(&bench), Some(Some(30_000)));
        assert!(bench.acts.is_unready("abc") && !bench.acts.is_due(Millis(9_999)));
        bench.show(None, false, 9_999);
        assert_eq!(bench.acts.written, 1);
        assert!(bench.acts.is_due(Millis(10_000)));
        bench.show(None, false, 10_000);
        assert_eq!(bench.acts.written, 2);
        assert!(bench.acts.set_unready(&"abc".into(), false));
        assert!(bench.acts.raised().any(|uid| **uid == *"abc"));
        bench.show(Some(Level::Critical), true, 10_100);
        assert_eq!((until(&bench), bench.level().as_deref()), (Some(None), Some("Normal")));
        assert!(!bench.acts.is_unready("abc"));
    }

    #[test]
    fn a_failure_is_tried_again_later() {
        let mut bench = Bench::new();
        std::fs::remove_dir_all(bench.root.path().join("pods")).unwrap();
        bench.show(Some(Level::Warning), false, 0);
        bench.show(Some(Level::Warning), false, 100);
        assert_eq!(bench.acts.failed, 1);
        bench.show(Some(Level::Warning), false, 5_000);
        assert_eq!(bench.acts.failed, 2);
    }

    #[test]
    fn what_is_due_without_a_change_is_known_and_nothing_else_needs_a_look() {
        let mut bench = Bench::new();
        let due = |bench: &Bench, now| bench.acts.is_due(Millis(now));
        assert!(!due(&bench, 0), "nothing is known of any pod");
        bench.show(None, false, 600);
        assert!(!due(&bench, 30_499) && due(&bench, 30_500), "an older file may be there");
        bench.acts.begin();
        bench.show(None, false, 30_500);
        assert!(!due(&bench, u64::MAX), "it is cleared");
        std::fs::remove_dir_all(bench.root.path().join("pods")).unwrap();
        bench.show(Some(Level::Warning), false, 31_000);
        assert!(!due(&bench, 35_999) && due(&bench, 36_000), "it could not be written");
    }
}
