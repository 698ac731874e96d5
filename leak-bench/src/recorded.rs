//! Programs that ran on a real GPU, recorded by `e2e/real-gpu/leaks.sh`: found, left alone, and the mode named.
//!
//! The folder holds `series-*.csv.gz`, `framework-*.csv.gz` and `labels-*.csv`; without it, nothing of this is replayed.
//! Beside the driver's number the detector is given here what the framework says of itself.

use std::{
    collections::BTreeMap,
    fs::File,
    io::Read,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context, anyhow};
use flate2::read::GzDecoder;
use highwater_policy::{
    leak::{Detector, Finding, FindingKind, Framework, LeakMode, Sample, Settings, one_rank},
    time::Millis,
};

use crate::{
    interval::share,
    number::{real, whole, wide},
    report::{Goal, Report, bounded, plain},
    score::LEAD,
    series::Truth,
    side::Side,
};

/// A process on a device: the name of its program, and its rank.
type Key = (String, String);

/// What is true of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Label {
    /// The leak mode, or the kind of right use.
    kind: String,
    /// Whether tuning may look at it.
    tuned: bool,
    /// When it begins to leak, in milliseconds; `None` where it does not.
    onset: Option<u64>,
    /// When it ended, in milliseconds,
    ended: u64,
    /// and whether that was for want of memory.
    exhausted: bool,
}

/// A process that was recorded.
#[derive(Clone, Debug)]
struct Recorded {
    label: Label,
    samples: Vec<Sample>,
}

/// What a detector made of it.
#[derive(Clone, Debug)]
struct Seen {
    label: Label,
    /// When it was first suspect, in milliseconds,
    suspect: Option<u64>,
    /// and when an act was first due.
    act: Option<u64>,
    /// Who holds what grows, as it was named last before the end, or at the act.
    mode: Option<LeakMode>,
    /// Its last slope in bytes an hour, 0 where nothing was ever suspected.
    slope: f64,
}

/// Which of the coarse modes a kind of leak is; `None` for right use.
fn mode_of(kind: &str) -> Option<LeakMode> {
    Some(match kind {
        "tensor" | "graph" | "cache" => LeakMode::HeldByFramework,
        "raw" => LeakMode::OutsideFramework,
        "replay" => LeakMode::PerReplay,
        "rank" => LeakMode::OneRank,
        "managed" => LeakMode::HostOrManaged,
        _ => return None,
    })
}

fn name(mode: Option<LeakMode>) -> &'static str {
    match mode {
        Some(LeakMode::HeldByFramework) => "held by the framework",
        Some(LeakMode::OutsideFramework) => "outside the framework",
        Some(LeakMode::AllocatorRetention) => "allocator retention",
        Some(LeakMode::PerReplay) => "per replay",
        Some(LeakMode::OneRank) => "one rank",
        Some(LeakMode::HostOrManaged) => "host or managed",
        None => "none named",
    }
}

/// The columns of a file by their names.
struct Table<R> {
    reader: csv::Reader<R>,
    places: BTreeMap<String, usize>,
    row: csv::StringRecord,
}

impl<R: Read> Table<R> {
    fn new(input: R) -> anyhow::Result<Self> {
        let mut reader = csv::Reader::from_reader(input);
        let places = reader.headers()?.iter().enumerate().map(|(at, name)| (name.to_owned(), at)).collect();
        Ok(Self { reader, places, row: csv::StringRecord::new() })
    }

    /// Goes to the next row; whether there is one.
    fn next(&mut self) -> anyhow::Result<bool> {
        Ok(self.reader.read_record(&mut self.row)?)
    }

    /// What stands in a column, in any case something.
    fn text(&self, column: &str) -> anyhow::Result<&str> {
        let at = self.places.get(column).ok_or_else(|| anyhow!("there is no column {column}"))?;
        self.row.get(*at).ok_or_else(|| anyhow!("a row ends before column {column}"))
    }

    /// A number; `None` where nothing stands there.
    fn number(&self, column: &str) -> anyhow::Result<Option<f64>> {
        let text = self.text(column)?;
        if text.is_empty() {
            return Ok(None);
        }
        let number = text.parse().with_context(|| format!("column {column} is {text:?}: write a number"))?;
        Ok(Some(number))
    }

    fn bytes(&self, column: &str) -> anyhow::Result<Option<u64>> {
        Ok(self.number(column)?.map(whole))
    }

    /// A time in milliseconds.
    fn time(&self, column: &str) -> anyhow::Result<Option<u64>> {
        Ok(self.number(column)?.map(|seconds| whole(seconds * 1000.0)))
    }

