//! One pod on one device: what the agent would have seen, and decided.

use std::sync::Arc;

use highwater_crds::{Breaker, ByteSize, LeakClass, LeakStage, Level};
use highwater_policy::{
    breaker,
    leak::{Circumstances, Detector, Finding, FindingKind, LifeEnd, Sample, Settings, life_end},
    ledger::Share,
    time::Millis,
};

use super::{
    decision::{Decision, Kind, Seconds, class},
    input::Row,
    oom,
    span::span,
};

/// Where a decision belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct At {
    /// The life; 0 where the file gives none.
    pub(crate) life: i64,
    /// The time, as the file gives it.
    pub(crate) milliseconds: u64,
}

/// What became of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// It was looked at.
    Yes,
    /// Its time is before that of the row before: nothing can be undone, so it is passed over.
    Backwards,
    /// Its time is that of the row before.
    Repeated,
}

/// All that is kept of a series.
#[derive(Debug)]
pub(crate) struct Series {
    life: Option<i64>,
    /// Time of the last row, as the file gives it, in milliseconds.
    seen: Option<u64>,
    /// What is added to that time, so that it goes on where a new life counts from 0 again.
    offset: i64,
    /// Memory that there is.
    capacity: Option<u64>,
    /// What the policy lets the pod have of it.
    quota: Option<u64>,
    level: breaker::State,
    /// The level has been Emergency in this life.
    tripped: bool,
    oom: oom::Watch,
    /// The last act that was not taken back.
    act: Option<Millis>,
    /// There was one in this life.
    acted: bool,
    /// What is thought of this life, as long as no act was due.
    thought: Option<(LeakStage, LeakClass)>,
    /// A suspicion was told, and not yet that it is over.
    told: bool,
    detector: Detector,
}

impl Series {
    pub(crate) fn new(settings: &Arc<Settings>, capacity: Option<u64>, quota: Option<u64>) -> Self {
        Self {
            life: None,
            seen: None,
            offset: 0,
            capacity,
            quota,
            level: breaker::State::default(),
            tripped: false,
            oom: oom::Watch::default(),
            act: None,
            acted: false,
            thought: None,
            told: false,
            detector: Detector::new(Arc::clone(settings)),
        }
    }

    /// What the pod can come to: as the agent says, its limit where it has one, and no more than there
    /// is.
    fn reach(&self) -> Option<u64> {
        match (self.capacity, self.quota) {
            (Some(capacity), Some(quota)) => Some(capacity.min(quota)),
            (capacity, quota) => capacity.or(quota),
        }
    }

    /// Whether it is known how much memory there is, so that marks can be passed.
    pub(crate) fn has_capacity(&self) -> bool {
        self.capacity.is_some()
    }

    /// Whether the policy gives the pod a limit.
    pub(crate) fn has_quota(&self) -> bool {
        self.quota.is_some()
    }

    /// Whether a suspicion stands that was told.
    pub(crate) fn is_suspected(&self) -> bool {
        self.told
    }

