//! What healthy lives of a workload look like by the age of the pod.
//!
//! A few lives are kept as they were rather than as a sketch: a workload that is restarted daily
//! has seen seven in a week, of which exact peaks say more than quantiles, and old ones should be
//! forgotten.

use serde::{Deserialize, Serialize};

use crate::leak::{Settings, number::float};

/// Ages at which a life is remembered, in minutes.
pub const AGES: [u32; 6] = [5, 15, 60, 240, 720, 1440];
/// Healthy lives that are remembered, the latest.
const LIVES: usize = 8;
/// Beyond a day of age a life has shown what a day brings.
const DAY: u64 = 86_400_000;
/// So many healthy lives show how far they differ by themselves.
const ENOUGH: usize = 3;

/// How a life ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum LifeEnd {
    /// By a rollout, a scale-down or the like: it becomes part of the profile.
    Healthy,
    /// Restarted because it leaked.
    LeakAct,
    /// Restarted by a breaker.
    Breaker,
    /// Out of memory.
    OutOfMemory,
    /// It is not known: it neither teaches nor warns.
    #[default]
    Unknown,
}

/// The profile of a workload.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Profile {
    lives: Vec<Life>,
    /// Lives that ended badly since the last healthy one.
    bad: u32,
    /// Slopes of the lives that ended by a leak act since then, in bytes an hour: the last two.
    slopes: [Option<f64>; 2],
    /// Restarts since then after which the slope was no lower.
    without_effect: u32,
}

/// What is remembered of one life; sizes in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Life {
    /// Its length in milliseconds.
    pub milliseconds: u64,
    /// Its greatest use.
    pub peak: u64,
    /// Its floor at each of [`AGES`]; `None` beyond its length.
    pub floors: [Option<u64>; AGES.len()],
    /// Its greatest use up to each of [`AGES`].
    pub peaks: [Option<u64>; AGES.len()],
}

impl Life {
    /// Takes the median and the peak of a bucket, in bytes, at an age in milliseconds.
    pub(super) fn push(&mut self, age: u64, median: u64, peak: u64) {
        self.milliseconds = self.milliseconds.max(age);
        self.peak = self.peak.max(peak);
        for ((limit, floor), top) in AGES.iter().zip(&mut self.floors).zip(&mut self.peaks) {
            if floor.is_none() && age >= u64::from(*limit) * 60_000 {
                (*floor, *top) = (Some(median), Some(self.peak));
            }
        }
    }
}

impl Profile {
    /// A profile with one healthy life.
    pub fn of(life: Life) -> Self {
        let mut profile = Self::default();
        profile.learn(life);
        profile
    }

    /// Adds a healthy life; of more than the latest few the oldest is forgotten.
    pub fn learn(&mut self, life: Life) {
        if self.lives.len() >= LIVES {
            self.lives.remove(0);
        }
        self.lives.push(life);
        (self.bad, self.slopes, self.without_effect) = (0, [None; 2], 0);
    }

    /// Takes note of how a life ended, and of its last slope in bytes an hour if it was suspect.
    pub(super) fn ended(&mut self, life: Life, ended: LifeEnd, slope: Option<f64>) {
        match ended {
            LifeEnd::Healthy => {
                if life.peaks.iter().any(Option::is_some) {
                    self.learn(life);
                }
            }
            LifeEnd::LeakAct | LifeEnd::Breaker | LifeEnd::OutOfMemory => {
                self.bad = self.bad.saturating_add(1);
                if let Some(slope) = slope {
                    let [_, before] = self.slopes;
                    if before.is_some_and(|before| slope >= 0.8 * before) {
                        self.without_effect = self.without_effect.saturating_add(1);
                    }
                    self.slopes = [before, Some(slope)];
                }
            }
            LifeEnd::Unknown => {}
        }
    }

    /// The greatest use of the healthy lives in bytes.
    pub fn peak(&self) -> Option<u64> {
        self.lives.iter().map(|l| l.peak).max()
    }

    /// Healthy lives that are remembered.
    pub fn lives(&self) -> &[Life] {
        &self.lives
    }

    /// Lives that ended by a leak act, a breaker or out of memory since the last healthy one.
    pub fn ended_badly(&self) -> u32 {
        self.bad
    }

    /// Restarts since the last healthy life after which the slope was no lower.
    pub fn restarts_without_effect(&self) -> u32 {
        self.without_effect
    }

    /// Slope of the last life since then that was suspect and ended badly, in bytes an hour.
    pub fn last_slope(&self) -> Option<f64> {
        let [_, last] = self.slopes;
        last
    }

