//! A size in bytes, written as a Kubernetes quantity.

use std::{fmt, str::FromStr};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A whole number of bytes. On the wire it is a `resource.Quantity` (`8Gi`, `512Mi`, `1e9`, or a
/// plain integer); a fraction of a byte is rounded up, as Kubernetes does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(pub u64);

/// Why a text is not a size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseSizeError {
    /// The text has no digits, an unknown suffix, or stray characters.
    #[error("{0:?} is not a quantity: {advice}", advice = advice(.0))]
    Malformed(String),
    /// A size below zero.
    #[error("{0:?} is negative: a size must be at least 0")]
    Negative(String),
    /// More than 2^63 - 1 bytes.
    #[error("{0:?} is too large: a size is at most 8Ei - 1")]
    TooLarge(String),
}

/// What to write instead of a text that is no quantity.
fn advice(text: &str) -> String {
    let plain = "write a number with an optional suffix such as Ki, Mi, Gi, k, M, G".to_owned();
    // Most who err write a space, a B for bytes, or the wrong case.
    let text: String = text.chars().filter(|c| !c.is_whitespace()).collect();
    let number_end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(number_end);
    let suffix = suffix.to_ascii_lowercase();
    let binary = ["Ki", "Mi", "Gi", "Ti"].into_iter().find(|known| {
        let known = known.to_ascii_lowercase();
        let short = known.trim_end_matches('i');
        [known.as_str(), short].into_iter().any(|known| suffix.strip_suffix('b').unwrap_or(&suffix) == known)
    });
    let Some(binary) = binary.filter(|_| number.parse::<f64>().is_ok()) else { return plain };
    if suffix.contains('i') {
        return format!("write {number}{binary}");
    }
    let decimal = if binary == "Ki" { "k" } else { binary.trim_end_matches('i') };
    format!("write {number}{decimal}, or {number}{binary} for powers of 1024")
}

impl ByteSize {
    /// One KiB in bytes.
    pub const KI: u64 = 1 << 10;
    /// One MiB in bytes.
    pub const MI: u64 = 1 << 20;
    /// One GiB in bytes.
    pub const GI: u64 = 1 << 30;

    /// `n` MiB.
    pub const fn mib(n: u64) -> Self {
        Self(n.saturating_mul(Self::MI))
    }

    /// `n` GiB.
    pub const fn gib(n: u64) -> Self {
        Self(n.saturating_mul(Self::GI))
    }

    /// The size in bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }

    /// For people: one decimal of the largest unit that fits, such as `14.2 GiB`.
    pub fn rounded(self) -> String {
        const UNITS: [(u32, &str); 4] = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
        for (shift, unit) in UNITS {
            let whole = self.0 >> shift;
            if whole > 0 {
                let tenths = ((u128::from(self.0) * 10) >> shift) % 10;
                return format!("{whole}.{tenths} {unit}");
            }
        }
        format!("{} B", self.0)
    }
}

/// The largest size a quantity may name (2^63 - 1 bytes).
const MAX: u64 = i64::MAX as u64;

impl FromStr for ByteSize {
    type Err = ParseSizeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let malformed = || ParseSizeError::Malformed(text.to_owned());
        let (negative, unsigned) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text.strip_prefix('+').unwrap_or(text)),
        };
        let number_end = unsigned.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(unsigned.len());
        let (number, suffix) = unsigned.split_at(number_end);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
            return Err(malformed());
        }
        // value = digits * multiplier * 10^exponent, in integers throughout.
        let digits: u128 = match format!("{whole}{fraction}").trim_start_matches('0') {
            "" => 0,
            digits if digits.len() > 30 => return Err(ParseSizeError::TooLarge(text.to_owned())),
            digits => digits.parse().map_err(|_| malformed())?,
        };
        let (multiplier, power): (u128, i32) = scale(suffix).ok_or_else(malformed)?;
        let decimals = i32::try_from(fraction.len()).map_err(|_| malformed())?;
        if digits == 0 {
            return Ok(Self(0));
        }
        if negative {
            return Err(ParseSizeError::Negative(text.to_owned()));
        }
        let too_large = || ParseSizeError::TooLarge(text.to_owned());
        let scaled = digits.checked_mul(multiplier).ok_or_else(too_large)?;
        let exponent = power.saturating_sub(decimals);
        let factor = 10u128.checked_pow(exponent.unsigned_abs());
        let bytes = match (exponent >= 0, factor) {
            (true, factor) => factor.and_then(|f| scaled.checked_mul(f)).ok_or_else(too_large)?,
            (false, Some(factor)) => scaled.div_ceil(factor),
            (false, None) => 1, // smaller than any byte, rounded up
        };
        match u64::try_from(bytes) {
            Ok(bytes) if bytes <= MAX => Ok(Self(bytes)),
            _ => Err(too_large()),
        }
    }
}

