//! Whether a handful of points rises, since when, how fast, and whether it levels off.
//!
//! At most [`BLOCKS`] points, so that comparing every pair costs nothing.

use crate::leak::{
    Interval,
    number::count,
    window::{BLOCKS, mean},
};

/// Pairs of points.
const PAIRS: usize = BLOCKS * (BLOCKS - 1) / 2;
/// The driver rounds to 2 MiB, here in units of 64 KiB: smaller differences are none.
pub(super) const GRAIN: f64 = 32.0;
/// Fewest points that say anything.
pub(super) const FEWEST: usize = 6;
/// Autocorrelation makes the variance of the test at most so many times larger. Of eighteen points
/// no more can be told.
const MOST_INFLATION: f64 = 4.0;
/// From one point to the next the level has shifted by this share of all change.
const SHIFT: f64 = 0.45;

/// A point: position, and height in units.
pub(super) type Point = (f64, f64);

/// What is said of the points.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Trend {
    /// Score of the Mann-Kendall test over all points, corrected for ties and autocorrelation.
    pub z: f64,
    /// Points since the onset of the rise.
    pub since_onset: usize,
    /// Theil-Sen slope since the onset in units a position, with the 15 and 85 % quantiles.
    pub slope: Interval<f64>,
    /// The 10 % quantile of the pairs' slopes since the onset.
    pub lowest: f64,
    /// The 25 % quantile of them.
    pub low: f64,
    /// Growth since the onset in units.
    pub growth: f64,
    /// Median distance from the fitted rise in units.
    pub residual: f64,
    /// Growth in the second half since the onset as a share of that in the first.
    pub second_half: f64,
}

/// Where the points begin that belong together: after a shift of the level that makes up most of
/// all change, such as another model or the end of a warm-up, if enough follow.
pub(super) fn after_shift(points: &[Point]) -> usize {
    let heights = || points.iter().map(|p| p.1);
    let range = heights().fold(f64::NEG_INFINITY, f64::max) - heights().fold(f64::INFINITY, f64::min);
    let steps = points.iter().zip(points.iter().skip(1)).map(|(a, b)| (b.1 - a.1).abs());
    let last = steps.enumerate().filter(|(_, step)| *step > SHIFT * range).map(|(at, _)| at + 1).next_back();
    last.filter(|at| range > GRAIN && points.len() - at >= FEWEST).unwrap_or(0)
}

/// Measures the points. `None` where there are too few.
pub(super) fn measure(points: &[Point]) -> Option<Trend> {
    if points.len() < FEWEST {
        return None;
    }
    let hinge = hinge(points);
    let rise = points.get(hinge.at..)?;
    let mut buffer = [0.0; PAIRS];
    let slopes = slopes(rise, &mut buffer);
    let slope = Interval { low: quantile(slopes, 15), mid: quantile(slopes, 50), high: quantile(slopes, 85) };
    let (start, middle, end) = thirds(rise);
    Some(Trend {
        z: mann_kendall(points, inflation(points, &hinge)),
        since_onset: rise.len(),
        slope,
        lowest: quantile(slopes, 10),
        low: quantile(slopes, 25),
        growth: end - start,
        residual: residual(points, &hinge),
        second_half: share(end - middle, middle - start),
    })
}

/// The gain of the second half over that of the first, bounded.
fn share(second: f64, first: f64) -> f64 {
    if second <= 0.0 {
        0.0
    } else if first <= second / 10.0 {
        10.0
    } else {
        second / first
    }
}

/// Level, then a rise from a point on.
#[derive(Clone, Copy, Debug, Default)]
struct Hinge {
    at: usize,
    from: f64,
    level: f64,
    slope: f64,
    error: f64,
}

impl Hinge {
    fn value(&self, x: f64) -> f64 {
        self.level + self.slope * (x - self.from).max(0.0)
    }
}

