//! By which law a rise goes: straight, in steps, ever faster, or levelling off.
//!
//! Curves with one more parameter than a line are fitted over a grid of time constants, and win
//! only if the corrected information criterion says by enough that they are worth it: on twenty
//! noisy points almost anything looks exponential.

use crate::leak::{
    LeakClass,
    number::count,
    trend::{GRAIN, Point},
    window::{BLOCKS, mean},
};

/// Time constants that are tried, as shares of the span.
const CONSTANTS: [f64; 6] = [0.1, 0.17, 0.28, 0.45, 0.75, 1.2];
/// By so much the criterion must be better for an exponential,
const EXPONENTIAL_GAIN: f64 = 10.0;
/// and for a curve that levels off, where a mistake only delays an act.
const SATURATING_GAIN: f64 = 6.0;
/// Doublings of the increment that an exponential must show.
const DOUBLINGS: f64 = 3.0;
/// A curve levels off where it has grown in its second half by less than this share of its first:
/// a warm-up from which a leak goes on is bent as well.
const LEVELLED: f64 = 0.6;
/// A ramp has ended where it rises after its bend by less than this share of its slope before.
const ENDED: f64 = 0.3;

/// The class of a rise, given its points since the onset and how much its second half grew as a
/// share of its first.
pub(super) fn class(points: &[Point], second_half: f64) -> LeakClass {
    let n = points.len();
    let (Some(first), Some(last)) = (points.first(), points.last()) else { return LeakClass::Linear };
    let span = last.0 - first.0;
    if n < 6 || span <= 0.0 || last.1 - first.1 < GRAIN {
        return LeakClass::Linear;
    }
    let at = |p: &Point| (p.0 - first.0) / span;
    let line = criterion(fit(points, |p| at(p)).0, n, 3.0);
    let mut best = (LeakClass::Linear, 0.0);
    for constant in CONSTANTS {
        let (error, rise) = fit(points, |p| 1.0 - (-at(p) / constant).exp());
        let gain = line - criterion(error, n, 4.0);
        if rise > 0.0 && gain > SATURATING_GAIN.max(best.1) && second_half < LEVELLED {
            best = (LeakClass::Saturating, gain);
        }
        let (error, rise) = fit(points, |p| ((at(p) - 1.0) / constant).exp());
        let gain = line - criterion(error, n, 4.0);
        let doublings = 1.0 / (constant * std::f64::consts::LN_2);
        if rise > 0.0 && gain > EXPONENTIAL_GAIN.max(best.1) && doublings >= DOUBLINGS {
            best = (LeakClass::Exponential, gain);
        }
    }
    // A ramp that ends in a level: a cache that has come to its bound.
    for &(bend, _) in points.iter().take(n - 2).skip(2) {
        let (error, rise) = fit(points, |p| p.0.min(bend));
        let gain = line - criterion(error, n, 4.0);
        let after = slope(points.iter().filter(|p| p.0 >= bend));
        let before = slope(points.iter().filter(|p| p.0 <= bend));
        if rise > 0.0 && gain > SATURATING_GAIN.max(best.1) && after < ENDED * before {
            best = (LeakClass::Saturating, gain);
        }
    }
    if best.0 == LeakClass::Saturating && !steps(points) {
        return LeakClass::Saturating;
    }
    if steps(points) { LeakClass::Step } else { best.0 }
}

/// At least two jumps, and a fifth of the differences hold four fifths of the growth.
fn steps(points: &[Point]) -> bool {
    let mut jumps = [0.0; BLOCKS];
    let mut n = 0;
    for (slot, (a, b)) in jumps.iter_mut().zip(points.iter().zip(points.iter().skip(1))) {
        *slot = (b.1 - a.1).max(0.0);
        n += 1;
    }
    let jumps = jumps.get_mut(..n).unwrap_or_default();
    jumps.sort_unstable_by(|a, b| b.total_cmp(a));
    let total: f64 = jumps.iter().sum();
    let few = (n / 5).max(2);
    let held: f64 = jumps.iter().take(few).sum();
    let second = jumps.get(1).copied().unwrap_or(0.0);
    held >= 0.8 * total && second >= 0.2 * total / count(few)
}

/// The slope from the first to the last of some points.
fn slope<'a>(mut points: impl DoubleEndedIterator<Item = &'a Point>) -> f64 {
    match (points.next(), points.next_back()) {
        (Some(a), Some(b)) if b.0 > a.0 => (b.1 - a.1) / (b.0 - a.0),
        _ => 0.0,
    }
}

/// Least squares of the heights on a function of the point: squared error, and the factor.
fn fit(points: &[Point], of: impl Fn(&Point) -> f64) -> (f64, f64) {
    let (mx, my) = (mean(points.iter().map(&of)), mean(points.iter().map(|p| p.1)));
    let (mut across, mut along) = (0.0, 0.0);
    for point in points {
        let u = of(point) - mx;
        across += u * (point.1 - my);
        along += u * u;
    }
    let factor = if along > 0.0 { across / along } else { 0.0 };
    let error = points.iter().map(|p| (p.1 - my - factor * (of(p) - mx)).powi(2)).sum();
    (error, factor)
}

/// Akaike's criterion for small samples, of a least-squares fit with `k` parameters, the variance
/// being one. Errors below the driver's grain are not worth a parameter.
fn criterion(error: f64, n: usize, k: f64) -> f64 {
    let n = count(n);
    let error = error.max(n * (GRAIN / 2.0).powi(2));
    n * (error / n).ln() + 2.0 * k + 2.0 * k * (k + 1.0) / (n - k - 1.0).max(0.5)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(height: impl Fn(f64) -> f64) -> LeakClass {
        // A little unevenness that is no function of the position.
        let uneven = |i: u32| f64::from((i * 7919) % 13) * 20.0;
        let points: Vec<Point> =
            (0..18).map(|i| (f64::from(i), 2e5 + height(f64::from(i)) + uneven(i))).collect();
        class(&points, crate::leak::trend::measure(&points).unwrap().second_half)
    }

    #[test]
    fn r06_each_class_is_told_from_the_others() {
        assert_eq!(of(|x| 3000.0 * x), LeakClass::Linear);
        assert_eq!(of(|x| 20_000.0 * (x / 6.0).floor()), LeakClass::Step);
        assert_eq!(of(|x| 300.0 * (x / 3.0).exp()), LeakClass::Exponential);
        assert_eq!(of(|x| 50_000.0 * (1.0 - (-x / 5.0).exp())), LeakClass::Saturating);
        assert_eq!(of(|x| 5000.0 * x.min(12.0)), LeakClass::Saturating, "a ramp that ended");
    }

    #[test]
    fn noise_on_a_line_stays_a_line() {
        assert_eq!(of(|_| 0.0), LeakClass::Linear);
        assert_eq!(class(&[], 1.0), LeakClass::Linear);
        assert_eq!(class(&[(0.0, 1.0); 18], 1.0), LeakClass::Linear);
    }
}
