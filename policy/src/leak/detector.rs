//! The detector of one pod on one device.

use std::sync::Arc;

use crate::{
    leak::{
        Finding, LifeEnd, Profile, Sample, Settings,
        alarm::{self, Alarm},
        jumps::Jumps,
        life::{Counter, Returned},
        profile::Life,
        rise::Minutes,
        scale::{Context, Scale},
        settings::SCALES,
        signals::{Drift, Staircase},
        window::{Aside, Bucket, Envelope, Maybe, bytes, units},
    },
    time::Millis,
};

use serde::{Deserialize, Serialize};

/// A capacity that becomes so many times as large or as small is another device or partition.
const OTHER_DEVICE: u64 = 2;
/// The scale whose floors tell of jumps.
pub(super) const JUMP_SCALE: usize = 0;
/// The scale whose floors tell whether a rise was undone.
const RETURN_SCALE: usize = 1;

/// Watches one pod on one device through all its lives.
#[derive(Clone, Debug)]
pub struct Detector {
    pub(super) settings: Arc<Settings>,
    pub(super) profile: Profile,
    pub(super) live: Live,
}

/// What is known of the present life.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Live {
    /// Times are milliseconds on the clock of the samples.
    began: Option<u64>,
    /// When the last sample was,
    pub last: Option<u64>,
    /// and the last with a number.
    last_number: Option<u64>,
    /// How far samples are apart, in milliseconds, smoothed.
    cadence: u64,
    /// No decision before this.
    hold_until: u64,
    pub capacity: Option<u64>,
    pub declared: Option<u64>,
    bucket_number: u64,
    bucket: Bucket,
    pub scales: [Scale; SCALES],
    pub envelope: Envelope,
    pub minutes: Minutes,
    pub jumps: Jumps,
    pub life: Life,
    pub returned: Returned,
    work: Counter,
    replays: Counter,
    aside: Aside,
    pub alarm: Alarm,
    staircase: Staircase,
    pub staircase_fired: bool,
    pub staircase_count: u32,
    pub drift: Drift,
}

impl Detector {
    /// One that knows nothing yet.
    pub fn new(settings: Arc<Settings>) -> Self {
        Self::with_profile(settings, Profile::default())
    }

    /// One that knows what healthy lives of the workload look like.
    pub fn with_profile(settings: Arc<Settings>, prior: Profile) -> Self {
        Self { settings, profile: prior, live: Live::default() }
    }

    /// Takes a sample. There is a finding only when what is thought of the pod changes. A sample
    /// that is not later than the last is dropped.
    pub fn push(&mut self, sample: &Sample) -> Option<Finding> {
        let now = sample.at.0;
        if self.live.last.is_some_and(|last| now <= last) {
            return None;
        }
        self.take_capacity(sample.capacity);
        self.live.pace(&self.settings, now, sample.bytes.is_some());
        let bytes = sample.bytes?;
        let value = units(bytes);
        let live = &mut self.live;
        live.staircase_fired = live.staircase.push(bytes);
        live.staircase_count = live.staircase_count.saturating_add(u32::from(live.staircase_fired));
        live.drift.push(value);
        let began = *live.began.get_or_insert(now);
        let number = now.saturating_sub(began) / self.settings.bucket_milliseconds.max(1);
        let closed = number != live.bucket_number && self.close_bucket(number);
        let live = &mut self.live;
        live.bucket.push(value);
        live.work.push(sample.work);
        live.replays.push(sample.replays.map(super::number::float));
        let keep = |old: &mut Maybe, new: Option<u64>| *old = new.map_or(*old, |b| Maybe::of(Some(b)));
        keep(&mut live.aside.host, sample.host_bytes);
        keep(&mut live.aside.allocated, sample.framework.allocated);
        keep(&mut live.aside.reserved, sample.framework.reserved);
        if closed && now >= live.hold_until { alarm::decide(self, sample.at) } else { None }
    }

    /// A new life begins: a restart, another image, another partition of the device.
    pub fn begin_life(&mut self, now: Millis, ended: LifeEnd) {
        let slope = self.live.alarm.slope();
        self.profile.ended(self.live.life, ended, slope);
        self.live = Live {
            began: Some(now.0),
            last: self.live.last,
            cadence: self.live.cadence,
            capacity: self.live.capacity,
            declared: self.live.declared,
            ..Live::default()
        };
    }

