//! Numbers as they stand in a file: decimal, in integer arithmetic, so that no byte is lost to a
//! floating point number.

/// Why a text is not the number that it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Misfit {
    /// It is no decimal number.
    Malformed,
    /// It is below zero.
    Negative,
    /// It is beyond all measure: infinite, or above 2^64 thousandths.
    TooLarge,
}

/// Whether a text says that there is no number: empty, or what Prometheus, pandas and nvidia-smi
/// write for it.
pub(crate) fn is_missing(text: &[u8]) -> bool {
    text.is_empty()
        || [&b"nan"[..], b"null", b"none", b"n/a", b"[n/a]"]
            .iter()
            .any(|word| text.eq_ignore_ascii_case(word))
}

/// A number that is not below zero in thousandths, what is less than one of them cut off.
pub(crate) fn thousandths(text: &[u8]) -> Result<u64, Misfit> {
    // Nearly every number is a plain integer.
    match integer(text) {
        Some(whole) => whole.checked_mul(1000).ok_or(Misfit::TooLarge),
        None => decimal(text),
    }
}

/// A whole number that is not below zero, a fraction cut off.
pub(crate) fn whole(text: &[u8]) -> Result<u64, Misfit> {
    match integer(text) {
        Some(whole) => Ok(whole),
        None => decimal(text).map(|thousandths| thousandths / 1000),
    }
}

/// Digits alone, few enough that they cannot overflow.
fn integer(text: &[u8]) -> Option<u64> {
    if text.is_empty() || text.len() > 19 {
        return None;
    }
    let mut value = 0_u64;
    for byte in text {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        // Nineteen digits are less than 2^64.
        value = value.wrapping_mul(10).wrapping_add(u64::from(digit));
    }
    Some(value)
}

/// `digits[.digits][e[+-]digits]` in thousandths.
fn decimal(text: &[u8]) -> Result<u64, Misfit> {
    let (negative, text) = match text.split_first() {
        Some((b'-', rest)) => (true, rest),
        Some((b'+', rest)) => (false, rest),
        _ => (false, text),
    };
    if [&b"inf"[..], b"infinity"].iter().any(|word| text.eq_ignore_ascii_case(word)) {
        return Err(Misfit::TooLarge);
    }
    let (mantissa, exponent) = match text.iter().position(|byte| matches!(byte, b'e' | b'E')) {
        None => (text, 0),
        Some(at) => {
            let (mantissa, rest) = text.split_at(at);
            (mantissa, signed(rest.get(1..).unwrap_or_default()).ok_or(Misfit::Malformed)?)
        }
    };
    let (before, after) = match mantissa.iter().position(|byte| *byte == b'.') {
        None => (mantissa, &[][..]),
        Some(at) => (mantissa.split_at(at).0, mantissa.get(at + 1..).unwrap_or_default()),
    };
    if before.is_empty() && after.is_empty() {
        return Err(Misfit::Malformed);
    }
    let mut value = 0_u64;
    // Digits from here on are below a thousandth.
    let mut places =
        i64::try_from(before.len()).unwrap_or(i64::MAX).saturating_add(exponent).saturating_add(3);
    let mut zero = true;
    for byte in before.iter().chain(after) {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            return Err(Misfit::Malformed);
        }
        zero &= digit == 0;
        if places > 0 {
            places -= 1;
            value = value
                .checked_mul(10)
                .and_then(|value| value.checked_add(u64::from(digit)))
                .ok_or(Misfit::TooLarge)?;
        }
    }
    if negative && !zero {
        return Err(Misfit::Negative);
    }
    while places > 0 && value > 0 {
        places -= 1;
        value = value.checked_mul(10).ok_or(Misfit::TooLarge)?;
    }
    Ok(value)
}

/// An integer with an optional sign.
pub(crate) fn signed(text: &[u8]) -> Option<i64> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn decimals_are_exact_to_the_thousandth() {
        for (text, expected) in [
            ("0", 0),
            ("17", 17_000),
            ("17.5", 17_500),
            ("1.2349", 1_234),
            (".5", 500),
            ("5.", 5_000),
            ("+3", 3_000),
            ("-0.0", 0),
            ("1.5e9", 1_500_000_000_000),
            ("85899345920E-3", 85_899_345_920),
            ("2e-9", 0),
            ("1767225600.057", 1_767_225_600_057),
        ] {
            assert_eq!(thousandths(text.as_bytes()), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_is_no_number_is_told_from_what_is_out_of_range() {
        for text in ["", ".", "-", "e5", "1e", "12x", "1.2.3", "0x10", "1 000", "1,5", "१"] {
            assert_eq!(thousandths(text.as_bytes()), Err(Misfit::Malformed), "{text}");
        }
        for text in ["-1", "-0.5", "-1e-9"] {
            assert_eq!(thousandths(text.as_bytes()), Err(Misfit::Negative), "{text}");
        }
        for text in ["inf", "+Inf", "1e40", "99999999999999999999999", "1e999999999999"] {
            assert_eq!(thousandths(text.as_bytes()), Err(Misfit::TooLarge), "{text}");
        }
    }

    #[test]
    fn no_number_is_not_zero() {
        for text in ["", "NaN", "nan", "null", "[N/A]", "None"] {
            assert!(is_missing(text.as_bytes()), "{text}");
        }
        assert!(!is_missing(b"0"));
    }

    proptest! {
        #[test]
        fn every_whole_number_is_read_as_it_is(value in 0..u64::MAX / 1000, fraction in 0_u32..1000) {
            prop_assert_eq!(whole(value.to_string().as_bytes()), Ok(value));
            let text = format!("{value}.{fraction:03}");
            prop_assert_eq!(thousandths(text.as_bytes()), Ok(value * 1000 + u64::from(fraction)));
            prop_assert_eq!(whole(text.as_bytes()), Ok(value));
        }

        #[test]
        fn no_text_makes_it_panic(text in "[-+0-9eE. a-z]{0,30}") {
            let _ = (thousandths(text.as_bytes()), whole(text.as_bytes()));
        }
    }
}