    fn key(&self) -> anyhow::Result<Key> {
        Ok((self.text("pod")?.to_owned(), self.text("device")?.to_owned()))
    }
}

/// Reads what is true of each process.
fn labels(input: impl Read) -> anyhow::Result<BTreeMap<Key, Label>> {
    let mut table = Table::new(input)?;
    let mut labels = BTreeMap::new();
    while table.next()? {
        let leaks = table.text("leaks")? == "1";
        let label = Label {
            kind: table.text("kind")?.to_owned(),
            tuned: table.text("split")? == "tuned",
            onset: table.time("onset_seconds")?.filter(|_| leaks),
            ended: table.time("ended_seconds")?.unwrap_or(0),
            exhausted: table.text("ending")? == "out of memory",
        };
        labels.insert(table.key()?, label);
    }
    Ok(labels)
}

/// What frameworks say, by process and time.
type Aside = BTreeMap<(Key, u64), (Framework, Option<u64>)>;

fn framework(input: impl Read) -> anyhow::Result<Aside> {
    let mut table = Table::new(input)?;
    let mut aside = Aside::new();
    while table.next()? {
        let Some(at) = table.time("seconds")? else { continue };
        let framework =
            Framework { allocated: table.bytes("allocated")?, reserved: table.bytes("reserved")? };
        aside.insert((table.key()?, at), (framework, table.bytes("replays")?));
    }
    Ok(aside)
}

fn series(input: impl Read, aside: &Aside) -> anyhow::Result<BTreeMap<Key, Vec<Sample>>> {
    let mut table = Table::new(input)?;
    let mut all: BTreeMap<Key, Vec<Sample>> = BTreeMap::new();
    while table.next()? {
        let (key, Some(at)) = (table.key()?, table.time("seconds")?) else { continue };
        let (framework, replays) = aside.get(&(key.clone(), at)).copied().unwrap_or_default();
        let sample = Sample {
            at: Millis(at),
            bytes: table.bytes("bytes")?,
            capacity: table.bytes("capacity")?,
            work: table.number("work")?,
            host_bytes: table.bytes("host_bytes")?,
            framework,
            replays,
        };
        all.entry(key).or_default().push(sample);
    }
    Ok(all)
}

fn open(path: &Path) -> anyhow::Result<File> {
    File::open(path).with_context(|| format!("open {}", path.display()))
}

/// Reads all batches of a folder.
fn read(folder: &Path) -> anyhow::Result<BTreeMap<Key, Recorded>> {
    let mut recorded = BTreeMap::new();
    for batch in 1.. {
        let path = folder.join(format!("labels-{batch}.csv"));
        if !path.exists() {
            break;
        }
        let labels = labels(open(&path)?).with_context(|| path.display().to_string())?;
        let packed = |name: &str| open(&folder.join(format!("{name}-{batch}.csv.gz"))).map(GzDecoder::new);
        let aside = framework(packed("framework")?)?;
        let mut all = series(packed("series")?, &aside)?;
        for (key, label) in labels {
            let samples = all.remove(&key).unwrap_or_default();
            recorded.insert(key, Recorded { label, samples });
        }
    }
    Ok(recorded)
}

/// Shows a detector a process, sample by sample.
fn replay(recorded: &Recorded, settings: &Arc<Settings>) -> Seen {
    let mut detector = Detector::new(Arc::clone(settings));
    let mut seen = Seen { label: recorded.label.clone(), suspect: None, act: None, mode: None, slope: 0.0 };
    for sample in &recorded.samples {
        let Some(Finding { kind, mode, slope_bytes_per_hour, at, .. }) = detector.push(sample) else {
            continue;
        };
        let first = match kind {
            FindingKind::Suspect => &mut seen.suspect,
            FindingKind::Act => &mut seen.act,
            FindingKind::Cleared => {
                seen.slope = 0.0;
                continue;
            }
        };
        if seen.mode.is_none() || kind == FindingKind::Act {
            seen.mode = mode.map(|(mode, _)| mode).or(seen.mode);
        }
        first.get_or_insert(at.0);
        seen.slope = slope_bytes_per_hour.mid;
    }
    seen
}

/// Replays all, and names the rank that grows alone where there are several.
fn judge(recorded: &BTreeMap<Key, Recorded>, settings: &Arc<Settings>) -> BTreeMap<Key, Seen> {
    let mut all: BTreeMap<Key, Seen> =
        recorded.iter().map(|(key, one)| (key.clone(), replay(one, settings))).collect();
    let mut ranks: BTreeMap<String, Vec<(Key, f64)>> = BTreeMap::new();
    for (key, seen) in &all {
        ranks.entry(key.0.clone()).or_default().push((key.clone(), seen.slope));
    }
    for ranks in ranks.values() {
        let slopes: Vec<f64> = ranks.iter().map(|(_, slope)| *slope).collect();
        let alone = one_rank(&slopes).and_then(|(place, _)| ranks.get(place));
        if let Some(seen) = alone.and_then(|(key, _)| all.get_mut(key)) {
            seen.mode = Some(LeakMode::OneRank);
        }
    }
    all
}

