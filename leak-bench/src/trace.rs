//! A public trace of pods that serve diffusion models, read from a folder: nobody says what in it
//! leaks, so all of it counts as benign but for three pods whose host memory collapses.

use std::{collections::BTreeMap, fs::File, path::Path};

use anyhow::Context;
use flate2::read::GzDecoder;

use crate::{
    disturb,
    inject::{self, KINDS},
    number::{GIB, whole, wide},
    random::Random,
    series::{Point, Series, Truth},
};

/// Devices of the trace are taken to have this much; the highest use is 47.1 GiB.
const DEVICE: f64 = 48.0 * GIB;
/// Host memory is told as a share of a limit that nobody tells; any will do.
const HOST: f64 = 64.0 * GIB;
/// Shorter series are left out: about 19 h.
const SHORTEST: usize = 1200;

/// What is read of the trace.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trace {
    /// Device memory.
    pub gpu: Vec<Series>,
    /// Host memory, without the pods that collapse.
    pub host: Vec<Series>,
    /// Host memory of the pods that collapse.
    pub collapses: Vec<Series>,
}

type Columns = BTreeMap<String, Vec<(f64, f64)>>;

fn columns(folder: &Path, name: &str) -> anyhow::Result<Columns> {
    let path = folder.join(format!("{name}.csv.gz"));
    let file = File::open(&path).with_context(|| format!("open {}", path.display()))?;
    let mut columns = Columns::new();
    for (line, row) in csv::Reader::from_reader(GzDecoder::new(file)).deserialize().enumerate() {
        let (pod, seconds, value): (String, f64, f64) =
            row.with_context(|| format!("{}, line {}", path.display(), line + 2))?;
        columns.entry(pod).or_default().push((seconds, value));
    }
    Ok(columns)
}

/// The work done until each moment: the integral of the duty cycle.
struct Duty<'a> {
    rest: std::iter::Peekable<std::slice::Iter<'a, (f64, f64)>>,
    last: Option<(f64, f64)>,
    done: f64,
}

impl<'a> Duty<'a> {
    fn new(column: Option<&'a Vec<(f64, f64)>>) -> Option<Self> {
        Some(Self { rest: column?.iter().peekable(), last: None, done: 0.0 })
    }

    fn until(&mut self, seconds: f64) -> f64 {
        while let Some((at, percent)) = self.rest.next_if(|(at, _)| *at <= seconds) {
            if let Some((before, last)) = self.last {
                self.done += (at - before) * last / 100.0;
            }
            self.last = Some((*at, *percent));
        }
        self.done
    }
}

fn series(
    pod: &str,
    family: &str,
    column: &[(f64, f64)],
    scale: f64,
    capacity: f64,
    work: Option<Duty<'_>>,
) -> Series {
    let begin = column.first().map_or(0.0, |(seconds, _)| *seconds);
    let mut work = work;
    let point = |(seconds, value): &(f64, f64)| Point {
        at: whole((seconds - begin) * 1000.0),
        bytes: Some(whole(value * scale)),
        work: work.as_mut().map(|w| w.until(*seconds)),
    };
    Series {
        pod: pod.to_owned(),
        family: family.to_owned(),
        capacity: whole(capacity),
        declared: None,
        points: column.iter().map(point).collect(),
        truth: Truth::Benign,
    }
}

/// When a share of the limit of at least 0.9 falls by 0.3 within three samples.
fn collapse(column: &[(f64, f64)]) -> Option<f64> {
    let (begin, _) = column.first()?;
    column.windows(4).find_map(|w| {
        let (at, high) = w.first()?;
        (*high >= 0.9 && w.iter().any(|(_, v)| *v <= high - 0.3)).then_some(at - begin)
    })
}

/// Reads the trace from its folder.
pub(crate) fn read(folder: &Path) -> anyhow::Result<Trace> {
    let gpu = columns(folder, "gpu_memory_used_bytes")?;
    let host = columns(folder, "container_memory_ratio")?;
    let duty = columns(folder, "gpu_duty_cycle_ratio")?;
    let mut trace = Trace::default();
    for (pod, column) in gpu.iter().filter(|(_, column)| column.len() >= SHORTEST) {
        trace.gpu.push(series(pod, "trace-gpu", column, 1.0, DEVICE, Duty::new(duty.get(pod))));
    }
    for (pod, column) in host.iter().filter(|(_, column)| column.len() >= SHORTEST) {
        let mut series = series(pod, "trace-host", column, HOST, HOST, Duty::new(duty.get(pod)));
        if let Some(at) = collapse(column) {
            series.truth = Truth::Leak { onset: 0, exhausted: whole(at * 1000.0) };
            trace.collapses.push(series);
        } else {
            trace.host.push(series);
        }
    }
    for series in trace.gpu.iter_mut().chain(&mut trace.host) {
        let mut random = Random::of(&format!("{}/{}/gaps", series.family, series.pod));
        disturb::gaps(&mut series.points, &mut random);
    }
    Ok(trace)
}

/// A series of the trace with leaks of each kind in it, `each` of a kind.
pub(crate) fn leaking(base: &Series, each: usize) -> Vec<Series> {
    let length = base.points.last().map_or(0.0, |p| wide(p.at) / 1000.0);
    let mut made = Vec::new();
    for kind in KINDS {
        for number in 0..each {
            let mut random = Random::of(&format!("{}/{}/{}/{number}", base.family, base.pod, kind.name()));
            let takes = random.log_uniform(2.0, 12.0) * 3600.0;
            let onset = random.uniform(0.02, 1.0) * (length - 1.3 * takes);
            let mut series = base.clone();
            if inject::leak(&mut series, kind, onset, takes, &mut random).is_some() {
                series.family = format!("{} {}", base.family, kind.name());
                made.push(series);
            }
        }
    }
    made
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_the_integral_of_the_duty_cycle() {
        let column = vec![(0.0, 50.0), (100.0, 100.0), (200.0, 0.0)];
        let mut duty = Duty::new(Some(&column)).unwrap();
        let done = [0.0, 50.0, 100.0, 250.0].map(|s| crate::number::whole(duty.until(s)));
        assert_eq!(done, [0, 0, 50, 150]);
    }

    #[test]
    fn a_collapse_is_a_fall_from_near_the_limit() {
        let column = |values: &[f64]| {
            values.iter().zip(0u32..).map(|(v, i)| (f64::from(i) * 57.0, *v)).collect::<Vec<_>>()
        };
        assert_eq!(collapse(&column(&[0.5, 0.92, 0.95, 0.4, 0.3])), Some(57.0));
        assert_eq!(collapse(&column(&[0.5, 0.85, 0.4, 0.95, 0.94])), None);
    }
}
