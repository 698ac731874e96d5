//! The two decisions: suspect, and act.

use serde::{Deserialize, Serialize};

use crate::{
    leak::{
        Advice, Class, Detector, Finding, FindingKind, Interval, LeakMode, Rule, Settings, Signals, mode,
        number::{float, whole},
        profile::above,
        reason,
        scale::{Verdict, burst},
        window::{bytes, float_bytes},
    },
    time::Millis,
};

/// Blocks in a row without a rise after which a suspicion is dropped.
const CLEAR_BLOCKS: u32 = 6;
/// An end that is further away is not told.
const FAR: u64 = 365 * 86_400_000;
/// How far above a height from which this life came back by itself use must be before an act.
const RETURNED_MARGIN: f64 = 0.02;
/// Without a profile an act waits until so many times the lead is left if this life was level
/// before it rose,
const PATIENCE_RISEN: f64 = 4.0;
/// and until so many if it has risen ever since it began: then nothing says what is usual, and the
/// longer it waits, the more caches have come to their bounds.
const PATIENCE_RISING: f64 = 1.6;
/// A life has risen ever since it began if it did for this share of its age.
const EVER: f64 = 0.75;
/// The likely end may be so many times as far as the nearest that is feared,
const LIKELY: f64 = 3.0;
/// and the farthest so many times of a life that has only ever risen: what may as well never come
/// is not known.
const FARTHEST: f64 = 8.0;
/// With less than so many times the lead left there is no time to wait for the higher mark.
const URGENT: f64 = 1.5;
/// The scale whose blocks tell how far peaks stand above floors.
const BURST_SCALE: usize = 1;
/// An hour in milliseconds.
const HOUR: f64 = 3_600_000.0;

/// How far an alarm has gone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Level {
    /// Nothing is suspected.
    #[default]
    Calm,
    /// It is suspect.
    Suspect,
    /// An act is due.
    Act,
}

/// What is thought of a life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Alarm {
    level: Level,
    /// The last slope in bytes an hour.
    slope: Interval<f64>,
    class: Class,
}

impl Alarm {
    /// The slope of a life that was suspect, in bytes an hour.
    pub(super) fn slope(&self) -> Option<f64> {
        (self.level > Level::Calm).then_some(self.slope.mid)
    }
}

/// What use must exceed before an act, and when that may come.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bar {
    /// Bytes that the upper envelope must exceed.
    pub bytes: f64,
    /// The end must be nearer than this, in milliseconds.
    pub horizon: f64,
    /// The greatest use of healthy lives, if any says what is usual.
    pub usual: Option<u64>,
    /// Nothing says what is usual: no life before, and this one has only ever risen.
    pub unproven: bool,
}

/// Least growth that counts, in bytes.
pub(super) fn least_growth(settings: &Settings, capacity: Option<u64>) -> u64 {
    let share = capacity.map_or(0, |c| c / 100 * u64::from(settings.minimum_growth_percent));
    share.max(settings.minimum_growth_bytes)
}

/// What a floor must exceed to be more than what the pod declared, in bytes; 0 if it declared
/// nothing.
pub(super) fn declared_bar(settings: &Settings, declared: Option<u64>, capacity: Option<u64>) -> u64 {
    let Some(declared) = declared.filter(|d| *d > 0) else { return 0 };
    let share = capacity.map_or(0, |c| c / 100 * u64::from(settings.declared_margin_percent));
    declared.saturating_add(share.max(settings.declared_margin_bytes))
}

/// What the present numbers come to.
#[derive(Clone, Debug)]
pub(super) struct Outlook {
    /// Slope in bytes an hour.
    pub slope: Interval<f64>,
    /// How it grows.
    pub class: Class,
    /// Upper envelope in bytes.
    pub envelope: f64,
    /// When memory runs out, in milliseconds from now.
    pub exhaustion: Option<Interval<u64>>,
    /// Scales that agree,
    pub agreeing: u32,
    /// and of these with a say in an act.
    pub eligible: u32,
    /// Length of the blocks that show the slope, in milliseconds.
    pub block: u64,
    /// Growth that they show in bytes,
    pub growth: f64,
    /// in so many milliseconds.
    pub over: u64,
    /// How sure the test is: the greatest score of the scales that agree.
    pub z: f64,
}

