//! The two sides of every pool: one to tune on, one to report.

use clap::ValueEnum;
use sha2::{Digest, Sha256};

/// A side. Which one a pod is on follows from its name alone, so no choice can favour anybody.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Side {
    /// For tuning.
    Even,
    /// For the report; run once, when tuning is over.
    Odd,
}

impl Side {
    /// The side of a name: the lowest bit of the first byte of its SHA-256.
    pub(crate) fn of(name: &str) -> Self {
        match Sha256::digest(name.as_bytes()).first() {
            Some(byte) if byte & 1 == 1 => Self::Odd,
            _ => Self::Even,
        }
    }
}

impl std::fmt::Display for Side {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Even => "even",
            Self::Odd => "odd",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_decides_its_side() {
        // sha256("") begins with e3, sha256("abc") with ba.
        assert_eq!((Side::of(""), Side::of("abc")), (Side::Odd, Side::Even));
    }
}
