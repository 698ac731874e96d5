//! `simulate`: replays a policy over recorded series. What decides is the code of the agent.

mod decision;
mod input;
mod oom;
mod output;
mod policy;
mod progress;
mod quota;
mod replay;
mod schema;
mod series;
mod span;

use std::{
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

use clap::{ValueEnum, builder::NonEmptyStringValueParser};
use highwater_crds::ByteSize;

use self::{
    decision::Kind,
    input::{Labels, Row, Source, Stop, read_csv, read_prometheus},
    output::{Json, Output, Table},
    policy::Policy,
    progress::Progress,
    replay::Replay,
    series::Series,
};

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    from: From,
    /// A GpuMemoryPolicy. Without it: the defaults of leak detection, and breakers at 75, 88 and
    /// 95 percent.
    #[arg(long, value_name = "FILE.yaml")]
    policy: Option<PathBuf>,
    /// Memory that there is, such as 80Gi, wherever the recording does not say.
    #[arg(long, value_name = "SIZE", value_parser = capacity)]
    capacity: Option<ByteSize>,
    /// Label, or column of a CSV, that names the pod [default: exported_pod, then pod; column pod].
    #[arg(long, value_name = "LABEL", value_parser = NonEmptyStringValueParser::new())]
    pod_label: Option<String>,
    /// Label, or column of a CSV, that names the device [default: device, then UUID, then gpu; column
    /// device].
    #[arg(long, value_name = "LABEL", value_parser = NonEmptyStringValueParser::new())]
    device_label: Option<String>,
    /// Labels that the pods have, wherever the recording does not say: by them the rules of the
    /// policy's quota select.
    #[arg(long, value_name = "KEY=VALUE", value_delimiter = ',', value_parser = quota::label)]
    labels: Vec<(String, String)>,
    /// How decisions are written.
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    output: Format,
}

const EXAMPLES: &str =
    "Exit status: 0 when the recording was replayed, 1 when what is found cannot be written, 2 when a
file or the command line has to be changed.

Examples:
  kubectl highwater simulate --series week.csv.gz --policy serving.yaml
  kubectl highwater simulate --prometheus-range answer.json --capacity 80Gi -o json";

/// Where the series come from.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct From {
    /// Comma-separated values, packed by gzip or not, with the columns pod,device,seconds,bytes
    /// and, where known, capacity,work,host_bytes,life. `-` is what is piped in.
    #[arg(long, value_name = "FILE.csv[.gz]")]
    series: Option<PathBuf>,
    /// What Prometheus answered at /api/v1/query_range. `-` is what is piped in.
    #[arg(long, value_name = "FILE.json[.gz]")]
    prometheus_range: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// For people.
    Table,
    /// One object a line.
    Json,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// A file has to be changed.
    #[error("{0}")]
    Input(String),
    /// Nobody takes what is found.
    #[error("the decisions cannot be written: {0}")]
    Output(io::Error),
}

impl Error {
    fn of(file: &Path, stop: Stop) -> Self {
        match stop {
            Stop::Fault(fault) => Self::Input(format!("{}: {fault}", file.display())),
            Stop::Output(error) => Self::Output(error),
        }
    }
}

fn capacity(text: &str) -> Result<ByteSize, String> {
    match text.parse::<ByteSize>() {
        Ok(ByteSize(0)) => Err("a capacity must be above 0".to_owned()),
        Ok(size) => Ok(size),
        Err(error) => Err(error.to_string()),
    }
}

/// Replays, and writes decisions to standard output and what else is to be said to standard error.
pub(crate) fn run(args: &Args) -> Result<(), Error> {
    let policy = match &args.policy {
        None => Policy::default(),
        Some(file) => Policy::open(file).map_err(|fault| Error::of(file, fault.into()))?,
    };
    for note in &policy.notes {
        say(note);
    }
    let into = BufWriter::new(io::stdout().lock());
    let mut output: Box<dyn Output> = match args.output {
        Format::Table => Box::new(Table::new(into)),
        Format::Json => Box::new(Json(into)),
    };
    let asked = || policy.quota.iter().flat_map(|quota| quota.keys());
    for (key, _) in args.labels.iter().filter(|(key, _)| asked().all(|asked| asked != key)) {
        say(&format!("--labels {key} decides nothing: no rule of the policy's quota asks for it"));
    }
    let labels = Labels {
        pod: args.pod_label.clone(),
        device: args.device_label.clone(),
        asked: asked().map(str::to_owned).collect(),
    };
    let given = args.labels.iter().cloned().collect();
    let mut replay = Replay::new(&policy, args.capacity.map(ByteSize::bytes), given);
    let read = read(args, &labels, &mut replay, &mut *output);
    // What was decided before a fault stands.
    let written = output.finish(read.is_ok()).map_err(Error::Output);
    let notes = read?;
    written?;
    for note in notes.into_iter().chain(summary(&replay)) {
        say(&note);
    }
    Ok(())
}