/// What is thought of the pod now; a finding if that changed.
pub(super) fn decide(detector: &mut Detector, now: Millis) -> Option<Finding> {
    let settings = &*detector.settings;
    let live = &detector.live;
    let suspect = live.scales.iter().any(|s| s.verdict.streak >= settings.suspect_blocks);
    let agrees = live.scales.iter().any(|s| s.verdict.agrees());
    let level = live.alarm.level;
    if level == Level::Calm && !suspect {
        return None;
    }
    let kind = if agrees {
        let outlook = outlook(detector);
        let due = level < Level::Act && act_is_due(detector, &outlook);
        let kind = match level {
            _ if due => Some((FindingKind::Act, Level::Act)),
            Level::Calm => Some((FindingKind::Suspect, Level::Suspect)),
            _ => None,
        };
        detector.live.alarm.slope = outlook.slope;
        detector.live.alarm.class = outlook.class;
        kind.map(|(kind, level)| (kind, level, outlook))
    } else {
        let stale = |v: &Verdict| v.streak == 0 && v.missed >= CLEAR_BLOCKS;
        let cleared = live.scales.iter().all(|s| s.verdict.growth <= 0.0 || stale(&s.verdict));
        cleared.then(|| (FindingKind::Cleared, Level::Calm, outlook(detector)))
    };
    let (kind, level, outlook) = kind?;
    detector.live.alarm.level = level;
    Some(finding(detector, now, kind, &outlook))
}

/// What is thought of the pod at present, if it is suspect, by the numbers of now.
pub(super) fn present(detector: &Detector, now: Millis) -> Option<Finding> {
    let kind = match detector.live.alarm.level {
        Level::Calm => return None,
        Level::Suspect => FindingKind::Suspect,
        Level::Act => FindingKind::Act,
    };
    Some(finding(detector, now, kind, &outlook(detector)))
}