/// What became of the processes of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Count {
    leaks: usize,
    /// Leaks that were acted on between their onset and their end,
    found: usize,
    /// and of these with time to drain.
    in_time: usize,
    /// Leaks that were suspected before their end.
    suspected: usize,
    /// Leaks whose mode was named rightly.
    named: usize,
    right: usize,
    /// Right use that was acted on, or leaks that were before their onset.
    false_acts: usize,
    /// Right use that was suspected.
    suspicions: usize,
}

impl Count {
    fn take(&mut self, seen: &Seen) {
        let label = &seen.label;
        let Some(onset) = label.onset else {
            self.right += 1;
            // Fragmentation that comes to its end may be acted on near that.
            let ends =
                label.exhausted && seen.act.is_some_and(|at| label.ended.saturating_sub(at) <= 3_600_000);
            self.false_acts += usize::from(seen.act.is_some() && !ends);
            self.suspicions += usize::from(seen.suspect.is_some());
            return;
        };
        self.leaks += 1;
        self.named += usize::from(seen.mode.is_some() && seen.mode == mode_of(&label.kind));
        let within = |at: u64| at >= onset && at < label.ended;
        self.suspected += usize::from(seen.suspect.or(seen.act).is_some_and(within));
        match seen.act {
            Some(at) if at < onset => self.false_acts += 1,
            Some(at) if within(at) => {
                self.found += 1;
                self.in_time += usize::from(wide(label.ended - at) / 60_000.0 >= LEAD);
            }
            _ => {}
        }
    }
}

fn row(name: &str, tuned: bool, count: &Count) -> Vec<String> {
    let of =
        |part: usize, whole: usize| if whole == 0 { "-".to_owned() } else { format!("{part} of {whole}") };
    vec![
        name.to_owned(),
        if tuned { "tuned" } else { "reported" }.to_owned(),
        of(count.suspected, count.leaks),
        of(count.found, count.leaks),
        of(count.in_time, count.leaks),
        of(count.named, count.leaks),
        of(count.false_acts, count.leaks + count.right),
        of(count.suspicions, count.right),
    ]
}

/// A process that was recorded, as a life to be judged.
#[derive(Clone, Debug)]
pub(crate) struct Life {
    /// The name of its program.
    pub program: String,
    /// The kind of leak or of right use.
    pub kind: String,
    /// What is true of it.
    pub truth: Truth,
    /// In order of time.
    pub samples: Vec<Sample>,
}

/// The recorded processes of a side: tuning may look at the even one.
pub(crate) fn lives(folder: &Path, side: Side) -> anyhow::Result<Vec<Life>> {
    let life = |((program, _), Recorded { label, samples }): (Key, Recorded)| {
        let truth = match label.onset {
            Some(onset) => Truth::Leak { onset, exhausted: label.ended },
            // Right use that runs out of memory is fragmentation.
            None if label.exhausted => Truth::Fragmentation { exhausted: Some(label.ended) },
            None => Truth::Benign,
        };
        (label.tuned == (side == Side::Even)).then_some(Life { program, kind: label.kind, truth, samples })
    };
    Ok(read(folder)?.into_iter().filter_map(life).collect())
}

/// Where the recordings are kept.
pub(crate) fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("data/real-gpu")
}