/// Reads the recording through. Returns what is to be said of it.
fn read(
    args: &Args,
    labels: &Labels,
    replay: &mut Replay<'_>,
    output: &mut dyn Output,
) -> Result<Vec<String>, Error> {
    let file = args.from.series.as_ref().or(args.from.prometheus_range.as_ref());
    // The command line lets nothing pass that names none.
    let file = file.ok_or_else(|| Error::Input("name a recording, by --series".to_owned()))?;
    let source = Source::open(file).map_err(|fault| Error::of(file, fault.into()))?;
    let mut progress = Progress::new(source.tally());
    let mut each = |line: Option<u64>, row: &Row<'_>| {
        progress.row(replay.counts.samples, replay.len());
        replay.take(line, row, output)
    };
    let read = if args.from.series.is_some() {
        read_csv(source, labels, &mut each)
    } else {
        read_prometheus(source, labels, &mut each).map(|()| Vec::new())
    };
    progress.finish();
    read.map_err(|stop| Error::of(file, stop))
}

/// What was replayed, and what could not be.
fn summary(replay: &Replay<'_>) -> Vec<String> {
    let counts = &replay.counts;
    let mut text = Vec::new();
    let decisions: Vec<String> = Kind::ALL
        .iter()
        .zip(counts.decisions)
        .filter(|(_, count)| *count > 0)
        .map(|(kind, count)| format!("{count} {}", kind.name()))
        .collect();
    text.push(format!(
        "{} of {}: {}",
        counted(counts.samples, "sample"),
        counted(replay.len().try_into().unwrap_or(u64::MAX), "series"),
        if decisions.is_empty() { "no decisions".to_owned() } else { decisions.join(", ") }
    ));
    if counts.missing > 0 {
        text.push(format!("{} had no number of bytes: missing, not 0", counted(counts.missing, "sample")));
    }
    if counts.backwards > 0 {
        let first = counts.first_backwards.map_or_else(String::new, |line| format!(", first in line {line}"));
        text.push(format!(
            "{} passed over because time went back{first}: sort the file by pod, device and seconds",
            counted(counts.backwards, "sample")
        ));
    }
    if counts.repeated > 0 {
        text.push(format!("{} passed over whose time was there already", counted(counts.repeated, "sample")));
    }
    let len = replay.len();
    match replay.count(Series::is_suspected) {
        0 => {}
        some => text.push(format!("{some} of {len} series are under suspicion where their rows end")),
    }
    match replay.count(Series::has_quota) {
        0 => {}
        some => text.push(format!(
            "{some} of {len} series have a limit by the quota of the policy: that is what they can come to, and by it \
             leaks are judged; marks and oom are judged by the capacity"
        )),
    }
    if let Some(label) = &counts.wanted_label {
        text.push(format!(
            "{} of {len} series have no limit here, since the recording does not give the label {label}, by which the \
             rules of the quota select: give it in a CSV in a column of that name, or for all pods by --labels \
             {label}=VALUE",
            counts.without_quota
        ));
    }
    match replay.count(|series| !series.has_capacity() && !series.has_quota()) {
        0 => {}
        some => text.push(format!(
            "{some} of {len} series have no capacity, so that nothing but suspect can be said of them: give it with \
             --capacity, or in a CSV in the column capacity"
        )),
    }
    match replay.count(|series| !series.has_capacity() && series.has_quota()) {
        0 => {}
        some => text.push(format!(
            "{some} of {len} series have no capacity, so that neither marks nor oom can be said of them: give it with \
             --capacity, or in a CSV in the column capacity"
        )),
    }
    text
}

fn counted(count: u64, what: &str) -> String {
    let plural = if count == 1 || what.ends_with('s') { "" } else { "s" };
    format!("{count} {what}{plural}")
}

/// Says something that is no decision.
pub(crate) fn say(text: &str) {
    // Nobody reads it: no reason to fail.
    let _ = writeln!(io::stderr(), "{text}");
}
