//! What policy says of leak detection.

use highwater_crds::ByteSize;
use serde::{Deserialize, Serialize};

/// Time scales at which floors are watched.
pub const SCALES: usize = 4;

/// A minute in milliseconds.
const MINUTE: u64 = 60_000;

/// All that can be tuned. Times are in milliseconds, sizes in bytes, shares in percent.
///
/// Every time scales with the others: a policy that divides all of them by sixty judges a
/// recording that runs sixty times as fast in the same way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// How often samples are expected. Slower ones are taken as they come.
    pub sample_milliseconds: u64,
    /// The bucket whose median stands for its samples; every block length is a multiple of it.
    pub bucket_milliseconds: u64,
    /// Lengths of the blocks whose floors are watched, rising.
    pub block_milliseconds: [u64; SCALES],
    /// So many expected samples without a number put decisions on hold.
    pub gap_samples: u32,
    /// Growth is not judged before this age: loading and first use grow by nature.
    pub warm_up_milliseconds: u64,
    /// An act is due only when memory may run out within this. A multiple of what a restart takes:
    /// drain, start and warm-up.
    pub horizon_milliseconds: u64,
    /// What a drain, a start and a warm-up take together: an act that comes later than so much
    /// before the end is too late.
    pub lead_milliseconds: u64,
    /// The score of the Mann-Kendall test, corrected for autocorrelation, from which growth is
    /// suspect.
    pub suspect_z: f64,
    /// Blocks in a row that must be suspect.
    pub suspect_blocks: u32,
    /// Least growth over a window in bytes,
    pub minimum_growth_bytes: u64,
    /// and in percent of the capacity; the larger counts.
    pub minimum_growth_percent: u32,
    /// Growth in the second half of a rise, in percent of that in the first half, below which it
    /// is levelling off.
    pub saturation_percent: u32,
    /// No act while the upper envelope is below this share of the capacity,
    pub act_above_percent: u32,
    /// nor below this where no healthy life says what is usual.
    pub act_above_percent_without_profile: u32,
    /// So far above the peak of healthy lives an act may be due.
    pub profile_margin_percent: u32,
    /// So far above what a pod declared to allocate beforehand growth counts, in percent
    pub declared_margin_percent: u32,
    /// and in bytes; the larger counts.
    pub declared_margin_bytes: u64,
    /// Scales that must agree before an act.
    pub act_scales: u32,
    /// Blocks since the onset from which a scale has a say in an act.
    pub act_blocks: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            sample_milliseconds: 10_000,
            bucket_milliseconds: MINUTE,
            block_milliseconds: [3 * MINUTE, 10 * MINUTE, 30 * MINUTE, 120 * MINUTE],
            gap_samples: 3,
            warm_up_milliseconds: 10 * MINUTE,
            horizon_milliseconds: 60 * MINUTE,
            lead_milliseconds: 10 * MINUTE,
            suspect_z: 2.6,
            suspect_blocks: 2,
            minimum_growth_bytes: 256 * ByteSize::MI,
            minimum_growth_percent: 1,
            saturation_percent: 35,
            act_above_percent: 75,
            act_above_percent_without_profile: 88,
            profile_margin_percent: 5,
            declared_margin_percent: 3,
            declared_margin_bytes: ByteSize::GI,
            act_scales: 2,
            act_blocks: 8,
        }
    }
}

impl Settings {
    /// Whether a detector can work with this; if not, which field is wrong and what is right.
    pub fn validate(&self) -> Result<(), String> {
        let fail = |text: String| Err(text);
        if self.sample_milliseconds == 0 {
            return fail("sampleMilliseconds is 0: it must be at least 1".to_owned());
        }
        if self.bucket_milliseconds < self.sample_milliseconds {
            return fail(format!(
                "bucketMilliseconds is {}: it must be at least sampleMilliseconds, {}",
                self.bucket_milliseconds, self.sample_milliseconds
            ));
        }
        let mut shorter = 0;
        for length in self.block_milliseconds {
            if length <= shorter || !length.is_multiple_of(self.bucket_milliseconds) {
                return fail(format!(
                    "blockMilliseconds has {length}: lengths must rise and be multiples of \
                     bucketMilliseconds, {}",
                    self.bucket_milliseconds
                ));
            }
            shorter = length;
        }
        if self.horizon_milliseconds < self.lead_milliseconds {
            return fail(format!(
                "horizonMilliseconds is {}: it must be at least leadMilliseconds, {}",
                self.horizon_milliseconds, self.lead_milliseconds
            ));
        }
        if !(self.suspect_z.is_finite() && self.suspect_z > 0.0) {
            return fail(format!("suspectZ is {}: it must be above 0", self.suspect_z));
        }
        if self.suspect_blocks == 0 || self.act_scales == 0 || self.gap_samples == 0 {
            return fail("suspectBlocks, actScales and gapSamples must be at least 1".to_owned());
        }
        for (name, percent) in [
            ("minimumGrowthPercent", self.minimum_growth_percent),
            ("saturationPercent", self.saturation_percent),
            ("actAbovePercent", self.act_above_percent),
            ("actAbovePercentWithoutProfile", self.act_above_percent_without_profile),
            ("profileMarginPercent", self.profile_margin_percent),
            ("declaredMarginPercent", self.declared_margin_percent),
        ] {
            if percent > 100 {
                return fail(format!("{name} is {percent}: it must be at most 100"));
            }
        }
        if self.act_above_percent > self.act_above_percent_without_profile {
            return fail(format!(
                "actAbovePercent is {}: it must be at most actAbovePercentWithoutProfile, {}",
                self.act_above_percent, self.act_above_percent_without_profile
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_hold() {
        assert_eq!(Settings::default().validate(), Ok(()));
    }

    #[test]
    fn what_cannot_work_is_named() {
        type Change = fn(&mut Settings);
        let cases: [(Change, &str); 9] = [
            (|s| s.sample_milliseconds = 0, "sampleMilliseconds"),
            (|s| s.bucket_milliseconds = 1, "bucketMilliseconds"),
            (|s| s.block_milliseconds[1] = 1000, "blockMilliseconds"),
            (|s| s.block_milliseconds[3] = 100_000_001, "blockMilliseconds"),
            (|s| s.horizon_milliseconds = 1, "horizonMilliseconds"),
            (|s| s.suspect_z = f64::NAN, "suspectZ"),
            (|s| s.act_scales = 0, "actScales"),
            (|s| s.act_above_percent = 101, "actAbovePercent"),
            (|s| s.act_above_percent = 90, "actAbovePercent"),
        ];
        for (change, name) in cases {
            let mut settings = Settings::default();
            change(&mut settings);
            let error = settings.validate().unwrap_err();
            assert!(error.contains(name), "{error}");
        }
    }
}