/// The factor that a suffix stands for, as `multiplier * 10^power`.
fn scale(suffix: &str) -> Option<(u128, i32)> {
    Some(match suffix {
        "" => (1, 0),
        "Ki" => (1 << 10, 0),
        "Mi" => (1 << 20, 0),
        "Gi" => (1 << 30, 0),
        "Ti" => (1 << 40, 0),
        "Pi" => (1 << 50, 0),
        "Ei" => (1 << 60, 0),
        "n" => (1, -9),
        "u" => (1, -6),
        "m" => (1, -3),
        "k" => (1, 3),
        "M" => (1, 6),
        "G" => (1, 9),
        "T" => (1, 12),
        "P" => (1, 15),
        "E" => (1, 18),
        _ => {
            let exponent = suffix.strip_prefix('e').or_else(|| suffix.strip_prefix('E'))?;
            (1, exponent.parse().ok()?)
        }
    })
}

impl fmt::Display for ByteSize {
    /// The shortest exact form with a binary suffix: `8Gi`, `1536Mi`, `1000`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u32, &str); 6] =
            [(60, "Ei"), (50, "Pi"), (40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")];
        for (shift, unit) in UNITS {
            let whole = self.0 >> shift;
            if whole > 0 && whole << shift == self.0 {
                return write!(f, "{whole}{unit}");
            }
        }
        write!(f, "{}", self.0)
    }
}

impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = ByteSize;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a quantity of bytes such as 8Gi")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<ByteSize, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<ByteSize, E> {
                if bytes <= MAX {
                    Ok(ByteSize(bytes))
                } else {
                    Err(E::custom(ParseSizeError::TooLarge(bytes.to_string())))
                }
            }

            fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<ByteSize, E> {
                u64::try_from(bytes)
                    .map(ByteSize)
                    .map_err(|_| E::custom(ParseSizeError::Negative(bytes.to_string())))
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

impl JsonSchema for ByteSize {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "ByteSize".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "x-kubernetes-int-or-string": true,
            "maxLength": 32,
            "x-kubernetes-validations": [{
                "rule": "isQuantity(string(self)) && quantity(string(self)).isGreaterThan(quantity('0')) && quantity(string(self)).isLessThan(quantity('1Ei'))",
                "message": "must be a quantity greater than 0 and below 1Ei, such as 512Mi or 8Gi",
            }],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_parse_to_bytes() {
        for (text, bytes) in [
            ("0", 0),
            ("8Gi", 8 << 30),
            ("1.5Gi", 1536 << 20),
            ("1e3", 1000),
            ("1E3", 1000),
            ("12k", 12_000),
            ("100m", 1),
            ("1n", 1),
            (".5Ki", 512),
            ("+1Mi", 1 << 20),
            ("-0", 0),
            ("9223372036854775807", i64::MAX as u64),
            ("00000000000000000000000000000000000001", 1),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn bad_quantities_say_what_to_change() {
        for text in ["", "Gi", "8GiB", "1.2.3", "eight", "1e", ".", "8 Gi", "0x10"] {
            assert_eq!(text.parse::<ByteSize>(), Err(ParseSizeError::Malformed(text.into())), "{text}");
        }
        assert_eq!("-1Gi".parse::<ByteSize>(), Err(ParseSizeError::Negative("-1Gi".into())));
        for text in ["8Ei", "9223372036854775808", "1e400", "99999999999999999999999999999999999999999"] {
            assert_eq!(text.parse::<ByteSize>(), Err(ParseSizeError::TooLarge(text.into())), "{text}");
        }
    }

    #[test]
    fn a_text_that_is_nearly_a_quantity_says_which() {
        for (text, expected) in [
            ("256MB", "\"256MB\" is not a quantity: write 256M, or 256Mi for powers of 1024"),
            ("8 GiB", "\"8 GiB\" is not a quantity: write 8Gi"),
            ("1.5gb", "\"1.5gb\" is not a quantity: write 1.5G, or 1.5Gi for powers of 1024"),
            ("64KB", "\"64KB\" is not a quantity: write 64k, or 64Ki for powers of 1024"),
            ("8gi", "\"8gi\" is not a quantity: write 8Gi"),
            (
                "1h",
                "\"1h\" is not a quantity: write a number with an optional suffix such as Ki, Mi, Gi, k, M, G",
            ),
            (
                "GB",
                "\"GB\" is not a quantity: write a number with an optional suffix such as Ki, Mi, Gi, k, M, G",
            ),
        ] {
            let error = text.parse::<ByteSize>().unwrap_err();
            assert_eq!(error.to_string(), expected);
            for size in expected.split(' ').filter(|word| word.starts_with(|c: char| c.is_ascii_digit())) {
                let size = size.trim_end_matches(',');
                assert!(size == "1024" || size.parse::<ByteSize>().is_ok(), "{size}");
            }
        }
    }

    #[test]
    fn printing_is_exact_and_parses_back() {
        for bytes in [0, 1, 1000, 1 << 10, 1536 << 20, 80 << 30, (80 << 30) + 1, u64::MAX >> 1] {
            assert_eq!(ByteSize(bytes).to_string().parse(), Ok(ByteSize(bytes)));
        }
        assert_eq!(ByteSize(1536 << 20).to_string(), "1536Mi");
    }

    #[test]
    fn json_takes_text_and_integers() {
        assert_eq!(serde_json::from_str::<ByteSize>("\"2Gi\"").unwrap(), ByteSize::gib(2));
        assert_eq!(serde_json::from_str::<ByteSize>("1024").unwrap(), ByteSize(1024));
        assert!(serde_json::from_str::<ByteSize>("-1").is_err());
        assert!(serde_json::from_str::<ByteSize>("null").is_err());
    }
}
