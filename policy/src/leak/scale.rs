//! One time scale: its blocks, and what their floors say.

use serde::{Deserialize, Serialize};

use crate::leak::{
    Interval, LeakClass, ScaleEvidence, Settings,
    load::{came_down_idle, without_load},
    mode::per_replay,
    number::{count, float},
    shape,
    trend::{self, GRAIN, Point, Trend},
    window::{Aside, BLOCKS, Block, Filling, Window, float_bytes},
};

/// So many times the median residual must have grown: what is less may be noise.
const RESIDUALS: f64 = 4.0;
/// After so many times the usual time between records without one a rise has stalled.
const STALLED: f64 = 2.0;
/// An hour in milliseconds.
const HOUR: f64 = 3_600_000.0;

/// A scale of one life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Scale {
    /// Its last blocks.
    pub window: Window,
    /// The block that is being filled.
    pub filling: Filling,
    /// Its number.
    number: u32,
    /// The highest floor of this life so far.
    record: u32,
    /// What the last blocks said.
    pub verdict: Verdict,
}

/// What the floors of a scale say. Sizes are in units, slopes in units an hour.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Verdict {
    /// Blocks in the window.
    pub blocks: u32,
    /// Blocks since the onset.
    pub since_onset: u32,
    /// Score of the test.
    pub z: f64,
    /// Slope.
    pub slope: Interval<f64>,
    /// Growth since the onset.
    pub growth: f64,
    /// Growth in the second half by that of the first.
    pub second_half: f64,
    /// How it grows.
    pub class: LeakClass,
    /// Blocks that passed every gate and were records, with no fall between them: a rise in steps
    /// or with noise has no record in every block.
    pub streak: u32,
    /// Blocks since the first of these.
    pub stood: u32,
    /// Blocks since the last of these.
    pub missed: u32,
}

/// What a scale must know of the pod.
#[derive(Clone, Copy, Debug)]
pub(super) struct Context<'a> {
    pub settings: &'a Settings,
    /// Capacity in bytes.
    pub capacity: Option<u64>,
    /// What a floor must exceed to count, in bytes.
    pub floor_above: u64,
    /// How far samples are apart, in milliseconds.
    pub cadence: u64,
}

impl Scale {
    /// Closes the block that is being filled if `number` is past it; whether there was a block.
    pub(super) fn advance(&mut self, number: u32, length: u64, aside: Aside, context: Context<'_>) -> bool {
        if number == self.number {
            return false;
        }
        let bucket = context.settings.bucket_milliseconds.max(context.cadence).max(1);
        let least = u32::try_from(length / bucket / 2).unwrap_or(u32::MAX);
        let closed = self.filling.close(self.number, aside, least);
        self.number = number;
        // A scale that is hardly longer than the samples are apart says nothing.
        let Some(block) = closed.filter(|_| length >= context.cadence.saturating_mul(2)) else {
            self.miss();
            return false;
        };
        let past = u32::try_from(BLOCKS).unwrap_or(0).saturating_mul(2);
        if self.window.blocks().first().is_some_and(|b| block.number.saturating_sub(b.number) > past) {
            self.window = Window::default();
        }
        self.window.push(block);
        let is_record = f64::from(block.floor) >= f64::from(self.record) + GRAIN;
        let below = f64::from(self.record) - f64::from(block.floor);
        self.record = self.record.max(block.floor);
        let counts = float_bytes(f64::from(block.floor)) > float(context.floor_above);
        // Looking is only worth it where something may have begun or may be over.
        let said = if counts && (is_record || self.verdict.streak > 0) {
            self.judge(length, below, context)
        } else {
            Said::Nothing
        };
        let verdict = &mut self.verdict;
        match said {
            Said::Rises if is_record => {
                verdict.streak = verdict.streak.saturating_add(1);
                verdict.stood = verdict.stood.saturating_add(1);
                verdict.missed = 0;
            }
            Said::Rises | Said::Stands if verdict.streak > 0 => {
                verdict.stood = verdict.stood.saturating_add(1);
                verdict.missed = verdict.missed.saturating_add(1);
            }
            _ => self.miss(),
        }
        true
    }

    fn miss(&mut self) {
        (self.verdict.streak, self.verdict.stood) = (0, 0);
        self.verdict.missed = self.verdict.missed.saturating_add(1);
    }