    /// Takes a row, and calls back for each decision with where it belongs.
    pub(crate) fn take<E>(
        &mut self,
        row: &Row<'_>,
        breaker: Option<&Breaker>,
        mut decide: impl FnMut(At, Verdict) -> Result<(), E>,
    ) -> Result<Taken, E> {
        let begins = self.begins(row);
        if let Some(seen) = self.seen.filter(|seen| row.milliseconds <= *seen) {
            if !begins || row.life < self.life {
                return Ok(if row.milliseconds == seen { Taken::Repeated } else { Taken::Backwards });
            }
            // The new life counts from a start of its own.
            let behind = i64::try_from(seen - row.milliseconds).unwrap_or(i64::MAX);
            self.offset = self.offset.saturating_add(behind).saturating_add(AFTER_A_RESTART);
        }
        let before = At { life: self.life.unwrap_or(0), milliseconds: self.seen.unwrap_or(row.milliseconds) };
        self.seen = Some(row.milliseconds);
        self.life = row.life.or(self.life);
        self.capacity = row.capacity.or(self.capacity);
        let at = At { life: self.life.unwrap_or(0), milliseconds: row.milliseconds };
        let now = Millis(row.milliseconds.saturating_add_signed(self.offset));
        let share = row.bytes.zip(self.capacity).map(|(used, of)| Share { used, of });

        if begins {
            self.oom.restart();
        }
        let full = share.and_then(|share| self.oom.step(share, self.life.is_some(), now));
        if begins {
            self.begin(now, full.is_some());
        }
        if let Some(what) = full {
            let act = match self.act.take() {
                Some(act) => format!("an act was due {} before", span(now.since(act))),
                None => "no act was due before".to_owned(),
            };
            // What ran out of memory is the life that has ended, where one has.
            decide(if begins { before } else { at }, Verdict::plain(Kind::Oom, format!("{what}; {act}")))?;
        }
        if begins && std::mem::take(&mut self.told) {
            // As the agent would see it: an incident about a pod ends with the pod's life.
            decide(
                before,
                Verdict::plain(Kind::Ended, "the pod was started anew under suspicion".to_owned()),
            )?;
        }
        let mut decide = |verdict| decide(at, verdict);
        let sample = Sample {
            at: now,
            bytes: row.bytes,
            capacity: self.reach(),
            work: row.work,
            host_bytes: row.host_bytes,
            ..Sample::default()
        };
        if let Some(finding) = self.detector.push(&sample) {
            self.found(finding, now, &mut decide)?;
        } else if self.told && !self.detector.suspects() {
            (self.told, self.act, self.thought) = (false, None, None);
            let why = "the capacity is that of another device: what was seen before says nothing of it";
            decide(Verdict::plain(Kind::Cleared, why.to_owned()))?;
        }
        if let (Some(breaker), Some(share)) = (breaker, share) {
            self.trip(breaker, share, now, &mut decide)?;
        }
        Ok(Taken::Yes)
    }

    /// Whether a row begins a new life.
    fn begins(&self, row: &Row<'_>) -> bool {
        self.life.zip(row.life).is_some_and(|(had, has)| had != has)
    }

    /// A new life begins. Only what ended as it should counts as healthy: not a life that the
    /// policy would have ended, nor one that may have run out of memory.
    fn begin(&mut self, now: Millis, full: bool) {
        let ended = if full {
            LifeEnd::OutOfMemory
        } else if self.tripped {
            LifeEnd::Breaker
        } else if self.acted {
            LifeEnd::LeakAct
        } else {
            life_end(Circumstances {
                orderly: true,
                whole: true,
                thought: self.thought,
                ..Circumstances::default()
            })
        };
        self.detector.begin_life(now, ended);
        (self.tripped, self.acted, self.thought) = (false, false, None);
    }

    fn found<E>(
        &mut self,
        finding: Finding,
        now: Millis,
        decide: &mut impl FnMut(Verdict) -> Result<(), E>,
    ) -> Result<(), E> {
        let kind = match finding.kind {
            FindingKind::Act => {
                self.act = Some(now);
                self.acted = true;
                Kind::Act
            }
            FindingKind::Suspect => {
                self.thought = Some((LeakStage::Suspect, finding.class));
                Kind::Suspect
            }
            FindingKind::Cleared => {
                (self.act, self.thought) = (None, None);
                self.told = false;
                return decide(Verdict::plain(Kind::Cleared, finding.reason));
            }
        };
        self.told = true;
        decide(Verdict { kind, reason: finding.reason.clone(), finding: Some(finding) })
    }

    fn trip<E>(
        &mut self,
        breaker: &Breaker,
        share: Share,
        now: Millis,
        decide: &mut impl FnMut(Verdict) -> Result<(), E>,
    ) -> Result<(), E> {
        let (level, transition) = breaker::step(breaker, self.level, Some(share), now);
        self.level = level;
        let Some(to) = transition.filter(|t| t.to > t.from).map(|t| t.to) else { return Ok(()) };
        self.tripped |= to == Level::Emergency;
        let (kind, mark) = match to {
            Level::Normal => return Ok(()),
            Level::Warning => (Kind::Warning, &breaker.warning),
            Level::Critical => (Kind::Critical, &breaker.critical),
            Level::Emergency => (Kind::Emergency, &breaker.emergency),
        };
        let trip = mark.as_ref().map_or(0, |mark| mark.trip_percent);
        decide(Verdict::plain(
            kind,
            format!(
                "{} of {} in use: {} %, the mark is {trip} %",
                ByteSize(share.used).rounded(),
                ByteSize(share.of).rounded(),
                share.percent()
            ),
        ))
    }
}

