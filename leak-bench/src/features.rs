//! What an act would go by, as a table that a model can be trained on and judged by.
//!
//! A row is a minute of a life in which the detector's own evidence lets fear that memory runs out
//! within the horizon: outside of these the rules cannot act either. Nothing in it is of later than
//! its minute, and none is chosen by how the life ends: a share of the time until then would tell.
//! A life without such a minute has one row without evidence, so that all lives are there.

use std::{fs::File, io::BufWriter, path::Path, process::ExitCode, sync::Arc};

use anyhow::Context;
use highwater_policy::leak::{
    Detector, Evidence, Finding, FindingKind, Interval, LeakClass, Sample, Settings,
};

use crate::{
    number::wide,
    pools::{Job, Made},
    recorded, run,
    series::Truth,
    side::Side,
};

const MINUTE: f64 = 60_000.0;
const HOUR: f64 = 60.0 * MINUTE;
/// What stands before the evidence. Times are in seconds of the life; what is empty did not happen.
const BEFORE: [&str; 10] =
    ["life", "pod", "pool", "family", "onset", "exhausted", "ended", "rules_suspect", "rules_act", "seconds"];

/// A life to be replayed.
struct Life {
    pod: String,
    pool: String,
    family: String,
    /// Onset and end of a leak in milliseconds.
    leak: Option<(u64, u64)>,
    samples: Vec<Sample>,
}

impl Life {
    /// `None` of what is neither a leak nor well.
    fn new(pod: String, pool: String, family: String, truth: Truth, samples: Vec<Sample>) -> Option<Self> {
        let leak = match truth {
            Truth::Benign => None,
            Truth::Leak { onset, exhausted } => Some((onset, exhausted)),
            Truth::Fragmentation { .. } | Truth::Unresolved { .. } => return None,
        };
        Some(Self { pod, pool, family, leak, samples })
    }

    fn made(Made { pool, series, .. }: Made) -> Option<Self> {
        let samples = series.points.iter().map(|point| point.sample(0, series.capacity)).collect();
        Self::new(series.pod, format!("{pool:?}"), series.family, series.truth, samples)
    }

    fn recorded(life: recorded::Life) -> Option<Self> {
        Self::new(life.program, "Recorded".to_owned(), life.kind, life.truth, life.samples)
    }
}

/// What the rules did in a life, and the minutes in which they could have acted.
#[derive(Default)]
struct Seen {
    suspect: Option<u64>,
    act: Option<u64>,
    moments: Vec<(u64, Evidence)>,
}

fn replay(life: &Life, settings: &Arc<Settings>) -> Seen {
    let mut detector = Detector::new(Arc::clone(settings));
    let mut seen = Seen::default();
    let (mut began, mut minute) = (None, 0);
    for sample in &life.samples {
        match detector.push(sample) {
            Some(Finding { kind: FindingKind::Act, at, .. }) => _ = seen.act.get_or_insert(at.0),
            Some(Finding { kind: FindingKind::Suspect, at, .. }) => _ = seen.suspect.get_or_insert(at.0),
            _ => {}
        }
        // The detector decides at the first sample of a minute that has a number.
        if sample.bytes.is_none() {
            continue;
        }
        let now = (sample.at.0 - *began.get_or_insert(sample.at.0)) / settings.bucket_milliseconds;
        if now == minute {
            continue;
        }
        minute = now;
        let evidence = detector.evidence(sample.at);
        let near = |e: &Evidence| e.earliest().is_some_and(|end| end < settings.horizon_milliseconds);
        seen.moments.extend(evidence.filter(near).map(|evidence| (sample.at.0, evidence)));
    }
    seen
}

/// Takes a number by its name; what is missing is no number.
type Put<'a> = &'a mut dyn FnMut(&str, f64);

fn flag(is: bool) -> f64 {
    if is { 1.0 } else { 0.0 }
}

fn minutes(name: &str, end: Option<Interval<u64>>, put: Put<'_>) {
    let part = |of: fn(Interval<u64>) -> u64| end.map_or(f64::NAN, |end| wide(of(end)) / MINUTE);
    put(&format!("{name}_low"), part(|end| end.low));
    put(&format!("{name}_mid"), part(|end| end.mid));
    put(&format!("{name}_high"), part(|end| end.high));
}

fn class(name: &str, is: LeakClass, put: Put<'_>) {
    put(&format!("{name}_step"), flag(is == LeakClass::Step));
    put(&format!("{name}_exponential"), flag(is == LeakClass::Exponential));
    put(&format!("{name}_saturating"), flag(is == LeakClass::Saturating));
}

