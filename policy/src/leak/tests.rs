//! The detector as a whole: each class, each gate, and input that is not as it should be.

use std::sync::Arc;

use proptest::prelude::*;

use super::{
    Detector, Finding, FindingKind, Framework, LeakAdvice, LeakClass, LeakMode, LifeEnd, Sample, Settings,
    State, StateError,
};
use crate::time::Millis;

const GI: f64 = 1_073_741_824.0;
const MINUTE: u64 = 60_000;
const CAPACITY: u64 = 80 << 30;

fn detector() -> Detector {
    Detector::new(Arc::new(Settings::default()))
}

fn sample(minute: u64, gi: f64) -> Sample {
    let bytes = super::number::whole(gi * GI);
    Sample { at: Millis(minute * MINUTE), bytes: Some(bytes), capacity: Some(CAPACITY), ..Sample::default() }
}

/// Feeds so many minutes of a height in GiB by the hour.
fn feed(detector: &mut Detector, from: u64, minutes: u64, height: impl Fn(f64) -> f64) -> Vec<Finding> {
    (0..minutes)
        .filter_map(|m| {
            // A little unevenness, so that nothing rests on perfect numbers.
            let uneven = f64::from(u32::try_from((m * 7919) % 13).unwrap()) * 0.004;
            let hour = f64::from(u32::try_from(m).unwrap()) / 60.0;
            detector.push(&sample(from + m, (height(hour) + uneven).min(79.9)))
        })
        .collect()
}

fn acts(findings: &[Finding]) -> Vec<&Finding> {
    findings.iter().filter(|f| f.kind == FindingKind::Act).collect()
}

#[test]
fn l01_a_linear_leak_is_suspect_early_and_acted_on_in_time() {
    // Level at 20 GiB for four hours, then 6 GiB an hour: full after fourteen hours.
    let findings = feed(&mut detector(), 0, 830, |h| 20.0 + 6.0 * (h - 4.0).max(0.0));
    assert_eq!(findings.first().map(|f| f.kind), Some(FindingKind::Suspect));
    assert!(findings[0].at.0 < 7 * 60 * MINUTE, "{findings:?}");
    let acts = acts(&findings);
    assert_eq!(acts.len(), 1, "{findings:?}");
    let lead = 840 * MINUTE - acts[0].at.0;
    assert!((10 * MINUTE..=80 * MINUTE).contains(&lead), "{lead}");
    assert_eq!((acts[0].class, acts[0].advice), (LeakClass::Linear, Some(LeakAdvice::Restart)));
    let slope = acts[0].slope_bytes_per_hour;
    assert!((slope.mid / GI - 6.0).abs() < 0.5, "{slope:?}");
    let end = acts[0].exhaustion_milliseconds.unwrap();
    assert!(end.low <= lead + 10 * MINUTE && end.high + 10 * MINUTE >= lead, "{end:?} but {lead}");
    assert!(acts[0].confidence > 0.5 && acts[0].agreeing() >= 2);
    assert!(acts[0].reason.contains("6.0 GiB an hour"), "{}", acts[0].reason);
}

#[test]
fn r06_an_exponential_leak_is_acted_on_in_time() {
    let findings = feed(&mut detector(), 0, 595, |h| {
        20.0 + 60.0 * ((h - 4.0).max(0.0) * 0.667).exp2() / 64.0 * 4.0 - 3.75
    });
    let acts = acts(&findings);
    assert_eq!(acts.len(), 1, "{findings:?}");
}

#[test]
fn r06_a_leak_in_steps_is_acted_on() {
    let findings = feed(&mut detector(), 0, 715, |h| 20.0 + 4.0 * ((h - 2.0).max(0.0) * 1.5).floor());
    assert_eq!(acts(&findings).len(), 1, "{findings:?}");
}

#[test]
fn l07_a_cache_that_fills_and_levels_off_is_left_alone() {
    for plateau in [40.0, 60.0, 70.0, 76.0] {
        let saturating = |h: f64| 15.0 + (plateau - 15.0) * (1.0 - (-h / 1.5).exp());
        assert_eq!(acts(&feed(&mut detector(), 0, 1440, saturating)), Vec::<&Finding>::new(), "{plateau}");
    }
}

