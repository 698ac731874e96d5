//! Findings in one sentence.

use std::fmt::Write;

use crate::leak::{
    FindingKind, LeakClass, Rule,
    alarm::{Bar, Outlook},
    number::float,
};

const GI: f64 = 1_073_741_824.0;

/// A size as people write it.
fn size(bytes: f64) -> String {
    if bytes.abs() >= GI {
        format!("{:.1} GiB", bytes / GI)
    } else {
        format!("{:.0} MiB", bytes / GI * 1024.0)
    }
}

/// A time as people write it.
fn time(milliseconds: u64) -> String {
    let minutes = float(milliseconds) / 60_000.0;
    if minutes < 1.0 {
        format!("{:.0} s", minutes * 60.0)
    } else if minutes < 120.0 {
        format!("{minutes:.0} min")
    } else if minutes < 2880.0 {
        format!("{:.1} h", minutes / 60.0)
    } else {
        format!("{:.1} d", minutes / 1440.0)
    }
}

/// How memory grows, as people say it.
pub(crate) const fn how(class: LeakClass) -> &'static str {
    match class {
        LeakClass::Linear => "steadily",
        LeakClass::Step => "in steps",
        LeakClass::Exponential => "faster and faster",
        LeakClass::Saturating => "ever slower",
        LeakClass::PerReplay => "with each graph replay",
    }
}

/// What is found, with the numbers.
pub(super) fn sentence(
    (kind, rule): (FindingKind, Rule),
    outlook: &Outlook,
    bar: Option<Bar>,
    capacity: Option<u64>,
    scales: usize,
) -> String {
    if kind == FindingKind::Cleared {
        return format!("no scale has seen growth any more; use peaks at {}", size(outlook.envelope));
    }
    let how = how(outlook.class);
    let mut text = match rule {
        Rule::RateOfRise => format!(
            "it rose at every minute of the last {} by {}, {} an hour",
            time(outlook.over),
            size(outlook.growth),
            size(outlook.slope.mid),
        ),
        Rule::Trend => format!(
            "floors rose {how} by {} in {}, {} an hour, on {} of {scales} scales",
            size(outlook.growth),
            time(outlook.over),
            size(outlook.slope.mid),
            outlook.agreeing,
        ),
    };
    // Writing to a text cannot fail.
    let _ = match capacity {
        Some(capacity) => {
            write!(text, "; use peaks at {} of {}", size(outlook.envelope), size(float(capacity)))
        }
        None => write!(text, "; the capacity is not known, so nothing is acted on"),
    };
    if let Some(exhaustion) = outlook.exhaustion {
        let _ = write!(
            text,
            ", full in {} to {}, likely {}",
            time(exhaustion.low),
            time(exhaustion.high),
            time(exhaustion.mid)
        );
    }
    if let Some(usual) = bar.and_then(|b| b.usual) {
        let _ = write!(text, "; healthy lives peaked at {}", size(float(usual)));
    }
    text
}