/// The evidence as numbers: sizes as shares of the capacity, slopes as shares an hour, times in minutes
/// or as shares of the age. The age itself is not among them: made lives without a leak end after a day
/// or a week, and the others when they run out, so that it tells what would be told by nothing real.
fn numbers(e: &Evidence, put: Put<'_>) {
    let capacity = wide(e.capacity).max(1.0);
    let age = wide(e.age_milliseconds).max(MINUTE);
    put("envelope", e.envelope_bytes / capacity);
    put("returned", e.returned_bytes.map_or(f64::NAN, |bytes| wide(bytes) / capacity));
    put("slope_low", e.slope_bytes_per_hour.low / capacity);
    put("slope_mid", e.slope_bytes_per_hour.mid / capacity);
    put("slope_high", e.slope_bytes_per_hour.high / capacity);
    minutes("end", e.exhaustion_milliseconds, put);
    class("class", e.class, put);
    put("growth", e.growth_bytes / capacity);
    put("growth_of_room", e.growth_bytes / (capacity - e.envelope_bytes).max(0.001 * capacity));
    put("over", wide(e.over_milliseconds) / MINUTE);
    put("rising_of_age", wide(e.rising_milliseconds) / age);
    put("agreeing", f64::from(e.agreeing));
    put("eligible", f64::from(e.eligible));
    put("long", flag(e.long));
    let jump = |of: f64| if e.jumps.is_some() { of } else { f64::NAN };
    let jumps = e.jumps.unwrap_or_default();
    put("jumps", jump(f64::from(jumps.seen)));
    put("jump_over_of_age", jump(wide(jumps.over_milliseconds) / age));
    put("jump", jump(jumps.bytes / capacity));
    put("jump_gap", jump(wide(jumps.gap_milliseconds) / MINUTE));
    minutes("jump_end", e.jumps.map(|jumps| jumps.exhaustion_milliseconds), put);
    minutes("minutes_end", e.minutes_exhaustion_milliseconds, put);
    put("minutes_alarming", flag(e.minutes_alarming));
    put("more_work", e.more_work.map_or(f64::NAN, flag));
    put("staircase_an_hour", f64::from(e.staircase_count) / (age / HOUR));
    put("drift", e.drift);
    for (place, scale) in e.scales.iter().enumerate() {
        let said = scale.evidence;
        let mut put = |name: &str, value: f64| put(&format!("scale{place}_{name}"), value);
        let known = |value: f64| if said.blocks > 0 { value } else { f64::NAN };
        put("since_onset", known(f64::from(said.blocks_since_onset)));
        put("z", known(said.z));
        put("slope_low", known(said.slope_bytes_per_hour.low / capacity));
        put("slope_mid", known(said.slope_bytes_per_hour.mid / capacity));
        put("slope_high", known(said.slope_bytes_per_hour.high / capacity));
        put("growth", known(said.growth_bytes / capacity));
        put("second_half", known(said.second_half));
        put("agrees", flag(said.agrees));
        put("records", f64::from(scale.records));
        put("stood", f64::from(scale.stood));
        put("missed", known(f64::from(scale.missed)));
        class("class", scale.class, &mut put);
    }
}

fn names() -> Vec<String> {
    let mut names: Vec<String> = BEFORE.iter().map(|name| (*name).to_owned()).collect();
    numbers(&Evidence::default(), &mut |name, _| names.push(name.to_owned()));
    names
}

/// A life without its samples, and what was seen in it.
struct Replayed {
    told: [String; 3],
    times: [Option<u64>; 5],
    moments: Vec<(u64, Evidence)>,
}

fn replayed(life: Life, settings: &Arc<Settings>) -> Replayed {
    let Seen { suspect, act, moments } = replay(&life, settings);
    let ended = life.samples.last().map(|sample| sample.at.0);
    let times = [life.leak.map(|leak| leak.0), life.leak.map(|leak| leak.1), ended, suspect, act];
    Replayed { told: [life.pod, life.pool, life.family], times, moments }
}

/// The rows of a life, each after its number.
fn rows(number: usize, life: &Replayed) -> impl Iterator<Item = Vec<String>> {
    let seconds = |at: Option<u64>| at.map_or_else(String::new, |at| (wide(at) / 1000.0).to_string());
    let row = move |moment: Option<&(u64, Evidence)>| {
        let mut row = vec![number.to_string()];
        row.extend(life.told.clone());
        row.extend(life.times.map(seconds));
        row.push(seconds(moment.map(|(at, _)| *at)));
        let evidence = moment.map_or_else(Evidence::default, |(_, evidence)| *evidence);
        numbers(&evidence, &mut |_, value| {
            let known = moment.is_some() && value.is_finite();
            row.push(if known { format!("{value:.5e}") } else { String::new() });
        });
        row
    };
    let none = life.moments.is_empty().then(|| row(None));
    none.into_iter().chain(life.moments.iter().map(move |moment| row(Some(moment))))
}