#[test]
fn a_day_and_a_sawtooth_are_left_alone() {
    let day = |h: f64| 45.0 + 25.0 * (h / 24.0 * std::f64::consts::TAU).sin();
    assert!(acts(&feed(&mut detector(), 0, 4320, day)).is_empty());
    let saw = |h: f64| 30.0 + 35.0 * (h / 3.0).fract();
    assert!(acts(&feed(&mut detector(), 0, 4320, saw)).is_empty());
}

#[test]
fn without_a_capacity_it_is_suspect_at_most() {
    let mut detector = detector();
    let findings: Vec<Finding> = (0..1200)
        .filter_map(|m| {
            let gi = 10.0 + f64::from(u32::try_from(m).unwrap()) * 0.5;
            detector.push(&Sample { capacity: None, ..sample(m, gi) })
        })
        .collect();
    assert!(findings.iter().any(|f| f.kind == FindingKind::Suspect));
    assert!(acts(&findings).is_empty());
    assert!(findings.iter().all(|f| f.exhaustion_milliseconds.is_none()), "{findings:?}");
}

#[test]
fn below_what_was_declared_nothing_is_suspect() {
    let mut detector = detector();
    detector.declared(Some(72 << 30));
    let fill = |h: f64| (20.0 + 10.0 * h).min(71.5);
    assert_eq!(feed(&mut detector, 0, 1440, fill), Vec::new());
}

#[test]
fn a_healthy_life_says_what_is_usual() {
    // A cache that fills to 76 of 80 GiB in a straight line.
    let fill = |h: f64| (20.0 + 16.0 * h).min(76.0);
    let mut detector = detector();
    feed(&mut detector, 0, 1440, fill);
    detector.begin_life(Millis(1440 * MINUTE), LifeEnd::Healthy);
    assert!(detector.profile().peak().is_some_and(|p| p > 75 << 30));
    assert!(acts(&feed(&mut detector, 1440, 1440, fill)).is_empty());
    // A pod that is usually at 30 GiB is acted on once it may run out, well below 88 %.
    let mut detector = self::detector();
    feed(&mut detector, 0, 1440, |_| 30.0);
    detector.begin_life(Millis(1440 * MINUTE), LifeEnd::Healthy);
    let findings = feed(&mut detector, 1440, 500, |h| 30.0 + 8.0 * (h - 2.0).max(0.0));
    let acts = acts(&findings);
    assert_eq!(acts.len(), 1, "{findings:?}");
    assert!(acts[0].reason.contains("healthy lives peaked at 30.0 GiB"), "{}", acts[0].reason);
}

#[test]
fn a_life_that_leaked_does_not_teach_and_becomes_a_ticket() {
    let leak = |h: f64| 20.0 + 6.0 * (h - 2.0).max(0.0);
    let (mut detector, mut from, mut advice) = (detector(), 0, Vec::new());
    for _ in 0..4 {
        let findings = feed(&mut detector, from, 700, leak);
        advice.push(acts(&findings).first().and_then(|f| f.advice));
        from += 700;
        detector.begin_life(Millis(from * MINUTE), LifeEnd::LeakAct);
    }
    assert_eq!(detector.profile().peak(), None);
    assert_eq!(
        advice,
        [LeakAdvice::Restart, LeakAdvice::Restart, LeakAdvice::Restart, LeakAdvice::Ticket].map(Some)
    );
}

#[test]
fn r07_reserved_that_grows_without_allocated_is_the_allocator() {
    let mut detector = detector();
    let mut last = None;
    for m in 0..830_u64 {
        let gi = 20.0 + 0.1 * f64::from(u32::try_from(m.saturating_sub(240)).unwrap());
        let framework =
            Framework { allocated: Some(8 << 30), reserved: Some(super::number::whole((gi - 1.0) * GI)) };
        last = detector.push(&Sample { framework, ..sample(m, gi) }).or(last);
    }
    let last = last.unwrap();
    assert_eq!(last.mode.map(|m| m.0), Some(LeakMode::AllocatorRetention));
    assert_eq!(last.advice, Some(LeakAdvice::AllocatorOption));
}

#[test]
fn nothing_is_acted_on_while_numbers_are_missing() {
    let mut detector = detector();
    feed(&mut detector, 0, 600, |h| 20.0 + 5.0 * h);
    for m in 600..1200 {
        let missing = Sample { bytes: None, ..sample(m, 0.0) };
        assert_eq!(detector.push(&missing), None);
    }
}

