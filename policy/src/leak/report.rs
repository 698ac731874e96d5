//! A finding in the words of the API.

use highwater_crds::{Bounds, LeakAdvice, LeakFinding, LeakMemory, LeakProfile, LeakStage};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;

use crate::leak::{
    Finding, FindingKind, Interval, Profile, SCALES,
    number::{float, whole},
};

/// The longest reason, in characters.
const REASON: usize = 512;
/// An end that is further away is not told, in milliseconds.
const YEAR: u64 = 365 * 86_400_000;

impl Finding {
    /// What an incident says of it; `None` of one that is over. `at` is when it was found, on the wall
    /// clock.
    pub fn told(&self, memory: LeakMemory, profile: &Profile, at: Timestamp) -> Option<LeakFinding> {
        let stage = match self.kind {
            FindingKind::Suspect => LeakStage::Suspect,
            FindingKind::Act => LeakStage::Act,
            FindingKind::Cleared => return None,
        };
        let scales = |n: usize| i32::try_from(n.min(SCALES)).unwrap_or(0);
        let end = self.exhaustion_milliseconds.filter(|end| end.low < YEAR);
        Some(LeakFinding {
            at: MicroTime(at),
            stage,
            memory,
            class: self.class,
            slope_bytes_per_hour: bounds(self.slope_bytes_per_hour.map(signed)),
            exhaustion_seconds: end.map(|end| bounds(end.map(seconds))),
            confidence_percent: percent(self.confidence),
            agreeing_scales: scales(self.agreeing()),
            eligible_scales: scales(self.scales.len()),
            mode: self.mode.map(|(mode, _)| mode),
            mode_percent: self.mode.map(|(_, sure)| percent(sure)),
            advice: self.advice,
            profile: profile.told(),
            reason: self.reason.chars().take(REASON).collect(),
        })
    }
}

impl Profile {
    /// Earlier lives in short; `None` where there were none.
    pub fn told(&self) -> Option<LeakProfile> {
        let count = |n: u32| i32::try_from(n).unwrap_or(i32::MAX);
        let bytes = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        (*self != Self::default()).then(|| LeakProfile {
            lives: i32::try_from(self.lives().len()).unwrap_or(i32::MAX),
            peak_bytes: self.peak().map(bytes),
            ended_badly: count(self.ended_badly()),
            restarts_without_effect: count(self.restarts_without_effect()),
            last_slope_bytes_per_hour: self.last_slope().map(signed),
        })
    }
}

/// How long what was told of a suspicion stands, in milliseconds, while only its numbers change,
const RENEW_NUMBERS: u64 = 600_000;
/// and while what it is taken for does.
const RENEW_WORDS: u64 = 60_000;

/// Whether what is known of a leak is to be told again: `told` is what was told last, `age` milliseconds
/// ago. How far a suspicion goes is told at once.
pub fn renewal_due(told: Option<&LeakFinding>, now: &LeakFinding, age: u64) -> bool {
    let Some(told) = told else { return true };
    let words = |of: &LeakFinding| (of.memory, of.class, of.mode, of.advice);
    let numbers = |of: &LeakFinding| LeakFinding { at: now.at.clone(), ..of.clone() };
    told.stage != now.stage
        || (age >= RENEW_WORDS && words(told) != words(now))
        || (age >= RENEW_NUMBERS && numbers(told) != *now)
}

/// A recommendation as people read it.
pub fn recommendation(advice: Option<LeakAdvice>) -> &'static str {
    match advice {
        None => "nothing is recommended yet",
        Some(LeakAdvice::Restart) => "a restart in time is recommended",
        Some(LeakAdvice::AllocatorOption) => {
            "an option of the allocator, such as expandable segments, is recommended: a restart would only hide it"
        }
        Some(LeakAdvice::Ticket) => "somebody should look: restarts did not lower the slope",
        Some(LeakAdvice::CacheFilling) => "a cache is filling, which needs no act",
    }
}

impl<T> Interval<T> {
    /// The same of another kind of number.
    fn map<U>(self, f: impl Fn(T) -> U) -> Interval<U> {
        Interval { low: f(self.low), mid: f(self.mid), high: f(self.high) }
    }
}

fn bounds(of: Interval<i64>) -> Bounds {
    Bounds { low: of.low, mid: of.mid, high: of.high }
}

/// A number of bytes, which may be negative, without its fraction.
fn signed(bytes: f64) -> i64 {
    let size = i64::try_from(whole(bytes.abs())).unwrap_or(i64::MAX);
    if bytes < 0.0 { size.saturating_neg() } else { size }
}

