//! Exact intervals: Clopper and Pearson (1934) for shares, Garwood (1936) for rates. Both are
//! found by bisection of the distribution functions themselves.

use crate::number::real;

/// A share or rate with its two-sided interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Estimate {
    /// What was seen.
    pub value: f64,
    /// The lower bound.
    pub low: f64,
    /// The upper bound.
    pub high: f64,
}

/// The error of a 95 % interval.
pub(crate) const ERROR: f64 = 0.05;

/// Where a falling function of [low, high] passes a level.
fn bisect(mut low: f64, mut high: f64, level: f64, falling: impl Fn(f64) -> f64) -> f64 {
    for _ in 0..80 {
        let middle = f64::midpoint(low, high);
        if falling(middle) > level {
            low = middle;
        } else {
            high = middle;
        }
    }
    f64::midpoint(low, high)
}

/// The chance of at most `k` of `n` where each comes with chance `p`.
fn binomial(k: usize, n: usize, p: f64) -> f64 {
    if p <= 0.0 {
        return 1.0;
    }
    if p >= 1.0 {
        return f64::from(u8::from(k >= n));
    }
    let (yes, no) = (p.ln(), (-p).ln_1p());
    let mut term = real(n) * no;
    let mut sum = term.exp();
    for i in 0..k.min(n) {
        term += (real(n - i) / real(i + 1)).ln() + yes - no;
        sum += term.exp();
    }
    sum.min(1.0)
}

/// The chance of at most `k` events where `mean` are expected.
fn poisson(k: usize, mean: f64) -> f64 {
    if mean <= 0.0 {
        return 1.0;
    }
    let mut term = -mean;
    let mut sum = term.exp();
    for i in 1..=k {
        term += mean.ln() - real(i).ln();
        sum += term.exp();
    }
    sum.min(1.0)
}

/// The share of `k` in `n`, with an interval of the given error.
pub(crate) fn share_with(k: usize, n: usize, error: f64) -> Estimate {
    if n == 0 {
        return Estimate { value: f64::NAN, low: 0.0, high: 1.0 };
    }
    let low = match k.checked_sub(1) {
        Some(fewer) => bisect(0.0, 1.0, 1.0 - error / 2.0, |p| binomial(fewer, n, p)),
        None => 0.0,
    };
    let high = if k >= n { 1.0 } else { bisect(0.0, 1.0, error / 2.0, |p| binomial(k, n, p)) };
    Estimate { value: real(k) / real(n), low, high }
}

/// The share of `k` in `n`, with its 95 % interval.
pub(crate) fn share(k: usize, n: usize) -> Estimate {
    share_with(k, n, ERROR)
}

/// The rate of `k` events in an exposure, with its 95 % interval, in events per unit of it.
pub(crate) fn rate(k: usize, exposure: f64) -> Estimate {
    if exposure <= 0.0 {
        return Estimate { value: f64::NAN, low: 0.0, high: f64::INFINITY };
    }
    let most = real(k) + 20.0 + 10.0 * real(k).sqrt();
    let low = match k.checked_sub(1) {
        Some(fewer) => bisect(0.0, most, 1.0 - ERROR / 2.0, |mean| poisson(fewer, mean)),
        None => 0.0,
    };
    let high = bisect(0.0, most, ERROR / 2.0, |mean| poisson(k, mean));
    Estimate { value: real(k) / exposure, low: low / exposure, high: high / exposure }
}

/// The ratio of two counts of events under the same exposure, with its exact 95 % interval: given
/// their sum, the first is binomial.
pub(crate) fn ratio(k: usize, of: usize) -> Estimate {
    let share = share(k, k + of);
    let odds = |p: f64| p / (1.0 - p);
    Estimate { value: real(k) / real(of), low: odds(share.low), high: odds(share.high) }
}

/// Precision of episodes at so many benign ones for each leak: leaks found among all that was acted
/// on. `early`: leaks acted on before they began. The bounds put the worse bounds of the three shares
/// together, each at a third of the error, so that they hold whatever the shares have to do with
/// each other.
pub(crate) fn precision(
    found: (usize, usize),
    early: (usize, usize),
    wrong: (usize, usize),
    benign_a_leak: f64,
) -> Estimate {
    let of = |found: f64, early: f64, wrong: f64| {
        let acted = found + early + benign_a_leak * wrong;
        if acted > 0.0 { found / acted } else { f64::NAN }
    };
    let [found, early, wrong] = [found, early, wrong].map(|(k, n)| share_with(k, n, ERROR / 3.0));
    Estimate {
        value: of(found.value, early.value, wrong.value),
        low: of(found.low, early.high, wrong.high),
        high: of(found.high, early.low, wrong.low),
    }
}

/// A quantile of values, by the nearest rank; `None` of none.
pub(crate) fn quantile(values: &[f64], part: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = crate::number::count((part * real(sorted.len())).ceil());
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-3, "{a} is not {b}");
    }

    fn log_choose(n: usize, k: usize) -> f64 {
        let log_factorial = |n: usize| (2..=n).map(|i| real(i).ln()).sum::<f64>();
        log_factorial(n) - log_factorial(k) - log_factorial(n - k)
    }

    #[test]
    fn sums_are_the_distributions() {
        let exact = |k: usize, n: usize, p: f64| {
            (0..=k)
                .map(|i| (log_choose(n, i) + real(i) * p.ln() + real(n - i) * (1.0 - p).ln()).exp())
                .sum::<f64>()
        };
        near(binomial(7, 20, 0.3), exact(7, 20, 0.3));
        near(poisson(2, 3.0), (-3.0f64).exp() * (1.0 + 3.0 + 4.5));
    }

    #[test]
    fn bounds_are_those_of_tables() {
        // Clopper-Pearson 8 of 10: 0.4439 to 0.9748; 0 of 10: to 0.3085.
        let eight = share(8, 10);
        near(eight.low, 0.4439);
        near(eight.high, 0.9748);
        near(share(0, 10).high, 0.3085);
        near(share(10, 10).low, 0.6915);
        // Garwood: 0 events to 3.689; 10 events 4.795 to 18.390.
        near(rate(0, 1.0).high, 3.6889);
        near(rate(10, 1.0).low, 4.7954);
        near(rate(10, 1.0).high, 18.3904);
        near(rate(500, 1000.0).low, 0.4571);
    }

    #[test]
    fn precision_is_that_of_the_mix() {
        let p = precision((90, 100), (0, 100), (2, 100), 3.0);
        near(p.value, 0.9375);
        assert!(p.low < p.value && p.value < p.high && p.low > 0.7);
        assert!(ratio(100, 1).low > 15.0 && ratio(100, 0).value.is_infinite());
    }

    #[test]
    fn a_quantile_is_one_of_the_values() {
        let values: Vec<f64> = (1..=10).map(f64::from).collect();
        assert_eq!(quantile(&values, 0.1), Some(1.0));
        assert_eq!(quantile(&values, 0.5), Some(5.0));
        assert_eq!(quantile(&[], 0.5), None);
    }
}