#[test]
fn duplicates_and_time_going_back_are_dropped() {
    let run = |dirty: bool| {
        let mut detector = detector();
        let mut findings = Vec::new();
        for m in 0..830_u64 {
            let gi = 20.0 + 0.1 * f64::from(u32::try_from(m.saturating_sub(240)).unwrap());
            findings.extend(detector.push(&sample(m, gi)));
            if dirty {
                findings.extend(detector.push(&sample(m, 79.0)));
                findings.extend(detector.push(&sample(m / 2, 1.0)));
            }
        }
        findings
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn one_sample_and_a_million_alike_find_nothing() {
    assert_eq!(detector().push(&sample(0, 79.0)), None);
    let mut detector = detector();
    for tick in 0..1_000_000_u64 {
        let at = Millis(tick * 10_000);
        assert_eq!(detector.push(&Sample { at, ..sample(0, 79.0) }), None);
    }
}

#[test]
fn another_partition_begins_anew() {
    let mut detector = detector();
    feed(&mut detector, 0, 600, |h| 20.0 + 5.0 * h);
    let small = Sample { capacity: Some(10 << 30), ..sample(600, 9.0) };
    assert_eq!(detector.push(&small), None);
    assert!(detector.live.scales.iter().all(|s| s.window.blocks().is_empty()));
}

#[test]
fn what_is_kept_is_bounded() {
    assert!(size_of::<Detector>() <= 4096, "{}", size_of::<Detector>());
    let mut detector = detector();
    for life in 0..20 {
        feed(&mut detector, life * 1500, 1440, |h| 20.0 + h);
        detector.begin_life(Millis((life * 1500 + 1440) * MINUTE), LifeEnd::Healthy);
    }
    assert!(detector.state().to_bytes().len() <= 32 << 10, "{}", detector.state().to_bytes().len());
}

#[test]
fn a_restart_of_the_agent_in_the_middle_changes_nothing() {
    let leak = |m: u64| 20.0 + 0.1 * f64::from(u32::try_from(m.saturating_sub(240)).unwrap());
    let run = |restart: Option<u64>| {
        let mut detector = detector();
        let mut findings = Vec::new();
        for m in 0..830 {
            if restart == Some(m) {
                let bytes = detector.state().to_bytes();
                let state = State::from_bytes(&bytes).unwrap();
                detector =
                    Detector::restore(Arc::new(Settings::default()), state, Millis(m * MINUTE)).unwrap();
            }
            findings.extend(detector.push(&sample(m, leak(m))));
        }
        findings
    };
    let whole = run(None);
    assert_eq!(acts(&whole).len(), 1);
    for at in [1, 300, 777] {
        assert_eq!(run(Some(at)), whole, "{at}");
    }
}

#[test]
fn a_state_that_is_cut_off_or_of_another_time_is_not_taken_over() {
    let mut detector = detector();
    feed(&mut detector, 0, 600, |h| 20.0 + 5.0 * h);
    let bytes = detector.state().to_bytes();
    for cut in (0..bytes.len()).step_by(97) {
        assert_eq!(State::from_bytes(&bytes[..cut]), Err(StateError::Damaged));
    }
    let mut flipped = bytes.clone();
    flipped[bytes.len() / 2] ^= 1;
    assert_eq!(State::from_bytes(&flipped), Err(StateError::Damaged));
    let state = State::from_bytes(&bytes).unwrap();
    let early = Detector::restore(Arc::new(Settings::default()), state, Millis(1)).unwrap();
    assert_eq!(early.live, super::detector::Live::default(), "a state of the future keeps its profile only");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn nothing_panics_and_no_act_comes_without_a_number(
        samples in prop::collection::vec((0u64..400_000, prop::option::weighted(0.9, any::<u64>()),
            prop::option::weighted(0.9, any::<u64>()), prop::option::of(any::<f64>()), any::<bool>()), 1..400),
    ) {
        let mut detector = detector();
        let mut now = 0u64;
        for (passed, bytes, capacity, work, back) in samples {
            now = if back { now.saturating_sub(passed) } else { now + passed };
            let sample = Sample { at: Millis(now), bytes, capacity, work, ..Sample::default() };
            let finding = detector.push(&sample);
            prop_assert!(finding.is_none() || bytes.is_some());
            if let Some(finding) = finding {
                prop_assert!((0.0..=1.0).contains(&finding.confidence));
                prop_assert!(finding.slope_bytes_per_hour.mid.is_finite());
            }
        }
        prop_assert!(State::from_bytes(&detector.state().to_bytes()).is_ok());
    }
}
