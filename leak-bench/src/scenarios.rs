//! Scenarios of leaks, replayed by the detector that the agent has.

use crate::{
    detect::{Alarms, Highwater, replay, settings},
    number::{MIB, whole},
    random::Random,
    score::lead,
    series::{Point, Series, Truth},
};

const MINUTE: u64 = 60_000;

/// A life of so many hours, a sample every 10 s, at levels in MiB over hours.
fn series(name: &str, hours: f64, capacity: f64, level: impl Fn(f64) -> f64) -> Series {
    let mut random = Random::of(name);
    let end = whole(hours * 360.0);
    let point = |i: u64| {
        let hours = crate::number::wide(i) / 360.0;
        let bytes = whole((level(hours) + random.uniform(0.0, 20.0)).min(capacity) * MIB);
        Point { at: i * 10_000, bytes: Some(bytes), work: None }
    };
    Series {
        pod: name.to_owned(),
        family: name.to_owned(),
        capacity: whole(capacity * MIB),
        declared: None,
        points: (0..end).map(point).collect(),
        truth: Truth::Benign,
    }
}

fn seen(series: &Series) -> Alarms {
    replay(&mut Highwater::new(&settings(), series), series)
}

/// triton-inference-server/server#4372: 20958 MiB to 80342 MiB in a day, then out of memory.
#[test]
fn l01_warns_early_by_the_slope_and_acts_near_the_capacity() {
    let ends = (80_342.0 - 20_958.0) / 2474.0;
    let series = series("l01", ends, 80_342.0, |hours| 20_958.0 + 2474.0 * hours);
    let end = whole(ends * 3.6e6);
    let alarms = seen(&series);
    let suspect = *alarms.suspects.first().unwrap();
    assert!(lead(suspect, end) > 12.0 * 60.0, "warned {} min before", lead(suspect, end));
    let act = alarms.first_act().unwrap();
    assert!((10.0..=75.0).contains(&lead(act, end)), "acted {} min before", lead(act, end));
}

/// vllm-project/vllm-dashboard#182: what dead processes hold takes room from the device, and the
/// pods that are left are not to blame.
#[test]
fn l03_a_pod_is_not_to_blame_for_what_others_hold() {
    let series = series("l03", 12.0, 80_000.0, |_| 40_000.0);
    let mut detector = Highwater::new(&settings(), &series);
    let mut room = 80_000.0;
    let mut alarms = Vec::new();
    for point in &series.points {
        if point.at.is_multiple_of(20 * MINUTE) {
            room = f64::max(room - 1500.0, 42_000.0);
        }
        detector.limit(whole(room * MIB));
        alarms.extend(crate::detect::Detect::push(&mut detector, point));
    }
    assert!(alarms.is_empty(), "{alarms:?}");
}

/// vllm-project/vllm#17243: steady growth of caches for hours, up to a plateau.
#[test]
fn l07_a_plateau_is_not_restarted() {
    for (constant, plateau) in [(0.5, 70_000.0), (1.5, 70_000.0), (3.0, 62_000.0)] {
        let series = series("l07", 48.0, 80_000.0, |hours| {
            40_000.0 + (plateau - 40_000.0) * (1.0 - (-hours / constant).exp())
        });
        assert_eq!(seen(&series).first_act(), None, "time constant {constant} h to {plateau} MiB");
    }
}