fn seconds(milliseconds: u64) -> i64 {
    i64::try_from(milliseconds / 1000).unwrap_or(i64::MAX)
}

/// A share from 0 to 1 in percent.
fn percent(share: f64) -> i32 {
    let percent = whole((share.clamp(0.0, 1.0) * 100.0).round());
    i32::try_from(percent).unwrap_or(0)
}

/// Seconds of a time in milliseconds, for metrics.
pub fn as_seconds(milliseconds: u64) -> f64 {
    float(milliseconds) / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        leak::{LeakClass, LeakMode, Life, LifeEnd, Rule, Signals},
        time::Millis,
    };

    fn finding(kind: FindingKind) -> Finding {
        Finding {
            at: Millis(0),
            kind,
            rule: Rule::Trend,
            class: LeakClass::Step,
            slope_bytes_per_hour: Interval { low: -1.5e9, mid: 2.5e9, high: f64::INFINITY },
            exhaustion_milliseconds: Some(Interval { low: 90_500, mid: 120_000, high: u64::MAX }),
            confidence: 0.834,
            scales: Vec::new(),
            mode: Some((LeakMode::OneRank, 0.9)),
            advice: Some(LeakAdvice::Ticket),
            signals: Signals::default(),
            reason: "r".repeat(9999),
        }
    }

    #[test]
    fn a_finding_is_told_within_the_bounds_of_the_api() {
        let told =
            finding(FindingKind::Act).told(LeakMemory::Host, &Profile::default(), Timestamp::UNIX_EPOCH);
        let told = told.unwrap();
        assert_eq!(
            (told.stage, told.memory, told.class),
            (LeakStage::Act, LeakMemory::Host, LeakClass::Step)
        );
        let slope = told.slope_bytes_per_hour;
        assert_eq!((slope.low, slope.mid, slope.high), (-1_500_000_000, 2_500_000_000, i64::MAX));
        assert_eq!(told.exhaustion_seconds.map(|end| (end.low, end.mid)), Some((90, 120)));
        assert_eq!((told.confidence_percent, told.mode_percent), (83, Some(90)));
        assert_eq!((told.advice, told.profile, told.reason.len()), (Some(LeakAdvice::Ticket), None, 512));
        let none = finding(FindingKind::Cleared).told(
            LeakMemory::Device,
            &Profile::default(),
            Timestamp::UNIX_EPOCH,
        );
        assert_eq!(none, None);
        let far = Finding {
            exhaustion_milliseconds: Some(Interval { low: YEAR, mid: YEAR, high: YEAR }),
            ..finding(FindingKind::Suspect)
        };
        let told = far.told(LeakMemory::Device, &Profile::default(), Timestamp::UNIX_EPOCH);
        assert_eq!(told.unwrap().exhaustion_seconds, None);
    }

    #[test]
    fn a_suspicion_that_stands_is_told_again_seldom() {
        let tell = |kind, class, slope| {
            let finding = Finding { class, ..finding(kind) };
            let finding =
                Finding { slope_bytes_per_hour: Interval { low: 0.0, mid: slope, high: 9.0 }, ..finding };
            finding.told(LeakMemory::Device, &Profile::default(), Timestamp::UNIX_EPOCH).unwrap()
        };
        let told = tell(FindingKind::Suspect, LeakClass::Linear, 1.0);
        let raised = tell(FindingKind::Act, LeakClass::Linear, 1.0);
        let other = tell(FindingKind::Suspect, LeakClass::Step, 1.0);
        let faster = tell(FindingKind::Suspect, LeakClass::Linear, 2.0);
        assert!(renewal_due(None, &told, 0));
        assert!(renewal_due(Some(&told), &raised, 0));
        assert!(!renewal_due(Some(&told), &other, 59_999) && renewal_due(Some(&told), &other, 60_000));
        assert!(!renewal_due(Some(&told), &faster, 599_999) && renewal_due(Some(&told), &faster, 600_000));
        assert!(!renewal_due(Some(&told), &told, u64::MAX), "nothing is new");
    }

    #[test]
    fn a_profile_is_told_in_at_most_256_bytes() {
        let life = Life { milliseconds: u64::MAX, peak: u64::MAX, ..Life::default() };
        let mut profile = Profile::default();
        assert_eq!(profile.told(), None);
        (0..20).for_each(|_| profile.learn(life));
        for _ in 0..9 {
            profile.ended(life, LifeEnd::LeakAct, Some(1e300));
        }
        let told = profile.told().unwrap();
        assert_eq!((told.lives, told.ended_badly, told.restarts_without_effect), (8, 9, 8));
        assert!(serde_json::to_vec(&told).unwrap().len() <= 256);
    }
}