/// The hinge that fits best by least squares; of nearly equal ones the earliest, so that noise
/// does not shorten a long rise.
fn hinge(points: &[Point]) -> Hinge {
    let middle = mean(points.iter().map(|p| p.1));
    let fit = |(at, &(from, _)): (usize, &Point)| {
        let reach = mean(points.iter().map(|p| (p.0 - from).max(0.0)));
        let (mut across, mut along) = (0.0, 0.0);
        for (x, y) in points {
            let u = (x - from).max(0.0) - reach;
            across += u * (y - middle);
            along += u * u;
        }
        let slope = if along > 0.0 { across / along } else { 0.0 };
        let hinge = Hinge { at, from, level: middle - slope * reach, slope, error: 0.0 };
        let error = points.iter().map(|(x, y)| (y - hinge.value(*x)).powi(2)).sum();
        Hinge { error, ..hinge }
    };
    let last = points.len().saturating_sub(4);
    let mut hinges = [Hinge::default(); BLOCKS];
    let mut n = 0;
    for (slot, candidate) in hinges.iter_mut().zip(points.iter().enumerate().take(last + 1)) {
        *slot = fit(candidate);
        n += 1;
    }
    let hinges = hinges.get(..n).unwrap_or_default();
    let best = hinges.iter().map(|h| h.error).fold(f64::INFINITY, f64::min);
    let enough = best * 1.25 + count(points.len()) * (GRAIN / 2.0).powi(2);
    hinges.iter().find(|h| h.error <= enough).copied().unwrap_or_default()
}

/// Slopes of all pairs, sorted.
fn slopes<'a>(points: &[Point], buffer: &'a mut [f64; PAIRS]) -> &'a [f64] {
    let mut n = 0;
    let pairs = points.iter().enumerate().flat_map(|(i, a)| points.iter().skip(i + 1).map(move |b| (a, b)));
    for (slot, (a, b)) in buffer.iter_mut().zip(pairs) {
        *slot = (b.1 - a.1) / (b.0 - a.0).max(1.0);
        n += 1;
    }
    let slopes = buffer.get_mut(..n).unwrap_or_default();
    slopes.sort_unstable_by(f64::total_cmp);
    slopes
}

/// A quantile in percent of sorted values; 0 of none.
fn quantile(sorted: &[f64], percent: usize) -> f64 {
    sorted.get(sorted.len().saturating_sub(1) * percent / 100).copied().unwrap_or(0.0)
}

/// The median of up to [`BLOCKS`] values.
pub(super) fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut kept = [0.0; BLOCKS];
    let mut n = 0;
    for (slot, value) in kept.iter_mut().zip(values) {
        *slot = value;
        n += 1;
    }
    let kept = kept.get_mut(..n).unwrap_or_default();
    kept.sort_unstable_by(f64::total_cmp);
    let middle = |at: usize| kept.get(at).copied().unwrap_or(0.0);
    f64::midpoint(middle(n.saturating_sub(1) / 2), middle(n / 2))
}

/// Heights at the begin, the middle and the end, each the median of a quarter of the points.
fn thirds(points: &[Point]) -> (f64, f64, f64) {
    let n = points.len();
    let part = (n / 4).max(1);
    let heights = |skip: usize, take: usize| median(points.iter().skip(skip).take(take).map(|p| p.1));
    (heights(0, part), heights((n - part) / 2, part + (n - part) % 2), heights(n - part, part))
}

/// Median distance from the hinge.
fn residual(points: &[Point], hinge: &Hinge) -> f64 {
    median(points.iter().map(|(x, y)| (y - hinge.value(*x)).abs()))
}

/// By how much autocorrelation of what the hinge leaves over makes the variance of the test
/// larger (Hamed and Rao 1998, on the lags that are significant).
fn inflation(points: &[Point], hinge: &Hinge) -> f64 {
    let n = count(points.len());
    let left = |p: &Point| p.1 - hinge.value(p.0);
    let power: f64 = points.iter().map(|p| left(p).powi(2)).sum();
    if power <= n * (GRAIN / 2.0).powi(2) {
        return 1.0;
    }
    let significant = 1.96 / n.sqrt();
    let sum: f64 = (1..points.len() / 2)
        .map(|lag| {
            let product: f64 =
                points.iter().zip(points.iter().skip(lag)).map(|(a, b)| left(a) * left(b)).sum();
            let (lag, rho) = (count(lag), product / power);
            if rho.abs() > significant { (n - lag) * (n - lag - 1.0) * (n - lag - 2.0) * rho } else { 0.0 }
        })
        .sum();
    (1.0 + 2.0 / (n * (n - 1.0) * (n - 2.0)) * sum).clamp(1.0, MOST_INFLATION)
}

