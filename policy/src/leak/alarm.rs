//! The two decisions: suspect, and act.

use serde::{Deserialize, Serialize};

use crate::{
    leak::{
        Detector, Finding, FindingKind, Interval, LeakAdvice, LeakClass, LeakMode, Rule, Settings, Signals,
        detector::JUMP_SCALE,
        jumps::Expected,
        load::works_more,
        mode,
        number::{float, whole},
        profile::above,
        reason,
        rise::Rise,
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
/// Or until what is left is one part in so many of the rise: that something has its bound just there
/// is as unlikely.
const LAST: f64 = 20.0;
/// A life has risen ever since it began if it did for this share of its age.
const EVER: f64 = 0.5;
/// An act by jumps is due when one in ten times the last of them comes within so many times the
/// lead, where nothing is known of the workload
const JUMPS_UNKNOWN: f64 = 1.6;
/// and where something is.
const JUMPS_KNOWN: f64 = 2.0;
/// So many jumps are more than batches take to grow to their bound, as a rule.
const MANY: u32 = 10;
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
    class: LeakClass,
}

impl Alarm {
    /// The slope of a life that was suspect, in bytes an hour.
    pub(super) fn slope(&self) -> Option<f64> {
        self.is_raised().then_some(self.slope.mid)
    }

    /// Whether anything is suspected.
    pub(super) fn is_raised(&self) -> bool {
        self.level > Level::Calm
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
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Outlook {
    /// Slope in bytes an hour.
    pub slope: Interval<f64>,
    /// How it grows.
    pub class: LeakClass,
    /// Upper envelope in bytes.
    pub envelope: f64,
    /// When memory runs out, in milliseconds from now.
    pub exhaustion: Option<Interval<u64>>,
    /// Scales that agree,
    pub agreeing: u32,
    /// and of these with a say in an act: a scale that sees a rise level off has none.
    pub eligible: u32,
    /// One of these is long: its blocks last half of the horizon or more, and what it says is no noise
    /// of minutes.
    pub long: bool,
    /// Length of the blocks that show the slope, in milliseconds.
    pub block: u64,
    /// Growth that they show in bytes,
    pub growth: f64,
    /// in so many milliseconds.
    pub over: u64,
    /// How long it has risen as far back as any scale sees, in milliseconds.
    pub rising: u64,
    /// How sure the test is: the greatest score of the scales that agree.
    pub z: f64,
}

impl Outlook {
    /// The same, but for what the last minutes say.
    fn with(self, rise: &Rise) -> Self {
        Self {
            slope: rise.slope,
            class: LeakClass::Linear,
            exhaustion: Some(rise.exhaustion),
            growth: rise.growth,
            over: rise.over,
            ..self
        }
    }
}

/// What is thought of the pod now; a finding if that changed.
pub(super) fn decide(detector: &mut Detector, now: Millis) -> Option<Finding> {
    let settings = &*detector.settings;
    let live = &detector.live;
    let suspect = live.scales.iter().any(|s| s.verdict.streak >= settings.suspect_blocks);
    let agrees = live.scales.iter().any(|s| s.verdict.agrees());
    let level = live.alarm.level;
    let rise = last_minutes(detector);
    if level < Level::Act
        && let Some(rise) = rise
        && rises_to_the_end(detector, &rise)
    {
        let outlook = outlook(detector).with(&rise);
        detector.live.alarm.level = Level::Act;
        return Some(finding(detector, now, (FindingKind::Act, Rule::RateOfRise), &outlook, Some(rise)));
    }
    if level < Level::Act
        && let Some(outlook) = jumps_to_the_end(detector)
    {
        detector.live.alarm = Alarm { level: Level::Act, slope: outlook.slope, class: outlook.class };
        return Some(finding(detector, now, (FindingKind::Act, Rule::Trend), &outlook, rise));
    }
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
    Some(finding(detector, now, (kind, Rule::Trend), &outlook, rise))
}

/// Whether the rise of the last minutes is due for an act by itself.
fn rises_to_the_end(detector: &Detector, rise: &Rise) -> bool {
    let Some(capacity) = detector.live.capacity.filter(|_| rise.alarming) else { return false };
    float(bytes(detector.live.envelope.level())) > mark(detector, capacity, false)
}

/// What the jumps of a life come to. Times are in milliseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Jumping {
    /// What to expect of them, in units and blocks.
    pub expected: Expected,
    /// Length of these blocks.
    pub block: u64,
    /// Since the first of them.
    pub over: f64,
    /// Until the one that goes beyond the capacity: early, likely and late.
    pub until: [f64; 3],
}

/// What the jumps of this life come to, if they go on as they came.
pub(super) fn jumping(detector: &Detector) -> Option<Jumping> {
    let live = &detector.live;
    let capacity = float(live.capacity?);
    let blocks = live.scales.get(JUMP_SCALE)?.window.blocks();
    let block = *detector.settings.block_milliseconds.get(JUMP_SCALE)?;
    let last = blocks.last()?;
    let expected = live.jumps.expected(last.number)?;
    let envelope = float(bytes(live.envelope.level()));
    let reach = float_bytes(f64::from(last.floor) + burst(blocks));
    let room = (capacity - envelope.max(reach)).max(0.0) / float_bytes(1.0);
    Some(Jumping {
        expected,
        block,
        over: f64::from(expected.over) * float(block),
        until: expected.until(room).map(|blocks| blocks * float(block)),
    })
}

/// What the jumps of this life come to, where they are due for an act by themselves. Not where nothing
/// says what is usual and it has jumped for most of its life, but not often, or came down again
/// before: batches that grow to their bound and collected garbage do just that.
fn jumps_to_the_end(detector: &Detector) -> Option<Outlook> {
    let (settings, live) = (&*detector.settings, &detector.live);
    let capacity = live.capacity?;
    let Jumping { expected, block, over, until: [low, mid, high] } = jumping(detector)?;
    let rising = over + float(settings.warm_up_milliseconds) >= EVER * float(live.age());
    let known = is_known(detector, capacity);
    if !known && (rising && expected.seen < MANY || live.returned.from().is_some()) {
        return None;
    }
    let envelope = float(bytes(live.envelope.level()));
    let patience = if known { JUMPS_KNOWN } else { JUMPS_UNKNOWN };
    let due =
        envelope > mark(detector, capacity, !rising) && low < float(settings.lead_milliseconds) * patience;
    let hourly = float_bytes(expected.size) / (expected.gap * float(block)) * HOUR;
    due.then(|| Outlook {
        slope: Interval { low: hourly, mid: hourly, high: hourly },
        class: LeakClass::Step,
        exhaustion: Some(Interval {
            low: whole(low).min(FAR),
            mid: whole(mid).min(FAR),
            high: whole(high).min(FAR),
        }),
        growth: float_bytes(expected.size * f64::from(expected.seen)),
        over: whole(over),
        ..outlook(detector)
    })
}

/// What is thought of the pod at present, if it is suspect, by the numbers of now.
pub(super) fn present(detector: &Detector, now: Millis) -> Option<Finding> {
    let kind = match detector.live.alarm.level {
        Level::Calm => return None,
        Level::Act if still_high(detector, now) => FindingKind::Act,
        Level::Suspect | Level::Act => FindingKind::Suspect,
    };
    let rise = last_minutes(detector);
    let (rule, outlook) = match rise.as_ref().filter(|rise| rise.alarming) {
        Some(rise) => (Rule::RateOfRise, outlook(detector).with(rise)),
        None => (Rule::Trend, outlook(detector)),
    };
    Some(finding(detector, now, (kind, rule), &outlook, rise))
}

/// Whether an act that became due is so still, as far as memory goes: what was freed since, or not
/// seen for a while, is no reason to restart anybody. The lowest mark counts, so that an act that
/// waits for its turn does not come and go.
fn still_high(detector: &Detector, now: Millis) -> bool {
    let high = |capacity| float(bytes(detector.live.envelope.level())) > mark(detector, capacity, true);
    detector.decides(now) && detector.live.capacity.is_some_and(high)
}

/// The rise of the last minutes, if there is one.
pub(super) fn last_minutes(detector: &Detector) -> Option<Rise> {
    let live = &detector.live;
    let more_work = live.scales.first().is_some_and(|s| works_more(s.window.blocks()));
    live.capacity.and_then(|capacity| live.minutes.rise(&detector.settings, capacity, more_work))
}

/// What the scales that agree say together.
pub(super) fn outlook(detector: &Detector) -> Outlook {
    let (settings, live) = (&*detector.settings, &detector.live);
    let all = || live.scales.iter().zip(settings.block_milliseconds).map(|(s, length)| (s.verdict, length));
    let agreeing = || all().filter(|(v, _)| v.agrees());
    let has_a_say = |v: &Verdict| {
        v.since_onset >= settings.act_blocks
            || (v.since_onset >= settings.act_blocks.div_ceil(2) && v.blocks >= settings.act_blocks)
    };
    let eligible = || agreeing().filter(|(v, _)| has_a_say(v) && v.class != LeakClass::Saturating);
    let envelope = float(bytes(live.envelope.level()));
    let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let long = eligible().any(|(_, length)| length >= settings.horizon_milliseconds / 2);
    let enough = long || number(eligible().count()) >= settings.act_scales;
    // What is told is of the longest scale; of those with a say, where they are enough for an act. A
    // warm-up from which a leak goes on looks bent on the longest.
    let longest = agreeing().next_back().unwrap_or_default();
    let (main, block) = eligible().next_back().filter(|_| enough).unwrap_or(longest);
    let lasted =
        |(v, length): (Verdict, u64)| u64::from(v.since_onset.saturating_sub(1)).saturating_mul(length);
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
        let ends = agreeing().map(|(v, length)| {
            let straight = float(until(least, float_bytes(v.slope.high)));
            -accelerated(&v, length).map_or(straight, |sooner| sooner.min(straight))
        });
        // Where one of the longer scales is sure of the law, it needs no other.
        let [shortest, ..] = settings.block_milliseconds;
        let exponential = || agreeing().filter(|(v, _)| v.class == LeakClass::Exponential);
        let sure = exponential()
            .filter(|(_, length)| *length > shortest)
            .filter_map(|(v, length)| accelerated(&v, length));
        let exponential = exponential().filter_map(|(v, length)| accelerated(&v, length));
        let low = sure.fold(-supported(ends), f64::min);
        let mid = exponential.fold(float(until(least, slope.mid)), f64::min);
        Interval { low: whole(low).min(FAR), mid: whole(mid.max(low)).min(FAR), high: until(room, slope.low) }
    });
    Outlook {
        slope,
        class,
        envelope,
        exhaustion,
        agreeing: number(agreeing().count()),
        eligible: number(eligible().count()),
        long,
        rising: lasted(longest),
        block,
        growth: float_bytes(main.growth),
        over: lasted((main, block)),
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

/// The bytes that use must exceed before an act: the mark of the policy, what healthy lives came to,
/// what this life came back from, and what was declared. `soon`: there is no time to wait for the
/// higher mark of a life of which nothing is known.
fn mark(detector: &Detector, capacity: u64, soon: bool) -> f64 {
    let (settings, live, profile) = (&*detector.settings, &detector.live, &detector.profile);
    let percent = |percent: u32| float(capacity) * f64::from(percent) / 100.0;
    let mark = match profile.bar(settings, live.age(), capacity) {
        Some(healthy) => percent(settings.act_above_percent).max(healthy),
        None if profile.ended_badly() > 0 || soon => percent(settings.act_above_percent),
        None => percent(settings.act_above_percent_without_profile),
    };
    let returned =
        live.returned.from().map(|from| above(float(bytes(from)), RETURNED_MARGIN, float(capacity)));
    let declared = float(declared_bar(settings, live.declared, Some(capacity)));
    mark.max(returned.unwrap_or(0.0)).max(declared)
}

/// Whether lives before this one say what is usual, or that it leaks.
fn is_known(detector: &Detector, capacity: u64) -> bool {
    let (settings, profile) = (&*detector.settings, &detector.profile);
    profile.bar(settings, detector.live.age(), capacity).is_some() || profile.ended_badly() > 0
}

/// What use must exceed before an act. `None` where the capacity is not known: nothing is acted on
/// then.
pub(super) fn bar(detector: &Detector, outlook: &Outlook) -> Option<Bar> {
    let (settings, live, profile) = (&*detector.settings, &detector.live, &detector.profile);
    let capacity = live.capacity?;
    let healthy = profile.bar(settings, live.age(), capacity);
    let rising = float(outlook.rising.saturating_add(settings.warm_up_milliseconds))
        >= EVER * float(live.age())
        && outlook.class != LeakClass::Exponential;
    let urgent = float(settings.lead_milliseconds) * URGENT;
    let soon = !rising && outlook.exhaustion.is_some_and(|e| float(e.low) < urgent);
    let patience = if rising { PATIENCE_RISING } else { PATIENCE_RISEN };
    let most = float(settings.horizon_milliseconds);
    let known = is_known(detector, capacity);
    Some(Bar {
        bytes: mark(detector, capacity, soon),
        horizon: if known || soon {
            most
        } else {
            (float(settings.lead_milliseconds) * patience).max(float(outlook.rising) / LAST).min(most)
        },
        usual: healthy.and(profile.peak()),
        unproven: !known && rising,
    })
}

fn act_is_due(detector: &Detector, outlook: &Outlook) -> bool {
    let (Some(bar), Some(exhaustion)) = (bar(detector, outlook), outlook.exhaustion) else { return false };
    (outlook.eligible >= detector.settings.act_scales || outlook.long)
        && outlook.envelope > bar.bytes
        && float(exhaustion.low) < bar.horizon
        && float(exhaustion.mid) < bar.horizon * LIKELY
        && (!bar.unproven || float(exhaustion.high) < bar.horizon * FARTHEST)
}

fn finding(
    detector: &Detector,
    now: Millis,
    (kind, rule): (FindingKind, Rule),
    outlook: &Outlook,
    rise: Option<Rise>,
) -> Finding {
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
        rule,
        class: outlook.class,
        slope_bytes_per_hour: outlook.slope,
        exhaustion_milliseconds: outlook.exhaustion,
        confidence: confidence((kind, rule), outlook, bar),
        scales: scales.filter(|(s, _)| s.verdict.blocks > 0).map(|(s, l)| s.evidence(l)).collect(),
        mode,
        advice: advice(detector, kind, outlook, mode),
        signals: Signals {
            staircase: live.staircase_fired,
            staircase_count: live.staircase_count,
            drift: live.drift.distance(),
            rate_of_rise_exhaustion_milliseconds: rise.map(|r| r.exhaustion.mid),
        },
        reason: reason::sentence(
            (kind, rule),
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
) -> Option<LeakAdvice> {
    match kind {
        FindingKind::Cleared => None,
        _ if outlook.class == LeakClass::Saturating => Some(LeakAdvice::CacheFilling),
        _ if mode.is_some_and(|(mode, _)| mode == LeakMode::AllocatorRetention) => {
            Some(LeakAdvice::AllocatorOption)
        }
        FindingKind::Suspect => None,
        FindingKind::Act if detector.profile.restarts_without_effect() >= 2 => Some(LeakAdvice::Ticket),
        FindingKind::Act => Some(LeakAdvice::Restart),
    }
}

/// From 0 to 1: more with each scale that agrees, with the score of the test, and with the
/// distance from what healthy lives do.
fn confidence((kind, rule): (FindingKind, Rule), outlook: &Outlook, bar: Option<Bar>) -> f64 {
    if kind == FindingKind::Cleared {
        return 0.0;
    }
    let mut odds = -1.0 + 0.8 * f64::from(outlook.agreeing) + 0.3 * (outlook.z - 2.6).clamp(0.0, 4.0);
    if rule == Rule::RateOfRise {
        // Its gates are hard.
        odds += 1.5;
    }
    if outlook.class == LeakClass::Saturating {
        odds -= 2.0;
    }
    if let Some(bar) = bar.filter(|bar| outlook.envelope > bar.bytes) {
        odds += if bar.usual.is_some() { 1.5 } else { 0.5 };
    }
    1.0 / (1.0 + (-odds).exp())
}