    /// What the blocks say, the last of them being so far below the record.
    fn judge(&mut self, length: u64, below: f64, context: Context<'_>) -> Said {
        let blocks = self.window.blocks();
        let mut raw = [(0.0, 0.0); BLOCKS];
        for (slot, block) in raw.iter_mut().zip(blocks) {
            *slot = (f64::from(block.number), f64::from(block.floor));
        }
        let from = trend::after_shift(raw.get(..blocks.len()).unwrap_or_default());
        let raw = raw.get(from..blocks.len()).unwrap_or_default();
        let mut apart = [(0.0, 0.0); BLOCKS];
        let apart = without_load(blocks, &mut apart).and_then(|n| apart.get(from..n));
        let Some(plain) = trend::measure(raw) else { return Said::Nothing };
        // Where memory follows the load, it must rise without it as well, and that is its slope.
        let (trend, points) = match apart.and_then(|points| Some((trend::measure(points)?, points))) {
            Some((trend, points)) => (trend, points),
            None => (plain, raw),
        };
        let since = points.get(points.len().saturating_sub(trend.since_onset)..).unwrap_or_default();
        let hourly = |slope: f64| slope * HOUR / float(length.max(1));
        let both = |of: fn(&Trend, Context<'_>) -> bool| of(&plain, context) && of(&trend, context);
        let said = if came_down_idle(blocks, trend.growth) || below > fallen(&trend) {
            Said::Nothing
        } else if both(rises) {
            Said::Rises
        } else if both(stands) {
            Said::Stands
        } else {
            Said::Nothing
        };
        let class = match (said != Said::Nothing, per_replay(blocks, trend.growth)) {
            (false, _) => self.verdict.class,
            (true, true) => LeakClass::PerReplay,
            (true, false) => shape::class(since, trend.second_half),
        };
        self.verdict = Verdict {
            blocks: u32::try_from(blocks.len()).unwrap_or(0),
            since_onset: u32::try_from(trend.since_onset).unwrap_or(0),
            z: trend.z,
            slope: Interval {
                low: hourly(trend.slope.low),
                mid: hourly(trend.slope.mid.max(mean_slope(since, class))),
                high: hourly(trend.slope.high.max(mean_slope(since, class))),
            },
            growth: trend.growth,
            second_half: trend.second_half,
            class,
            ..self.verdict
        };
        said
    }

    /// What is told of it.
    pub(super) fn evidence(&self, block_milliseconds: u64) -> ScaleEvidence {
        let verdict = self.verdict;
        let slope = verdict.slope;
        ScaleEvidence {
            block_milliseconds,
            blocks: verdict.blocks,
            blocks_since_onset: verdict.since_onset,
            z: verdict.z,
            slope_bytes_per_hour: Interval {
                low: float_bytes(slope.low),
                mid: float_bytes(slope.mid),
                high: float_bytes(slope.high),
            },
            growth_bytes: float_bytes(verdict.growth),
            second_half: verdict.second_half,
            agrees: verdict.agrees(),
        }
    }
}

impl Verdict {
    /// Until a rise that goes faster and faster has grown by so many units, in hours; `None` of
    /// one that does not seem to. With the second half of a time T having grown q times as much as the first, it
    /// doubles in D = T / 2 log2 q, and its slope at the end follows from what the second half
    /// grew.
    pub(super) fn accelerated(&self, room: f64, block_hours: f64) -> Option<f64> {
        let q = self.second_half;
        if q <= 1.2 {
            return None;
        }
        let span = f64::from(self.since_onset.saturating_sub(1)) * block_hours;
        // Heights are medians of quarters, so that three quarters of the span lie between them.
        let rate = q.ln() / (span * 0.375);
        let slope = self.growth * q / (1.0 + q) * rate / (1.0 - 1.0 / q);
        (rate > 0.0 && slope > 0.0).then(|| (1.0 + room * rate / slope).ln() / rate)
    }

    /// It rises, and has not stalled: the last record is not much older than records are apart.
    pub(super) fn agrees(&self) -> bool {
        let apart = f64::from(self.stood) / f64::from(self.streak.max(1));
        self.streak > 0 && f64::from(self.missed) <= STALLED * apart + 1.0
    }
}

/// How far peaks stood above floors, but for the one farthest: once is no habit.
pub(super) fn burst(blocks: &[Block]) -> f64 {
    let (mut first, mut second) = (0.0, 0.0);
    for block in blocks {
        let burst = f64::from(block.peak) - f64::from(block.floor);
        if burst >= first {
            (first, second) = (burst, first);
        } else if burst > second {
            second = burst;
        }
    }
    second
}

/// The slope from the first to the last point where few steps make the pairs' median blind.
fn mean_slope(points: &[Point], class: LeakClass) -> f64 {
    match (points.first(), points.last()) {
        (Some(a), Some(b)) if class == LeakClass::Step && b.0 > a.0 => (b.1 - a.1) / (b.0 - a.0),
        _ => f64::NEG_INFINITY,
    }
}

/// What the blocks say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Said {
    /// A rise that passes every gate.
    Rises,
    /// A rise that was there is not over.
    Stands,
    /// Nothing.
    Nothing,
}

/// So far below the record a rise is over, in units.
fn fallen(trend: &Trend) -> f64 {
    (trend.growth / 4.0).max(RESIDUALS * trend.residual)
}

/// Whether a rise that was there is not over: the same with less certainty.
fn stands(trend: &Trend, context: Context<'_>) -> bool {
    trend.z > context.settings.suspect_z / 2.0
        && trend.low >= 0.0
        && trend.second_half >= f64::from(context.settings.saturation_percent) / 200.0
}

/// Whether a trend is one, large enough, and goes on.
fn rises(trend: &Trend, context: Context<'_>) -> bool {
    let settings = context.settings;
    let share =
        context.capacity.map_or(0.0, |c| float(c) * f64::from(settings.minimum_growth_percent) / 100.0);
    let least =
        (share.max(float(settings.minimum_growth_bytes)) / float_bytes(1.0)).max(RESIDUALS * trend.residual);
    trend.z > settings.suspect_z
        && trend.lowest >= 0.0
        && trend.growth > least
        && trend.second_half >= f64::from(settings.saturation_percent) / 100.0
        && count(trend.since_onset) >= 4.0
}