/// Milliseconds that are taken to lie between the last row of a life and the first of one whose
/// time counts from a start of its own.
const AFTER_A_RESTART: i64 = 10_000;

/// A decision, but for whom and when.
#[derive(Clone, Debug)]
pub(crate) struct Verdict {
    pub(crate) kind: Kind,
    pub(crate) finding: Option<Finding>,
    pub(crate) reason: String,
}

impl Verdict {
    fn plain(kind: Kind, reason: String) -> Self {
        Self { kind, finding: None, reason }
    }

    /// With whom and when.
    pub(crate) fn decision<'a>(self, pod: &'a str, device: &'a str, at: At) -> Decision<'a> {
        let finding = self.finding.as_ref();
        Decision {
            pod,
            device,
            life: at.life,
            seconds: Seconds(at.milliseconds),
            kind: self.kind,
            class: finding.map(|finding| class(finding.class)),
            slope_bytes_per_hour: finding.map(|finding| finding.slope_bytes_per_hour.mid.round()),
            exhaustion_seconds: finding.and_then(|f| f.exhaustion_milliseconds).map(|e| e.mid / 1000),
            confidence: finding.map(|finding| (finding.confidence * 1000.0).round() / 1000.0),
            reason: self.reason,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::policy::Policy;

    /// Feeds `(life, seconds, percent)` and returns what became of each, and the decisions.
    fn replay(rows: &[(Option<i64>, u64, Option<u64>)]) -> (Vec<Taken>, Vec<(i64, Kind)>) {
        let policy = Policy::default();
        let mut series = Series::new(&policy.settings, Some(100), None);
        let mut decisions = Vec::new();
        let taken = rows
            .iter()
            .map(|&(life, second, bytes)| {
                let row = Row { milliseconds: second * 1000, bytes, life, ..Row::default() };
                let decide = |at: At, verdict: Verdict| -> Result<(), ()> {
                    decisions.push((at.life, verdict.kind));
                    Ok(())
                };
                series.take(&row, policy.breaker.as_ref(), decide).unwrap()
            })
            .collect();
        (taken, decisions)
    }

    #[test]
    fn what_cannot_be_undone_is_passed_over() {
        use Taken::{Backwards, Repeated, Yes};
        let (taken, decisions) =
            replay(&[(None, 20, Some(1)), (None, 10, Some(99)), (None, 20, Some(99)), (None, 30, Some(1))]);
        assert_eq!(taken, [Yes, Backwards, Repeated, Yes]);
        assert!(decisions.is_empty());
    }

    #[test]
    fn a_new_life_may_count_from_a_start_of_its_own() {
        use Taken::{Backwards, Yes};
        let (taken, _) = replay(&[
            (Some(1), 100, Some(1)),
            (Some(2), 0, Some(1)),
            (Some(2), 10, Some(1)),
            (Some(1), 5, Some(1)),  // a row of the life before, come late
            (Some(1), 20, Some(1)), // a change resets, whatever the number
            (None, 30, Some(1)),
        ]);
        assert_eq!(taken, [Yes, Yes, Yes, Backwards, Yes, Yes]);
    }

    #[test]
    fn marks_are_said_when_they_are_passed_upwards() {
        let (_, decisions) = replay(&[
            (None, 0, Some(80)),
            (None, 10, Some(80)),
            (None, 20, Some(96)),
            (None, 30, Some(10)),
            (None, 40, None),
            (None, 50, Some(96)),
        ]);
        let kinds: Vec<Kind> = decisions.into_iter().map(|(_, kind)| kind).collect();
        assert_eq!(kinds, [Kind::Warning, Kind::Emergency, Kind::Oom, Kind::Emergency]);
    }

    #[test]
    fn a_restart_after_high_use_is_taken_for_the_end_of_memory() {
        let (_, decisions) =
            replay(&[(Some(4), 0, Some(93)), (Some(4), 10, Some(94)), (Some(5), 20, Some(3))]);
        assert_eq!(decisions, [(4, Kind::Critical), (4, Kind::Oom)]);
        let (_, decisions) =
            replay(&[(Some(4), 0, Some(93)), (Some(4), 10, Some(94)), (Some(4), 20, Some(3))]);
        assert_eq!(decisions, [(4, Kind::Critical)]);
    }

    #[test]
    fn a_million_series_are_a_few_gigabytes() {
        assert!(size_of::<Series>() <= 5 << 10, "{}", size_of::<Series>());
    }
}
