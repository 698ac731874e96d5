//! What a decision to act goes by, as numbers: for whoever judges the rules, or learns beside them.

use crate::{
    leak::{
        Detector, Interval, LeakClass, ScaleEvidence,
        alarm::{self, Outlook},
        load::works_more,
        number::{float, whole},
        settings::SCALES,
        window::{bytes, float_bytes},
    },
    time::Millis,
};

/// What one scale goes by.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ScaleRecords {
    /// What is told of it.
    pub evidence: ScaleEvidence,
    /// How its floors grow.
    pub class: LeakClass,
    /// Blocks that rose and were records, with no fall between them,
    pub records: u32,
    /// blocks since the first of these,
    pub stood: u32,
    /// and since the last.
    pub missed: u32,
}

/// Jumps that are expected to go on.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct JumpEvidence {
    /// Jumps seen,
    pub seen: u32,
    /// in so many milliseconds.
    pub over_milliseconds: u64,
    /// Their mean size in bytes.
    pub bytes: f64,
    /// Their mean gap in milliseconds.
    pub gap_milliseconds: u64,
    /// When the one comes that goes beyond the capacity, in milliseconds.
    pub exhaustion_milliseconds: Interval<u64>,
}

/// What a decision to act goes by at a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Evidence {
    /// Age of the life.
    pub age_milliseconds: u64,
    /// What the pod can come to, in bytes.
    pub capacity: u64,
    /// Upper envelope of the last minutes in bytes.
    pub envelope_bytes: f64,
    /// The greatest height from which this life came back by itself, in bytes.
    pub returned_bytes: Option<u64>,
    /// How memory grows.
    pub class: LeakClass,
    /// Slope in bytes an hour.
    pub slope_bytes_per_hour: Interval<f64>,
    /// When memory runs out by the trend of floors; `None` where nothing is suspected.
    pub exhaustion_milliseconds: Option<Interval<u64>>,
    /// Growth that the blocks of the slope show in bytes,
    pub growth_bytes: f64,
    /// in so many milliseconds.
    pub over_milliseconds: u64,
    /// How long it has risen as far back as any scale sees.
    pub rising_milliseconds: u64,
    /// What each scale says, the shortest first.
    pub scales: [ScaleRecords; SCALES],
    /// Scales that agree,
    pub agreeing: u32,
    /// and of these with a say in an act,
    pub eligible: u32,
    /// one of which is long.
    pub long: bool,
    /// Jumps, where these are what makes it grow.
    pub jumps: Option<JumpEvidence>,
    /// When the rise of the last minutes reaches the capacity,
    pub minutes_exhaustion_milliseconds: Option<Interval<u64>>,
    /// and whether nothing explains it.
    pub minutes_alarming: bool,
    /// Whether clearly more work is done than before; `None` where work is not known.
    pub more_work: Option<bool>,
    /// Times that the staircase fired in this life.
    pub staircase_count: u32,
    /// Distance of the last samples from the whole life, 0 to 1.
    pub drift: f64,
}

impl Evidence {
    /// The earliest end that any of it lets fear, in milliseconds.
    pub fn earliest(&self) -> Option<u64> {
        let jumps = self.jumps.map(|jumps| jumps.exhaustion_milliseconds);
        let ends = [self.exhaustion_milliseconds, jumps, self.minutes_exhaustion_milliseconds];
        ends.into_iter().flatten().map(|end| end.low).min()
    }
}

impl Detector {
    /// What a decision to act would go by at present. `None` where none can be made: too little was
    /// seen since a gap, the capacity is not known, or nothing is suspected, jumps or rises.
    pub fn evidence(&self, now: Millis) -> Option<Evidence> {
        let live = &self.live;
        let capacity = live.capacity.filter(|_| self.decides(now))?;
        let suspected = live.alarm.slope().is_some();
        let (jumps, rise) = (alarm::jumping(self), alarm::last_minutes(self));
        if !suspected && jumps.is_none() && rise.is_none() {
            return None;
        }
        let Outlook {
            slope,
            class,
            envelope,
            exhaustion,
            agreeing,
            eligible,
            long,
            growth,
            over,
            rising,
            ..
        } = alarm::outlook(self);
        let mut scales = [ScaleRecords::default(); SCALES];
        let lengths = self.settings.block_milliseconds;
        for (slot, (scale, length)) in scales.iter_mut().zip(live.scales.iter().zip(lengths)) {
            let verdict = scale.verdict;
            *slot = ScaleRecords {
                evidence: scale.evidence(length),
                class: verdict.class,
                records: verdict.streak,
                stood: verdict.stood,
                missed: verdict.missed,
            };
        }
        let blocks = live.scales.first().map(|scale| scale.window.blocks()).unwrap_or_default();
        let knows_work = blocks.last().is_some_and(|block| block.aside.work.get().is_some());
        Some(Evidence {
            age_milliseconds: live.age(),
            capacity,
            envelope_bytes: envelope,
            returned_bytes: live.returned.from().map(bytes),
            class,
            slope_bytes_per_hour: slope,
            exhaustion_milliseconds: exhaustion.filter(|_| suspected),
            growth_bytes: growth,
            over_milliseconds: over,
            rising_milliseconds: rising,
            scales,
            agreeing,
            eligible,
            long,
            jumps: jumps.map(|jumps| {
                let [low, mid, high] = jumps.until.map(whole);
                JumpEvidence {
                    seen: jumps.expected.seen,
                    over_milliseconds: whole(jumps.over),
                    bytes: float_bytes(jumps.expected.size),
                    gap_milliseconds: whole(jumps.expected.gap * float(jumps.block)),
                    exhaustion_milliseconds: Interval { low, mid, high },
                }
            }),
            minutes_exhaustion_milliseconds: rise.map(|rise| rise.exhaustion),
            minutes_alarming: rise.is_some_and(|rise| rise.alarming),
            more_work: knows_work.then(|| works_more(blocks)),
            staircase_count: live.staircase_count,
            drift: live.drift.distance(),
        })
    }
}