/// Replays all lives of a side as first lives and writes the table.
pub(crate) fn write(
    path: &Path,
    side: Side,
    jobs: &[Job],
    settings: &Arc<Settings>,
) -> anyhow::Result<ExitCode> {
    let made = run::each(jobs, |job| Some(replayed(Life::made(job.make()?)?, settings)));
    let recorded = recorded::lives(&recorded::folder(), side)?;
    let recorded = run::each(&recorded, |life| Some(replayed(Life::recorded(life.clone())?, settings)));
    let file = File::create(path).with_context(|| format!("create {}", path.display()))?;
    let mut table = csv::Writer::from_writer(BufWriter::new(file));
    table.write_record(names())?;
    let (mut lives, mut written) = (0_usize, 0_usize);
    for (number, life) in made.iter().chain(&recorded).enumerate() {
        lives += 1;
        for row in rows(number, life) {
            written += 1;
            table.write_record(row)?;
        }
    }
    table.flush().with_context(|| format!("write {}", path.display()))?;
    println!("{}: {lives} lives of the {side} side in {written} rows", path.display());
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::series::{Point, Series};

    const GIB: u64 = 1 << 30;

    /// Twelve hours of a pod of 16 GiB, a sample every 10 s, at a level by the hour.
    fn life(level: impl Fn(f64) -> f64, leak: Option<(u64, u64)>) -> Life {
        let point = |i: u64| {
            let bytes = crate::number::whole(level(wide(i) / 360.0) * 1024.0) << 20;
            Point { at: i * 10_000, bytes: Some(bytes.min(16 * GIB)), work: None }.sample(0, 16 * GIB)
        };
        Life {
            pod: "pod".to_owned(),
            pool: "Synthetic".to_owned(),
            family: "made".to_owned(),
            leak,
            samples: (0..4320).map(point).collect(),
        }
    }

    fn place(name: &str) -> usize {
        names().iter().position(|n| n == name).unwrap()
    }

    #[test]
    fn a_leak_has_rows_near_its_end_and_the_rules_act_in_one_of_them() {
        let settings = Arc::new(Settings::default());
        let leak = life(|hour| 4.0 + (hour - 2.0).max(0.0) * 1.3, Some((7_200_000, 40_000_000)));
        let rows: Vec<Vec<String>> = rows(7, &replayed(leak, &settings)).collect();
        let at = |row: &Vec<String>, name: &str| row[place(name)].clone();
        assert!(rows.iter().all(|row| row.len() == names().len() && at(row, "life") == "7"));
        assert!(rows.iter().all(|row| at(row, "end_low").parse::<f64>().unwrap() < 60.0), "{rows:?}");
        let act = at(&rows[0], "rules_act");
        assert!(!act.is_empty() && rows.iter().any(|row| at(row, "seconds") == act), "{act}");
    }

    /// What is seen at a minute is the same, whatever comes after it.
    #[test]
    fn a_row_knows_nothing_of_later() {
        let settings = Arc::new(Settings::default());
        let whole = life(|hour| 4.0 + hour, None);
        let mut cut = life(|hour| 4.0 + hour, None);
        cut.samples.truncate(4200);
        let of = |life: &Life| replay(life, &settings).moments;
        let (whole, cut) = (of(&whole), of(&cut));
        assert!(cut.len() > 20 && whole.len() > cut.len(), "{} and {}", whole.len(), cut.len());
        assert_eq!(whole[..cut.len()], cut[..]);
    }

    #[test]
    fn a_level_life_has_one_row_without_evidence() {
        let life = replayed(life(|_| 8.0, None), &Arc::new(Settings::default()));
        let rows: Vec<Vec<String>> = rows(0, &life).collect();
        assert_eq!(rows.len(), 1);
        assert!(rows[0][place("seconds")..].iter().all(String::is_empty), "{rows:?}");
    }

    #[test]
    fn what_is_neither_well_nor_a_leak_is_left_out() {
        let series = Series {
            pod: "pod".to_owned(),
            family: "row".to_owned(),
            capacity: GIB,
            declared: None,
            points: Vec::new(),
            truth: Truth::Fragmentation { exhausted: None },
        };
        assert!(Life::made(Made { pool: crate::pools::Pool::Rows, series, earlier: None }).is_none());
    }
}