/// The normal score of Kendall's S with ties, its variance made larger by a factor.
fn mann_kendall(points: &[Point], inflation: f64) -> f64 {
    let mut grains = [0.0; BLOCKS];
    for (slot, point) in grains.iter_mut().zip(points) {
        *slot = (point.1 / GRAIN).round();
    }
    let grains = grains.get(..points.len()).unwrap_or_default();
    let mut s = 0.0_f64;
    for (i, a) in grains.iter().enumerate() {
        for b in grains.iter().skip(i + 1) {
            s += match b.total_cmp(a) {
                std::cmp::Ordering::Greater => 1.0,
                std::cmp::Ordering::Less => -1.0,
                std::cmp::Ordering::Equal => 0.0,
            };
        }
    }
    let spread = |n: f64| n * (n - 1.0) * (2.0 * n + 5.0);
    let mut variance = spread(count(points.len()));
    for (i, a) in grains.iter().enumerate() {
        let same = |other: &&f64| other.total_cmp(a) == std::cmp::Ordering::Equal;
        if !grains.iter().take(i).any(|b| same(&b)) {
            variance -= spread(count(grains.iter().filter(same).count()));
        }
    }
    let deviation = (variance / 18.0 * inflation).sqrt();
    if deviation > 0.0 && s != 0.0 { (s - s.signum()) / deviation } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn points(values: &[f64]) -> Vec<Point> {
        values.iter().enumerate().map(|(i, v)| (count(i), *v)).collect()
    }

    fn of(values: impl IntoIterator<Item = f64>) -> Trend {
        measure(&points(&values.into_iter().collect::<Vec<_>>())).unwrap()
    }

    #[test]
    fn a_steady_rise_is_measured_exactly() {
        let trend = of((0..18).map(|i| 1e5 + 1000.0 * f64::from(i)));
        assert!((trend.slope.mid - 1000.0).abs() < 1e-6, "{trend:?}");
        assert!(trend.z > 5.0 && trend.since_onset == 18, "{trend:?}");
        assert!((trend.second_half - 1.0).abs() < 0.1, "{trend:?}");
    }

    #[test]
    fn a_level_has_no_trend() {
        let trend = of((0..18).map(|_| 1e5));
        assert_eq!((trend.z.to_bits(), trend.growth.to_bits()), (0, 0));
        let noise = of((0..18).map(|i| 1e5 + f64::from(i % 2) * 20.0));
        assert!(noise.z.abs() < 1.0, "less than the driver's grain is nothing: {noise:?}");
    }

    #[test]
    fn the_onset_of_a_late_rise_is_found_and_its_slope_not_diluted() {
        let trend = of((0..18).map(|i| 1e5 + 1000.0 * f64::from((i - 9).max(0))));
        assert!((8..=10).contains(&trend.since_onset), "{trend:?}");
        assert!((trend.slope.mid - 1000.0).abs() < 150.0, "{trend:?}");
        assert!(trend.z > 2.6, "{trend:?}");
    }

    #[test]
    fn what_levels_off_has_a_small_second_half() {
        let trend = of((0..18).map(|i| 1e5 * (1.0 - (-f64::from(i) / 5.0).exp())));
        assert!(trend.second_half < 0.35, "{trend:?}");
    }

    #[test]
    fn too_few_points_say_nothing() {
        assert_eq!(measure(&points(&[1.0; 5])), None);
        assert_eq!(measure(&[]), None);
    }

    proptest! {
        #[test]
        fn any_points_give_finite_numbers(values in prop::collection::vec(0.0..4e9, 6..=18)) {
            let trend = of(values);
            for number in [trend.z, trend.slope.low, trend.slope.mid, trend.slope.high, trend.growth,
                trend.residual, trend.second_half] {
                prop_assert!(number.is_finite(), "{:?}", trend);
            }
            prop_assert!(trend.slope.low <= trend.slope.mid && trend.slope.mid <= trend.slope.high);
        }

        #[test]
        fn turning_the_points_round_turns_the_score(values in prop::collection::vec(0u32..1_000_000, 6..=18)) {
            let rise = points(&values.iter().map(|v| f64::from(*v)).collect::<Vec<_>>());
            let fall = points(&values.iter().rev().map(|v| f64::from(*v)).collect::<Vec<_>>());
            prop_assert!((mann_kendall(&rise, 1.0) + mann_kendall(&fall, 1.0)).abs() < 1e-9);
        }
    }
}
