//! What a policy says of leaks, as settings of the detector.

use highwater_crds::{ActionType, Leaks};

use crate::leak::{SCALES, Settings};

impl Settings {
    /// The defaults with what a policy says over them.
    ///
    /// # Errors
    /// Which field is wrong and what is right; the API server refuses the same beforehand.
    pub fn of(leaks: &Leaks) -> Result<Self, String> {
        let helps = |act: &ActionType| ActionType::AGAINST_LEAKS.contains(act);
        if let Some(act) = leaks.actions.iter().map(|action| action.type_).find(|act| !helps(act)) {
            return Err(format!(
                "actions has {act:?}: it brings back nothing that leaked; only Signal, Hook and Restart can help"
            ));
        }
        let mut settings = Self::default();
        for (name, given, field) in [
            ("sampleMilliseconds", leaks.sample_milliseconds, &mut settings.sample_milliseconds),
            ("bucketMilliseconds", leaks.bucket_milliseconds, &mut settings.bucket_milliseconds),
            ("warmUpMilliseconds", leaks.warm_up_milliseconds, &mut settings.warm_up_milliseconds),
            ("horizonMilliseconds", leaks.horizon_milliseconds, &mut settings.horizon_milliseconds),
            ("leadMilliseconds", leaks.lead_milliseconds, &mut settings.lead_milliseconds),
        ] {
            if let Some(given) = given {
                *field = natural(name, given)?;
            }
        }
        for (name, given, field) in [
            ("minimumGrowthPercent", leaks.minimum_growth_percent, &mut settings.minimum_growth_percent),
            ("actAbovePercent", leaks.act_above_percent, &mut settings.act_above_percent),
            (
                "actAbovePercentWithoutProfile",
                leaks.act_above_percent_without_profile,
                &mut settings.act_above_percent_without_profile,
            ),
            ("profileMarginPercent", leaks.profile_margin_percent, &mut settings.profile_margin_percent),
        ] {
            if let Some(given) = given {
                *field = natural(name, given)?;
            }
        }
        if let Some(size) = leaks.minimum_growth_size {
            settings.minimum_growth_bytes = size.bytes();
        }
        if leaks.block_milliseconds.is_empty() {
            let bucket = settings.bucket_milliseconds;
            if bucket == 0 || !settings.block_milliseconds.iter().all(|block| block.is_multiple_of(bucket)) {
                // What is named is what was written, and not the blocks, which were not.
                return Err(format!(
                    "bucketMilliseconds is {bucket}: it does not divide the default blocks of 3, 10, 30 and 120 \
                     minutes; write a divisor of 60000 such as 30000, or set blockMilliseconds too"
                ));
            }
        } else {
            let blocks: Vec<u64> = leaks
                .block_milliseconds
                .iter()
                .map(|b| natural("blockMilliseconds", *b))
                .collect::<Result<_, _>>()?;
            settings.block_milliseconds = blocks.try_into().map_err(|given: Vec<u64>| {
                format!("blockMilliseconds has {} lengths: give {SCALES}, rising", given.len())
            })?;
        }
        settings.validate()?;
        Ok(settings)
    }
}

fn natural<T: TryFrom<i32>>(name: &str, given: i32) -> Result<T, String> {
    T::try_from(given).map_err(|_| format!("{name} is {given}: it must not be negative"))
}

#[cfg(test)]
mod tests {
    use highwater_crds::ByteSize;
    use serde_json::{Value, json};

    use super::*;

    fn settings(leaks: Value) -> Result<Settings, String> {
        Settings::of(&serde_json::from_value(leaks).unwrap())
    }

    #[test]
    fn what_is_absent_is_as_by_default() {
        assert_eq!(settings(json!({})), Ok(Settings::default()));
    }

    #[test]
    fn every_field_reaches_the_detector() {
        let leaks = json!({
            "sampleMilliseconds": 100, "bucketMilliseconds": 1000,
            "blockMilliseconds": [3000, 10_000, 30_000, 120_000], "warmUpMilliseconds": 10_000,
            "horizonMilliseconds": 60_000, "leadMilliseconds": 10_000, "minimumGrowthSize": "64Mi",
            "minimumGrowthPercent": 2, "actAbovePercent": 60, "actAbovePercentWithoutProfile": 70,
            "profileMarginPercent": 7,
        });
        let expected = Settings {
            sample_milliseconds: 100,
            bucket_milliseconds: 1000,
            block_milliseconds: [3000, 10_000, 30_000, 120_000],
            warm_up_milliseconds: 10_000,
            horizon_milliseconds: 60_000,
            lead_milliseconds: 10_000,
            minimum_growth_bytes: 64 * ByteSize::MI,
            minimum_growth_percent: 2,
            act_above_percent: 60,
            act_above_percent_without_profile: 70,
            profile_margin_percent: 7,
            ..Settings::default()
        };
        assert_eq!(settings(leaks), Ok(expected));
    }

    #[test]
    fn what_cannot_work_is_named() {
        for (leaks, expected) in [
            (json!({"sampleMilliseconds": -1}), "sampleMilliseconds is -1"),
            (
                json!({"bucketMilliseconds": 45_000}),
                "bucketMilliseconds is 45000: it does not divide the default",
            ),
            (json!({"bucketMilliseconds": 0}), "bucketMilliseconds is 0"),
            (json!({"bucketMilliseconds": 5000}), "bucketMilliseconds is 5000: it must be at least sample"),
            (json!({"blockMilliseconds": [60_000]}), "blockMilliseconds has 1 lengths: give 4"),
            (json!({"blockMilliseconds": [60_000, 60_000, 120_000, 180_000]}), "blockMilliseconds has 60000"),
            (json!({"horizonMilliseconds": 1000}), "horizonMilliseconds is 1000"),
            (json!({"actAbovePercent": 90}), "actAbovePercent is 90"),
            (json!({"actions": [{"type": "Restart"}, {"type": "Unready"}]}), "actions has Unready"),
        ] {
            let error = settings(leaks).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