/// What the scales that agree say together.
fn outlook(detector: &Detector) -> Outlook {
    let (settings, live) = (&*detector.settings, &detector.live);
    let all = || live.scales.iter().zip(settings.block_milliseconds).map(|(s, length)| (s.verdict, length));
    let agreeing = || all().filter(|(v, _)| v.agrees());
    let has_a_say = |v: &Verdict| {
        v.since_onset >= settings.act_blocks
            || (v.since_onset >= settings.act_blocks.div_ceil(2) && v.blocks >= settings.act_blocks)
    };
    let envelope = float(bytes(live.envelope.level()));
    let (main, block) = agreeing().next_back().unwrap_or_default();
    let slope = Interval {
        low: agreeing().map(|(v, _)| v.slope.low).fold(f64::INFINITY, f64::min),
        mid: supported(agreeing().map(|(v, _)| v.slope.mid)),
        high: supported(agreeing().map(|(v, _)| v.slope.high)),
    };
    let slope = if agreeing().next().is_none() {
        live.alarm.slope
    } else {
        Interval { low: float_bytes(slope.low), mid: float_bytes(slope.mid), high: float_bytes(slope.high) }
    };
    let class = main.class;
    // The end comes on a burst like those of the last hours.
    let reach = live.scales.get(BURST_SCALE).map_or(0.0, |s| {
        let blocks = s.window.blocks();
        float_bytes(blocks.last().map_or(0.0, |b| f64::from(b.floor)) + burst(blocks))
    });
    let exhaustion = live.capacity.filter(|_| slope.mid > 0.0).map(|capacity| {
        let room = (float(capacity) - envelope).max(0.0);
        let until = |room: f64, slope: f64| {
            if slope > 0.0 { whole(room / slope * HOUR).min(FAR) } else { FAR }
        };
        let least = (float(capacity) - envelope.max(reach)).max(0.0);
        let units = least / float_bytes(1.0);
        let accelerated =
            |v: &Verdict, length: u64| v.accelerated(units, float(length) / HOUR).map(|h| h * HOUR);
        let jumping = |v: &Verdict, length: u64| v.jumping(units).map(|blocks| blocks * float(length));
        let ends = agreeing().map(|(v, length)| {
            let straight = float(until(least, float_bytes(v.slope.high)));
            let sooner = accelerated(&v, length).or_else(|| jumping(&v, length));
            -sooner.map_or(straight, |sooner| sooner.min(straight))
        });
        // Where one of the longer scales is sure of the law, it needs no other.
        let [shortest, ..] = settings.block_milliseconds;
        let sure =
            agreeing().filter(|(_, length)| *length > shortest).filter_map(|(v, length)| match v.class {
                Class::Exponential => accelerated(&v, length),
                Class::Step => jumping(&v, length),
                _ => None,
            });
        let exponential = agreeing().filter(|(v, _)| v.class == Class::Exponential);
        let exponential = exponential.filter_map(|(v, length)| accelerated(&v, length));
        let low = sure.fold(-supported(ends), f64::min);
        let mid = exponential.fold(float(until(least, slope.mid)), f64::min);
        Interval { low: whole(low).min(FAR), mid: whole(mid.max(low)).min(FAR), high: until(room, slope.low) }
    });
    let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    Outlook {
        slope,
        class,
        envelope,
        exhaustion,
        agreeing: number(agreeing().count()),
        eligible: number(agreeing().filter(|(v, _)| has_a_say(v) && v.class != Class::Saturating).count()),
        block,
        growth: float_bytes(main.growth),
        over: u64::from(main.since_onset.saturating_sub(1)).saturating_mul(block),
        z: agreeing().map(|(v, _)| v.z).fold(0.0, f64::max),
    }
}

/// The slope that two scales support: the second largest, or the only one. Short scales alone see
/// too much, and the longest alone what is long past.
fn supported(slopes: impl Iterator<Item = f64>) -> f64 {
    let (mut first, mut second) = (f64::NEG_INFINITY, None);
    for slope in slopes {
        if slope > first {
            second = (first > f64::NEG_INFINITY).then_some(first);
            first = slope;
        } else {
            second = Some(second.map_or(slope, |s: f64| s.max(slope)));
        }
    }
    second.unwrap_or(first)
}

/// What use must exceed before an act. `None` where the capacity is not known: nothing is acted on
/// then.
pub(super) fn bar(detector: &Detector, outlook: &Outlook) -> Option<Bar> {
    let (settings, live) = (&*detector.settings, &detector.live);
    let capacity = live.capacity?;
    let percent = |percent: u32| float(capacity) * f64::from(percent) / 100.0;
    let horizon = float(settings.horizon_milliseconds);
    let profile = &detector.profile;
    let healthy = profile.bar(settings, live.age(), capacity);
    let rising = float(outlook.over.saturating_add(settings.warm_up_milliseconds))
        >= EVER * float(live.age())
        && outlook.class != Class::Exponential;
    let urgent = float(settings.lead_milliseconds) * URGENT;
    let soon = !rising && outlook.exhaustion.is_some_and(|e| float(e.low) < urgent);
    let patience = if rising { PATIENCE_RISING } else { PATIENCE_RISEN };
    let patient = (float(settings.lead_milliseconds) * patience).min(horizon);
    let (bytes, horizon) = match healthy {
        Some(healthy) => (percent(settings.act_above_percent).max(healthy), horizon),
        None if profile.ended_badly() > 0 || soon => (percent(settings.act_above_percent), horizon),
        None => (percent(settings.act_above_percent_without_profile), patient),
    };
    let returned = live
        .returned
        .from()
        .map(|from| above(float(super::window::bytes(from)), RETURNED_MARGIN, float(capacity)));
    let declared = float(declared_bar(settings, live.declared, Some(capacity)));
    let bytes = bytes.max(returned.unwrap_or(0.0)).max(declared);
    let unproven = healthy.is_none() && profile.ended_badly() == 0 && rising;
    Some(Bar { bytes, horizon, usual: healthy.and(profile.peak()), unproven })
}