    /// What the pod declares to allocate beforehand, in bytes.
    pub fn declared(&mut self, bytes: Option<u64>) {
        self.live.declared = bytes;
    }

    /// What is thought of the pod at present, by the numbers of now; `None` where nothing is
    /// suspected.
    pub fn present(&self, now: Millis) -> Option<Finding> {
        alarm::present(self, now)
    }

    /// Whether a suspicion stands. It may end without a finding: what was seen of another device says
    /// nothing of this one.
    pub fn suspects(&self) -> bool {
        self.live.alarm.is_raised()
    }

    /// Whether enough was seen since the last gap to decide anything.
    pub(super) fn decides(&self, now: Millis) -> bool {
        now.0 >= self.live.hold_until
    }

    /// What healthy lives look like.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Where capacity changes much, what was seen is of another device.
    fn take_capacity(&mut self, capacity: Option<u64>) {
        let Some(new) = capacity.filter(|c| *c > 0) else { return };
        if let Some(old) = self.live.capacity.replace(new)
            && (new / OTHER_DEVICE >= old || old / OTHER_DEVICE >= new)
        {
            let (last, declared) = (self.live.last, self.live.declared);
            self.live = Live { last, declared, capacity: Some(new), ..Live::default() };
        }
    }

    /// Closes the bucket that is being filled; whether there was anything in it.
    fn close_bucket(&mut self, number: u64) -> bool {
        let settings = &*self.settings;
        let live = &mut self.live;
        let closing = std::mem::replace(&mut live.bucket_number, number);
        let Some((median, peak)) = live.bucket.close() else { return false };
        let age = closing.saturating_add(1).saturating_mul(settings.bucket_milliseconds);
        live.life.push(age, bytes(median), bytes(peak));
        live.envelope.push(peak);
        let (work, replays) = (live.work.take(), live.replays.take());
        let warm = age > settings.warm_up_milliseconds;
        if warm {
            live.minutes.push(u32::try_from(closing).unwrap_or(u32::MAX), median);
        }
        let context = Context {
            settings,
            capacity: live.capacity,
            floor_above: alarm::declared_bar(settings, live.declared, live.capacity),
            cadence: live.cadence,
        };
        for (place, (scale, length)) in live.scales.iter_mut().zip(settings.block_milliseconds).enumerate() {
            let block = |bucket: u64| {
                let number = bucket.saturating_mul(settings.bucket_milliseconds) / length.max(1);
                u32::try_from(number).unwrap_or(u32::MAX)
            };
            if warm {
                // The closed bucket may be of a later block than the one before.
                scale.advance(block(closing), length, live.aside, context);
                scale.filling.done(work, replays);
                scale.filling.push(median, peak);
            }
            if !scale.advance(block(number), length, live.aside, context) {
                continue;
            }
            let least = units(alarm::least_growth(settings, live.capacity));
            match (place, scale.window.blocks().last()) {
                (JUMP_SCALE, Some(block)) => live.jumps.push(block.number, block.floor, least),
                (RETURN_SCALE, Some(block)) => live.returned.push(block.floor, block.peak, least),
                _ => {}
            }
        }
        true
    }
}

impl Live {
    /// Takes note of when a sample came. After a gap decisions wait for a whole short block.
    fn pace(&mut self, settings: &Settings, now: u64, number: bool) {
        let expected = settings.sample_milliseconds;
        if let Some(last) = self.last {
            let passed = (now - last).min(self.cadence.max(expected).saturating_mul(4));
            let cadence = self.cadence.max(expected);
            // A sixteenth of the difference: a few late samples do not change it.
            self.cadence = if passed >= cadence {
                cadence.saturating_add((passed - cadence) / 16)
            } else {
                cadence - (cadence - passed) / 16
            }
            .max(1);
        } else {
            self.cadence = self.cadence.max(expected);
        }
        self.last = Some(now);
        if number {
            let gap = self.cadence.max(expected).saturating_mul(u64::from(settings.gap_samples) + 1);
            if self.last_number.is_some_and(|last| now - last > gap) {
                let [shortest, ..] = settings.block_milliseconds;
                self.hold_until = now.saturating_add(shortest);
            }
            self.last_number = Some(now);
        }
    }

    /// Age of this life in milliseconds.
    pub(super) fn age(&self) -> u64 {
        self.last.unwrap_or(0).saturating_sub(self.began.unwrap_or(0))
    }
}
