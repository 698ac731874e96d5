//! Who holds what leaks: a confusion matrix over the coarse modes.

mod variants;

use std::sync::Arc;

use highwater_policy::{
    leak::{Detector, Framework, LeakMode, Sample, Settings, one_rank},
    time::Millis,
};

pub(crate) use self::variants::MODES;
use self::variants::{CAPACITY, Moment, VARIANTS, Variant, run};
use crate::{number::whole, report::Report, side::Side};

/// Runs of each variant.
const RUNS: usize = 20;

/// What a run was taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Named {
    /// What it is.
    pub truth: LeakMode,
    /// What it was said to be; `None` where nothing was said.
    pub said: Option<LeakMode>,
    /// The variant.
    pub variant: &'static str,
}

/// The last finding of a rank before its end: its mode, and its slope in bytes an hour.
fn watch(settings: &Arc<Settings>, rank: &[Moment], host: bool) -> (Option<LeakMode>, f64) {
    let mut detector = Detector::new(Arc::clone(settings));
    let mut last = (None, 0.0);
    for moment in rank {
        let bytes = if host { moment.host } else { moment.driver };
        let framework = if host {
            Framework::default()
        } else {
            Framework { allocated: moment.allocated, reserved: moment.reserved }
        };
        let finding = detector.push(&Sample {
            at: Millis(moment.at),
            bytes,
            capacity: Some(whole(CAPACITY)),
            work: Some(moment.work),
            host_bytes: moment.host,
            framework,
            replays: if host { None } else { moment.replays },
        });
        if let Some(finding) = finding.filter(|f| f.confidence > 0.0) {
            last = (finding.mode.map(|(mode, _)| mode), finding.slope_bytes_per_hour.mid);
        }
    }
    last
}

/// What the run of a variant is said to be, by the ranks' devices, or where these are silent by
/// the host.
fn name(settings: &Arc<Settings>, ranks: &[Vec<Moment>]) -> Option<LeakMode> {
    let seen: Vec<_> = ranks.iter().map(|rank| watch(settings, rank, false)).collect();
    let slopes: Vec<f64> = seen.iter().map(|(_, slope)| *slope).collect();
    if one_rank(&slopes).is_some() {
        return Some(LeakMode::OneRank);
    }
    let on_host = || ranks.iter().find_map(|rank| watch(settings, rank, true).0);
    seen.iter().find_map(|(mode, _)| *mode).or_else(on_host)
}

/// All runs of the variants of a side: those for tuning on the even one, those that were held back
/// on the odd one.
pub(crate) fn named(side: Side, quick: bool, settings: &Arc<Settings>) -> Vec<Named> {
    let of_side = |v: &&'static Variant| v.unseen == (side == Side::Odd);
    let runs = if quick { RUNS / 5 } else { RUNS };
    VARIANTS
        .iter()
        .filter(of_side)
        .flat_map(|variant| (0..runs).map(move |number| (variant, number)))
        .map(|(variant, number)| Named {
            truth: variant.mode,
            said: name(settings, &run(variant, number)),
            variant: variant.name,
        })
        .collect()
}

/// As it stands in tables.
fn shown(mode: LeakMode) -> &'static str {
    match mode {
        LeakMode::HeldByFramework => "held by the framework",
        LeakMode::OutsideFramework => "outside of it",
        LeakMode::AllocatorRetention => "allocator retention",
        LeakMode::PerReplay => "per replay",
        LeakMode::OneRank => "one rank",
        LeakMode::HostOrManaged => "host or managed",
    }
}

/// The confusion matrix, and how each variant fared.
pub(crate) fn tables(report: &mut Report, named: &[Named]) {
    let of = |truth: LeakMode| named.iter().filter(move |n| n.truth == truth);
    let mut columns = vec!["what it is"];
    columns.extend(MODES.map(shown));
    columns.push("nothing said");
    let row = |truth: LeakMode| {
        let mut row = vec![shown(truth).to_owned()];
        let said = MODES.map(Some).into_iter().chain([None]);
        row.extend(said.map(|said| of(truth).filter(|n| n.said == said).count().to_string()));
        row
    };
    report.table("Leak modes: what each run was said to be", &columns, &MODES.map(row));
    let mut rows: Vec<Vec<String>> = Vec::new();
    for truth in MODES {
        let mut variants: Vec<&str> = of(truth).map(|n| n.variant).collect();
        variants.dedup();
        rows.extend(variants.into_iter().map(|variant| {
            let runs = || of(truth).filter(|n| n.variant == variant);
            let right = runs().filter(|n| n.said == Some(truth)).count();
            vec![shown(truth).to_owned(), variant.to_owned(), format!("{right} of {}", runs().count())]
        }));
    }
    report.table("Leak modes by variant", &["mode", "variant", "named rightly"], &rows);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mode_has_as_many_variants_for_tuning_as_are_held_back() {
        for mode in MODES {
            for unseen in [false, true] {
                let of = VARIANTS.iter().filter(|v| v.mode == mode && v.unseen == unseen).count();
                assert_eq!(of, 3, "{mode:?}");
            }
        }
    }

    #[test]
    fn every_run_grows_on_the_device_or_on_the_host() {
        for variant in &VARIANTS {
            let ranks = run(variant, 0);
            let grows = |of: fn(&Moment) -> Option<u64>| {
                ranks.iter().any(|rank| {
                    let late: Vec<u64> = rank.iter().skip(800).filter_map(of).collect();
                    late.last() > late.first().map(|b| b + (2 << 30)).as_ref()
                })
            };
            assert!(grows(|m| m.driver) || grows(|m| m.host), "{variant:?}");
        }
    }
}