/// Replays what was recorded, and reports it.
pub(crate) fn report(report: &mut Report, folder: &Path, settings: &Arc<Settings>) -> anyhow::Result<()> {
    let recorded = read(folder)?;
    if recorded.is_empty() {
        report.note(&format!(
            "{} holds no recordings: no program of a real GPU is replayed.",
            folder.display()
        ));
        return Ok(());
    }
    let all = judge(&recorded, settings);
    let mut counts: BTreeMap<(bool, &str), Count> = BTreeMap::new();
    let mut named: BTreeMap<(&str, &'static str), usize> = BTreeMap::new();
    for seen in all.values() {
        let label = &seen.label;
        counts.entry((label.tuned, label.kind.as_str())).or_default().take(seen);
        counts.entry((label.tuned, "all")).or_default().take(seen);
        if label.onset.is_some() {
            *named.entry((label.kind.as_str(), name(seen.mode))).or_default() += 1;
        }
    }
    let rows: Vec<Vec<String>> =
        counts.iter().map(|((tuned, kind), count)| row(kind, *tuned, count)).collect();
    report.table(
        "Programs on a real GPU, first life: a story of four hours in four minutes",
        &[
            "kind",
            "side",
            "suspected",
            "acted on",
            "10 min before the end",
            "mode named",
            "false acts",
            "right use suspected",
        ],
        &rows,
    );
    let rows: Vec<Vec<String>> = named
        .iter()
        .map(|((kind, mode), count)| vec![(*kind).to_owned(), (*mode).to_owned(), count.to_string()])
        .collect();
    report.table("Programs on a real GPU: which mode was named", &["leak", "named", "processes"], &rows);
    let Some(unseen) = counts.get(&(false, "all")) else { return Ok(()) };
    report.estimate(
        "programs on a real GPU, unseen: leaks acted on",
        share(unseen.found, unseen.leaks),
        Goal::Stated,
    );
    report.figure(
        "programs on a real GPU, unseen: mode named rightly",
        real(unseen.named) / real(unseen.leaks),
        &bounded(share(unseen.named, unseen.leaks)),
        Goal::AtLeast(0.85),
    );
    report.figure(
        "programs on a real GPU, unseen: false acts",
        real(unseen.false_acts),
        &format!("{} of {} processes", plain(real(unseen.false_acts)), unseen.leaks + unseen.right),
        Goal::Stated,
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;

    const LABELS: &str = "pod,device,kind,variant,split,leaks,onset_seconds,ended_seconds,ending,capacity\n\
        raw-1,0,raw,1,tuned,1,600,10800,out of memory,4294967296\n\
        kv-4,0,kv,4,reported,0,,10800,story told,4294967296\n";

    /// Three hours at 10 s: one grows from 1 to 4 GiB outside the framework, the other stays.
    fn recorded() -> BTreeMap<Key, Recorded> {
        let mut rows = "pod,device,seconds,bytes,capacity,work,host_bytes,life\n".to_owned();
        let mut beside = "pod,device,seconds,allocated,reserved,replays\n".to_owned();
        for i in 0..1080_u64 {
            let grown = (1 << 30) + i * 3 * (1 << 30) / 1080;
            for (pod, bytes) in [("raw-1", grown), ("kv-4", 2 << 30)] {
                let _ = writeln!(rows, "{pod},0,{}.0,{bytes},4294967296,{i},1000,0", i * 10);
                if i % 3 == 0 {
                    let _ = writeln!(beside, "{pod},0,{}.0,500,600,0", i * 10);
                }
            }
        }
        let mut all = series(rows.as_bytes(), &framework(beside.as_bytes()).unwrap()).unwrap();
        let labels = labels(LABELS.as_bytes()).unwrap();
        let one = |(key, label): (Key, Label)| {
            let samples = all.remove(&key).unwrap();
            (key, Recorded { label, samples })
        };
        labels.into_iter().map(one).collect()
    }

    #[test]
    fn r05_a_recorded_leak_is_found_its_mode_named_and_a_level_program_left_alone() {
        let recorded = recorded();
        assert!(recorded.values().all(|one| one.samples.len() == 1080));
        let all = judge(&recorded, &Arc::new(Settings::default()));
        let mut count = Count::default();
        for seen in all.values() {
            count.take(seen);
        }
        let expected =
            Count { leaks: 1, found: 1, in_time: 1, suspected: 1, named: 1, right: 1, ..Count::default() };
        assert_eq!(count, expected, "{all:?}");
    }

    #[test]
    fn a_file_without_a_column_is_said_to_lack_it() {
        let error = labels("pod,device\na,0\n".as_bytes()).unwrap_err();
        assert!(error.to_string().contains("there is no column leaks"), "{error}");
        let error = series("pod,device,seconds,bytes\na,0,1,many\n".as_bytes(), &Aside::new()).unwrap_err();
        assert!(format!("{error:#}").contains("column bytes is \"many\""), "{error:#}");
    }

    /// What was recorded is whole: every label has its series, and what leaks came to its end.
    #[test]
    fn l01_what_was_recorded_on_a_real_gpu_is_whole() {
        for (key, one) in read(&folder()).unwrap() {
            assert!(one.samples.len() > 300, "{key:?} has {} samples", one.samples.len());
            let numbers = one.samples.iter().filter(|sample| sample.framework.reserved.is_some()).count();
            assert!(numbers > 100, "{key:?}: the framework says something {numbers} times");
            if one.label.onset.is_some() {
                assert!(one.label.exhausted, "{key:?} leaks and did not run out: {:?}", one.label);
            }
        }
    }
}
