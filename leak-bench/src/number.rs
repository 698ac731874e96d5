//! Conversions between counts, bytes and real numbers, each with what it loses.

/// One mebibyte, in bytes.
pub(crate) const MIB: f64 = 1_048_576.0;
/// One gibibyte, in bytes.
pub(crate) const GIB: f64 = 1024.0 * MIB;

/// One minute, in seconds.
pub(crate) const MINUTE: f64 = 60.0;
/// One hour, in seconds.
pub(crate) const HOUR: f64 = 60.0 * MINUTE;
/// One day, in seconds.
pub(crate) const DAY: f64 = 24.0 * HOUR;

/// A count as a real number; exact below 2^32, and no bench counts further.
pub(crate) fn real(count: usize) -> f64 {
    u32::try_from(count).map_or(f64::from(u32::MAX), f64::from)
}

/// A whole number as a real one: exact up to 2^53, rounded beyond.
pub(crate) fn wide(value: u64) -> f64 {
    let high = u32::try_from(value >> 32).unwrap_or(u32::MAX);
    let low = u32::try_from(value & u64::from(u32::MAX)).unwrap_or(u32::MAX);
    f64::from(high) * 4_294_967_296.0 + f64::from(low)
}

/// A real number as a whole one: 0 for what is negative or not a number, `u64::MAX` for what is
/// too large.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the conversion saturates, and that is what is wanted"
)]
pub(crate) fn whole(value: f64) -> u64 {
    value.round() as u64
}

/// A real number as a count, in the same way.
pub(crate) fn count(value: f64) -> usize {
    usize::try_from(whole(value)).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_numbers_come_back_as_they_were() {
        for value in [0, 1, 4_294_967_295, 4_294_967_296, 1 << 52, 151_397_597_184] {
            assert_eq!(whole(wide(value)), value);
        }
        assert_eq!((whole(-3.0), whole(f64::NAN), whole(f64::INFINITY)), (0, 0, u64::MAX));
    }
}
