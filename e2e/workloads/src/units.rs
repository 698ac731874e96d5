//! Sizes, durations and rates as scripts write them.

use std::time::Duration;

const SIZES: [(&str, u64); 8] = [
    ("Ki", 1 << 10),
    ("Mi", 1 << 20),
    ("Gi", 1 << 30),
    ("Ti", 1 << 40),
    ("k", 1_000),
    ("M", 1_000_000),
    ("G", 1_000_000_000),
    ("T", 1_000_000_000_000),
];

const DURATIONS: [(&str, u64); 4] = [("us", 1), ("ms", 1_000), ("s", 1_000_000), ("m", 60_000_000)];

/// Reads a size in bytes: `4096`, `512Mi`, `2Gi`.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is no size: write a whole number such as 4096, 512Mi or 2Gi");
    let (number, unit) = split(text);
    let unit = if unit.is_empty() { Some(1) } else { find(&SIZES, unit) };
    product(number, unit).ok_or_else(wrong)
}

/// Reads a duration: `500ms`, `2s`.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = split(text);
    let microseconds = product(number, find(&DURATIONS, unit));
    microseconds.map(Duration::from_micros).ok_or_else(|| {
        format!("{text:?} is no duration: write a whole number with us, ms, s or m, such as 500ms")
    })
}

/// Reads a rate in bytes each second: `512Mi/s`.
pub(crate) fn parse_rate(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is no rate: write a size each second such as 512Mi/s");
    let size = text.strip_suffix("/s").ok_or_else(wrong)?;
    parse_size(size).ok().filter(|rate| *rate > 0).ok_or_else(wrong)
}

/// The digits in front, if they are a number, and the unit after them.
fn split(text: &str) -> (Option<u64>, &str) {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    (number.parse().ok(), unit)
}

fn find(units: &[(&str, u64)], unit: &str) -> Option<u64> {
    units.iter().find(|(name, _)| *name == unit).map(|(_, scale)| *scale)
}

fn product(number: Option<u64>, scale: Option<u64>) -> Option<u64> {
    number?.checked_mul(scale?)
}

/// Writes a size in the unit that people would choose, for messages.
pub(crate) fn show(bytes: u64) -> String {
    let (unit, scale) = match bytes {
        0..1_048_576 => ("KiB", 1_u64 << 10),
        1_048_576..1_073_741_824 => ("MiB", 1 << 20),
        _ => ("GiB", 1 << 30),
    };
    let tenths = u128::from(bytes) * 10 / u128::from(scale);
    format!("{}.{} {unit}", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_durations_and_rates_are_read() {
        assert_eq!(parse_size("4096"), Ok(4096));
        assert_eq!(parse_size("2Gi"), Ok(2 << 30));
        assert_eq!(parse_duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_duration("2m"), Ok(Duration::from_mins(2)));
        assert_eq!(parse_rate("512Mi/s"), Ok(512 << 20));
    }

    #[test]
    fn what_is_none_is_refused() {
        for text in ["", "Gi", "-1", "2 Gi", "2gi", "99999999999999999999"] {
            assert!(parse_size(text).is_err(), "{text:?}");
        }
        for text in ["", "5", "s", "1h", "-1s"] {
            assert!(parse_duration(text).is_err(), "{text:?}");
        }
        for text in ["512Mi", "0/s", "/s", "1Gi/m"] {
            assert!(parse_rate(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn sizes_are_shown_for_people() {
        assert_eq!(show(0), "0.0 KiB");
        assert_eq!(show(518 << 20), "518.0 MiB");
        assert_eq!(show(3 << 29), "1.5 GiB");
    }
}
