//! All series of a recording, row by row.

use std::{collections::HashMap, str, sync::Arc};

use highwater_policy::{leak::Settings, pod::Labels};

use super::{
    decision::{Decision, Kind},
    input::{Fault, Row, Stop},
    output::Output,
    policy::Policy,
    series::{Series, Taken},
};

/// The device of a series of host memory.
const HOST: &[u8] = b"host";

/// What is to be said at the end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Rows looked at,
    pub(crate) samples: u64,
    /// and those of them that had no number.
    pub(crate) missing: u64,
    /// Rows passed over because their time went back, and the line of the first.
    pub(crate) backwards: u64,
    pub(crate) first_backwards: Option<u64>,
    /// Series whose quota is not known,
    pub(crate) without_quota: u64,
    /// and the label that would have to be known of the first.
    pub(crate) wanted_label: Option<String>,
    /// Rows passed over because their time was there already.
    pub(crate) repeated: u64,
    /// Decisions, in the order of [`Kind::ALL`].
    pub(crate) decisions: [u64; Kind::ALL.len()],
}

/// Everything that is kept between two rows.
pub(crate) struct Replay<'a> {
    policy: &'a Policy,
    settings: Arc<Settings>,
    /// Taken where the file gives none.
    capacity: Option<u64>,
    /// Labels of pods, taken where the file gives none.
    labels: Labels,
    /// Index of each series by `pod`, 0, `device`.
    index: HashMap<Arc<[u8]>, usize>,
    series: Vec<(Arc<[u8]>, Series)>,
    /// The series of the last row: rows of one series often follow each other.
    last: usize,
    /// For a name that is looked up.
    name: Vec<u8>,
    pub(crate) counts: Counts,
}

impl<'a> Replay<'a> {
    pub(crate) fn new(policy: &'a Policy, capacity: Option<u64>, labels: Labels) -> Self {
        Self {
            policy,
            settings: Arc::clone(&policy.settings),
            capacity,
            labels,
            index: HashMap::new(),
            series: Vec::new(),
            last: 0,
            name: Vec::new(),
            counts: Counts::default(),
        }
    }

    /// Takes a row.
    pub(crate) fn take(
        &mut self,
        line: Option<u64>,
        row: &Row<'_>,
        output: &mut dyn Output,
    ) -> Result<(), Stop> {
        let at = self.find(line, row)?;
        self.last = at;
        let Some((name, series)) = self.series.get_mut(at) else { return Ok(()) };
        let counts = &mut self.counts;
        let taken = series.take(row, self.policy.breaker.as_ref(), |at, verdict| {
            if let Some(count) = counts.decisions.get_mut(verdict.kind.index()) {
                *count += 1;
            }
            let (pod, device) = parts(name);
            let decision: Decision<'_> = verdict.decision(pod, device, at);
            output.decision(&decision).map_err(Stop::Output)
        })?;
        match taken {
            Taken::Yes => {
                counts.samples += 1;
                counts.missing += u64::from(row.bytes.is_none());
            }
            Taken::Backwards => {
                counts.backwards += 1;
                counts.first_backwards = counts.first_backwards.or(line);
            }
            Taken::Repeated => counts.repeated += 1,
        }
        Ok(())
    }

    /// Number of series.
    pub(crate) fn len(&self) -> usize {
        self.series.len()
    }

    /// Number of series of which this is so.
    pub(crate) fn count(&self, which: impl Fn(&Series) -> bool) -> usize {
        self.series.iter().filter(|(_, series)| which(series)).count()
    }
}

impl Replay<'_> {
    /// The series of a row; made where it is the first of its kind.
    fn find(&mut self, line: Option<u64>, row: &Row<'_>) -> Result<usize, Stop> {
        // Files hold one series after the other, or all series of a moment, again and again in the
        // same order: either way the place is known without a look-up.
        let next = if self.last + 1 < self.series.len() { self.last + 1 } else { 0 };
        for guess in [self.last, next] {
            if self.series.get(guess).is_some_and(|(name, _)| is(name, row)) {
                return Ok(guess);
            }
        }
        self.name.clear();
        self.name.extend_from_slice(row.pod);
        self.name.push(0);
        self.name.extend_from_slice(row.device);
        if let Some(&at) = self.index.get(self.name.as_slice()) {
            return Ok(at);
        }
        for (what, text) in [("pod", row.pod), ("device", row.device)] {
            if str::from_utf8(text).is_err() || text.contains(&0) {
                let what = format!("the name of the {what} is no UTF-8 text: save the file as UTF-8");
                return Err(Stop::Fault(Fault { line, what }));
            }
        }
        let at = self.series.len();
        let name: Arc<[u8]> = self.name.as_slice().into();
        self.index.insert(Arc::clone(&name), at);
        let quota = self.quota(row);
        self.series.push((name, Series::new(&self.settings, self.capacity, quota)));
        Ok(at)
    }

    /// What the policy lets the pod of a row have; `None` where it does not say, or nobody can tell. A
    /// quota is of devices, not of the host.
    fn quota(&mut self, row: &Row<'_>) -> Option<u64> {
        if row.device.eq_ignore_ascii_case(HOST) {
            return None;
        }
        match self.policy.quota.as_ref()?.limit(row.labels, &self.labels) {
            Ok(limit) => limit,
            Err(label) => {
                self.counts.without_quota += 1;
                self.counts.wanted_label.get_or_insert(label);
                None
            }
        }
    }
}

/// Whether a series has the pod and device of a row.
fn is(name: &[u8], row: &Row<'_>) -> bool {
    name.len() == row.pod.len() + 1 + row.device.len()
        && name.starts_with(row.pod)
        && name.get(row.pod.len()) == Some(&0)
        && name.ends_with(row.device)
}

/// Pod and device of a name, which is known to be text.
fn parts(name: &[u8]) -> (&str, &str) {
    str::from_utf8(name).ok().and_then(|name| name.split_once('\0')).unwrap_or_default()
}