fn act_is_due(detector: &Detector, outlook: &Outlook) -> bool {
    let (Some(bar), Some(exhaustion)) = (bar(detector, outlook), outlook.exhaustion) else { return false };
    outlook.eligible >= detector.settings.act_scales
        && outlook.class != Class::Saturating
        && outlook.envelope > bar.bytes
        && float(exhaustion.low) < bar.horizon
        && float(exhaustion.mid) < bar.horizon * LIKELY
        && (!bar.unproven || float(exhaustion.high) < bar.horizon * FARTHEST)
}

fn finding(detector: &Detector, now: Millis, kind: FindingKind, outlook: &Outlook) -> Finding {
    let (settings, live) = (&*detector.settings, &detector.live);
    let bar = bar(detector, outlook);
    let main = settings.block_milliseconds.iter().position(|l| *l == outlook.block);
    let mode = main.and_then(|at| live.scales.get(at)).and_then(|scale| {
        let blocks = scale.window.blocks();
        let since = usize::try_from(scale.verdict.since_onset).unwrap_or(0);
        mode::mode(blocks.get(blocks.len().saturating_sub(since)..)?)
    });
    let scales = live.scales.iter().zip(settings.block_milliseconds);
    Finding {
        at: now,
        kind,
        rule: Rule::Trend,
        class: outlook.class,
        slope_bytes_per_hour: outlook.slope,
        exhaustion_milliseconds: outlook.exhaustion,
        confidence: confidence(kind, outlook, bar),
        scales: scales.filter(|(s, _)| s.verdict.blocks > 0).map(|(s, l)| s.evidence(l)).collect(),
        mode,
        advice: advice(detector, kind, outlook, mode),
        signals: Signals {
            staircase: live.staircase_fired,
            staircase_count: live.staircase_count,
            drift: live.drift.distance(),
            rate_of_rise_exhaustion_milliseconds: None,
        },
        reason: reason::sentence(
            kind,
            outlook,
            bar,
            live.capacity,
            live.scales.iter().filter(|s| s.verdict.blocks > 0).count(),
        ),
    }
}

fn advice(
    detector: &Detector,
    kind: FindingKind,
    outlook: &Outlook,
    mode: Option<(LeakMode, f64)>,
) -> Advice {
    match kind {
        FindingKind::Cleared => Advice::None,
        _ if outlook.class == Class::Saturating => Advice::CacheFilling,
        _ if mode.is_some_and(|(mode, _)| mode == LeakMode::AllocatorRetention) => Advice::AllocatorOption,
        FindingKind::Suspect => Advice::None,
        FindingKind::Act if detector.profile.restarts_without_effect() >= 2 => Advice::Ticket,
        FindingKind::Act => Advice::Restart,
    }
}

/// From 0 to 1: more with each scale that agrees, with the score of the test, and with the
/// distance from what healthy lives do.
fn confidence(kind: FindingKind, outlook: &Outlook, bar: Option<Bar>) -> f64 {
    if kind == FindingKind::Cleared {
        return 0.0;
    }
    let mut odds = -1.0 + 0.8 * f64::from(outlook.agreeing) + 0.3 * (outlook.z - 2.6).clamp(0.0, 4.0);
    if outlook.class == Class::Saturating {
        odds -= 2.0;
    }
    if let Some(bar) = bar.filter(|bar| outlook.envelope > bar.bytes) {
        odds += if bar.usual.is_some() { 1.5 } else { 0.5 };
    }
    1.0 / (1.0 + (-odds).exp())
}
