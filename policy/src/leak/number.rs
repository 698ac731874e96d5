//! Numbers between integers and floats without a lossy cast.

use std::time::Duration;

/// 2^32.
const HIGH: f64 = 4_294_967_296.0;

/// A byte count or a time as a float: exact up to 2^53, rounded above.
pub(super) fn float(value: u64) -> f64 {
    let part = |bits: u64| f64::from(u32::try_from(bits & u64::from(u32::MAX)).unwrap_or(u32::MAX));
    part(value >> 32) * HIGH + part(value)
}

/// A small count as a float.
pub(super) fn count(value: usize) -> f64 {
    u32::try_from(value).map_or(f64::from(u32::MAX), f64::from)
}

/// A float as a whole number, rounded down: 0 where it is negative or not a number, the greatest
/// where it is too large.
pub(super) fn whole(value: f64) -> u64 {
    if value.is_nan() || value <= 0.0 {
        return 0;
    }
    // The library's own conversion is checked; the language's silently is not.
    Duration::try_from_secs_f64(value).map_or(u64::MAX, |seconds| seconds.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_numbers_come_back_as_they_were() {
        for value in [0, 1, 1 << 31, 1 << 32, (1 << 32) + 7, (1 << 53) - 1] {
            assert_eq!(whole(float(value)), value);
        }
        assert_eq!(count(7).to_bits(), 7.0_f64.to_bits());
    }

    #[test]
    fn what_is_no_count_becomes_the_nearest_one() {
        assert_eq!(whole(f64::NAN), 0);
        assert_eq!(whole(-5.0), 0);
        assert_eq!(whole(f64::INFINITY), u64::MAX);
        assert_eq!(whole(1e300), u64::MAX);
        assert_eq!(whole(3.99), 3);
    }
}
