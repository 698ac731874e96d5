//! How long things took.

use std::time::Duration;

/// Measured times, in nanoseconds.
#[derive(Clone, Debug, Default)]
pub(crate) struct Times(Vec<u64>);

impl Times {
    pub(crate) const fn new() -> Self {
        Self(Vec::new())
    }

    pub(crate) fn push(&mut self, time: Duration) {
        self.0.push(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn extend(&mut self, other: &Self) {
        self.0.extend_from_slice(&other.0);
    }

    /// The time that so many thousandths do not pass, in microseconds. Not a number if there is none.
    pub(crate) fn quantile(&self, per_mille: usize) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let rank = (sorted.len() * per_mille).div_ceil(1000).saturating_sub(1);
        sorted.get(rank).map_or(f64::NAN, |time| microseconds(*time))
    }

    pub(crate) fn median(&self) -> f64 {
        self.quantile(500)
    }

    /// The times one by one, in nanoseconds.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u64> {
        self.0.iter().copied()
    }
}

/// Nanoseconds as microseconds.
pub(crate) fn microseconds(nanoseconds: u64) -> f64 {
    Duration::from_nanos(nanoseconds).as_secs_f64() * 1e6
}

/// The median of differences between what was measured together, in microseconds.
pub(crate) fn median_difference(with: &Times, without: &Times) -> f64 {
    median(with.iter().zip(without.iter()).map(|(one, other)| microseconds(one) - microseconds(other)))
}

/// The median of numbers; not a number if there is none.
pub(crate) fn median(numbers: impl Iterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = numbers.collect();
    sorted.sort_by(f64::total_cmp);
    let upper = sorted.len() / 2;
    let lower = sorted.len().saturating_sub(1) / 2;
    match (sorted.get(lower), sorted.get(upper)) {
        (Some(lower), Some(upper)) => f64::midpoint(*lower, *upper),
        _ => f64::NAN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(nanoseconds: impl IntoIterator<Item = u64>) -> Times {
        Times(nanoseconds.into_iter().collect())
    }

    #[test]
    fn quantiles_are_times_that_were_measured() {
        let hundred = times((1..=100).rev().map(|n| n * 1000));
        assert!((hundred.median() - 50.0).abs() < 1e-9);
        assert!((hundred.quantile(990) - 99.0).abs() < 1e-9);
        assert!((hundred.quantile(1000) - 100.0).abs() < 1e-9);
        assert!((times([7000]).quantile(990) - 7.0).abs() < 1e-9);
        assert!(times([]).median().is_nan());
    }

    #[test]
    fn differences_are_taken_pair_by_pair() {
        let difference = median_difference(&times([3000, 9000, 5000]), &times([1000, 8000, 1000]));
        assert!((difference - 2.0).abs() < 1e-9);
        assert!((median([1.0, 2.0, 4.0, 3.0].into_iter()) - 2.5).abs() < 1e-9);
    }
}