    /// The greatest use of healthy lives up to this age in milliseconds, in bytes; `None` if none
    /// was nearly as old.
    pub fn peak_at(&self, age: u64) -> Option<u64> {
        let after = AGES.iter().position(|limit| u64::from(*limit) * 60_000 >= age)?;
        self.lives.iter().filter_map(|l| l.peaks.get(after).copied().flatten()).max()
    }

    /// What a life of this age must exceed to be unlike the healthy ones, in bytes. `None` where
    /// no healthy life was old enough to compare: a cache that fills for hours is not judged by
    /// a life of minutes.
    pub(super) fn bar(&self, settings: &Settings, age: u64, capacity: u64) -> Option<f64> {
        let needed = age.min(DAY) / 3 * 2;
        let usual = float(self.peak().filter(|_| self.lives.iter().any(|l| l.milliseconds >= needed))?);
        let most = f64::from(settings.profile_margin_percent) / 100.0;
        let mut margin = most;
        if self.lives.len() >= ENOUGH {
            let least = float(self.lives.iter().map(|l| l.peak).min().unwrap_or(0));
            margin = ((usual - least) / usual.max(1.0) * 2.0).clamp(most * 0.4, most);
        }
        Some(above(usual, margin, float(capacity)))
    }
}

/// What is clearly above a use: by a share of it, or by half of what is left where that is less.
pub(super) fn above(usual: f64, share: f64, capacity: f64) -> f64 {
    (usual * (1.0 + share)).min(f64::midpoint(usual, capacity.max(usual)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: u64 = 3_600_000;
    const GI: u64 = 1 << 30;

    fn life(hours: u64, peak: u64) -> Life {
        let mut life = Life::default();
        (1..=hours * 60).for_each(|minute| life.push(minute * 60_000, peak / 2, peak));
        life
    }

    fn bar(profile: &Profile, age: u64) -> Option<u64> {
        profile.bar(&Settings::default(), age, 100 * GI).map(|b| crate::leak::number::whole(b) / GI)
    }

    #[test]
    fn a_life_is_remembered_by_age() {
        let life = life(5, 40 * GI);
        assert_eq!(life.peaks, [Some(40 * GI), Some(40 * GI), Some(40 * GI), Some(40 * GI), None, None]);
        assert_eq!(Profile::of(life).peak_at(2 * HOUR), Some(40 * GI));
        assert_eq!(Profile::of(life).peak_at(8 * HOUR), None);
    }

    #[test]
    fn the_bar_is_a_margin_above_healthy_lives_of_that_age() {
        let profile = Profile::of(life(12, 60 * GI));
        assert_eq!(bar(&profile, 10 * HOUR), Some(63));
        assert_eq!(bar(&profile, 20 * HOUR), None, "it was never so old");
        assert_eq!(bar(&Profile::of(life(16, 60 * GI)), 100 * HOUR), Some(63), "a day shows enough");
        assert_eq!(bar(&Profile::of(life(12, 96 * GI)), HOUR), Some(98), "half of what is left");
        assert_eq!(bar(&Profile::default(), HOUR), None);
    }

    #[test]
    fn alike_lives_narrow_the_margin() {
        let mut profile = Profile::default();
        for _ in 0..3 {
            profile.learn(life(12, 60 * GI));
        }
        assert_eq!(bar(&profile, HOUR), Some(61));
    }

    #[test]
    fn a_leaking_life_does_not_teach_but_warns() {
        let mut profile = Profile::default();
        profile.ended(life(12, 90 * GI), LifeEnd::OutOfMemory, Some(1e9));
        assert_eq!((profile.peak(), profile.ended_badly()), (None, 1));
        profile.ended(life(12, 90 * GI), LifeEnd::LeakAct, Some(1e9));
        profile.ended(life(12, 90 * GI), LifeEnd::LeakAct, Some(0.9e9));
        assert_eq!(profile.restarts_without_effect(), 2);
        profile.ended(life(12, 50 * GI), LifeEnd::Healthy, None);
        assert_eq!((profile.peak(), profile.ended_badly()), (Some(50 * GI), 0));
        assert_eq!(profile.restarts_without_effect(), 0);
        profile.ended(life(1, 90 * GI), LifeEnd::Unknown, None);
        assert_eq!(profile.peak(), Some(50 * GI));
    }

    #[test]
    fn only_the_latest_lives_are_kept() {
        let mut profile = Profile::default();
        (1..=20).rev().for_each(|gi| profile.learn(life(1, gi * GI)));
        assert_eq!((profile.lives().len(), profile.peak()), (8, Some(8 * GI)));
        assert!(serde_json::to_vec(&profile).unwrap().len() < 32 << 10);
    }
}
