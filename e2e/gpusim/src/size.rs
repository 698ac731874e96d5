//! Sizes in bytes, written as people write them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

const UNITS: [(&str, u64); 8] = [
    ("Ki", 1 << 10),
    ("Mi", 1 << 20),
    ("Gi", 1 << 30),
    ("Ti", 1 << 40),
    ("k", 1_000),
    ("M", 1_000_000),
    ("G", 1_000_000_000),
    ("T", 1_000_000_000_000),
];

/// A number of bytes; in text a whole number, alone or with a unit: `4096`, `512Mi`, `2G`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "Written", into = "u64")]
pub struct Bytes(pub u64);

#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    Number(u64),
    Text(#[serde(deserialize_with = "from_text")] Bytes),
}

fn from_text<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Bytes, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
}

impl From<Written> for Bytes {
    fn from(written: Written) -> Self {
        match written {
            Written::Number(number) => Self(number),
            Written::Text(bytes) => bytes,
        }
    }
}

impl From<Bytes> for u64 {
    fn from(bytes: Bytes) -> Self {
        bytes.0
    }
}

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("{text:?} is not a size: write a whole number of bytes such as 4096, 512Mi or 2Gi");
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let unit = text.get(digits.len()..).unwrap_or_default();
        let scale = if unit.is_empty() {
            1
        } else {
            UNITS.iter().find(|(name, _)| *name == unit).map(|(_, scale)| *scale).ok_or_else(wrong)?
        };
        let number: u64 = digits.parse().map_err(|_| wrong())?;
        number
            .checked_mul(scale)
            .map(Self)
            .ok_or_else(|| format!("{text:?} is more bytes than fit in 64 bits"))
    }
}

impl fmt::Display for Bytes {
    /// The largest binary unit that writes the number exactly.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let binary = UNITS.iter().take(4).rev();
        match binary.into_iter().find(|(_, scale)| self.0 != 0 && self.0.is_multiple_of(*scale)) {
            Some((unit, scale)) => write!(f, "{}{unit}", self.0 / scale),
            None => write!(f, "{}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_and_without_units() {
        for (text, bytes) in
            [("0", 0), ("4096", 4096), ("2Mi", 2 << 20), ("141Gi", 141 << 30), ("3G", 3_000_000_000)]
        {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
    }

    #[test]
    fn a_wrong_size_is_named_in_the_error() {
        for text in ["", "Gi", "-1Gi", "1.5Gi", "1gib", "1 Gi", "99999999999Ti"] {
            let error = text.parse::<Bytes>().unwrap_err();
            assert!(error.contains(&format!("{text:?}")), "{error}");
        }
    }

    #[test]
    fn sizes_are_written_in_the_largest_exact_unit() {
        assert_eq!(Bytes(518 << 20).to_string(), "518Mi");
        assert_eq!(Bytes(2 << 30).to_string(), "2Gi");
        assert_eq!(Bytes(1001).to_string(), "1001");
        assert_eq!(Bytes(0).to_string(), "0");
    }

    #[test]
    fn json_accepts_numbers_and_text() {
        assert_eq!(serde_json::from_str::<Bytes>("7").unwrap(), Bytes(7));
        assert_eq!(serde_json::from_str::<Bytes>("\"7Ki\"").unwrap(), Bytes(7168));
        assert!(serde_json::from_str::<Bytes>("\"7Q\"").is_err());
    }
}
