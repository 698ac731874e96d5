//! The file by which a later agent goes on with what this one knew.
//!
//! Its end is the digest of the rest: a file that was cut off or changed is begun anew. The first part
//! says who is watched; the state of each series follows in a part of its own, so that one that makes no
//! sense costs no other. [`keep`] alone writes it, to the last snapshot that the agent takes when it ends.

use std::{
    collections::HashMap,
    fs,
    io::{self, Write},
    path::Path,
    sync::Arc,
};

use highwater_crds::{LeakMemory, Mode};
use highwater_policy::{
    leak::{Detector, Settings, State, Workload},
    time::Millis,
};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::sync::mpsc::UnboundedReceiver;
use tracing::{info, warn};

use super::{
    Watched,
    lives::Life,
    series::{Of, Series},
    workloads::{Known, Workloads},
};
use crate::replace::replace;

/// Version of the file's form.
const VERSION: u32 = 1;
/// Bytes of the digest at its end.
const DIGEST: usize = 32;
/// It is written no more often than this, in milliseconds.
const LEAST: u64 = 1_000;

/// Where it is kept, and when it was written last.
#[derive(Debug)]
pub(super) struct Store {
    path: Arc<Path>,
    written: Option<Millis>,
    touched: bool,
    changed: bool,
}

/// What was found in it.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub pods: HashMap<Arc<str>, Watched>,
    pub workloads: Workloads,
    /// What the clock of the samples says now.
    pub clock: u64,
}

/// What is to be written.
#[derive(Debug)]
pub(crate) struct Snapshot {
    path: Arc<Path>,
    head: Head,
    states: Vec<State>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Head {
    version: u32,
    /// When it was written, for the time that nobody looked.
    wall: Timestamp,
    /// The same on the clock of the samples.
    clock: u64,
    pods: Vec<Pod>,
    workloads: Vec<(Workload, Known)>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Pod {
    /// UID, as the kubelet knows it.
    kubelet_uid: String,
    /// UID in the API.
    uid: String,
    life: Life,
    series: Vec<One>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct One {
    memory: LeakMemory,
    mode: Mode,
    device: String,
    workload: Workload,
    settings: Settings,
    began: u64,
    whole: bool,
    known: bool,
}

/// The only field that every version has.
#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

/// Why the file was not taken over.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum Broken {
    #[error("it is cut off or damaged")]
    Damaged,
    #[error("it has version {0}")]
    Version(u32),
}

impl Store {
    /// Reads the file in the state directory. What cannot be used is left aside.
    pub(super) fn open(state_dir: &Path, wall: Timestamp) -> (Self, Found) {
        let path: Arc<Path> = state_dir.join("leaks.state").into();
        let store = Self { path: Arc::clone(&path), written: None, touched: false, changed: false };
        let found = match fs::read(&path) {
            Ok(bytes) => decode(&bytes, wall).unwrap_or_else(|error| {
                warn!(%error, path = %path.display(), "what was seen of leaks is not known any more: it begins anew");
                Found::default()
            }),
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    warn!(%error, path = %path.display(), "what was seen of leaks cannot be read: it begins anew");
                }
                Found::default()
            }
        };
        if !found.pods.is_empty() {
            info!(pods = found.pods.len(), "going on with what an earlier agent saw of leaks");
        }
        (store, found)
    }

    /// Something is to be written; soon, where what is thought of a pod changed.
    pub(super) fn touched(&mut self, changed: bool) {
        self.touched = true;
        self.changed |= changed;
    }

    /// Whether it is time to write, at this pace in milliseconds.
    pub(super) fn is_due(&self, pace: u64, now: Millis) -> bool {
        let pace = if self.changed { LEAST } else { pace.max(LEAST) };
        self.touched && self.written.is_none_or(|written| now.since(written) >= pace)
    }

    /// What is to be written: that nothing is known as well, or a later agent would go on with what is over.
    /// `None` where nothing ever was.
    pub(super) fn snapshot(
        &mut self,
        pods: &HashMap<Arc<str>, Watched>,
        workloads: &Workloads,
        at: Millis,
        wall: Timestamp,
        now: Millis,
    ) -> Option<Snapshot> {
        (self.touched, self.changed) = (false, false);
        let nothing = pods.is_empty() && workloads.is_empty();
        if nothing && self.written.is_none() && !self.path.exists() {
            return None;
        }
        self.written = Some(now);
        let mut states = Vec::new();
        let pods = pods.iter().map(|(pod, watched)| Pod {
            kubelet_uid: pod.to_string(),
            uid: watched.uid.to_string(),
            life: watched.life.clone(),
            series: watched
                .series
                .iter()
                .map(|series| {
                    states.push(series.detector.state());
                    One::of(series)
                })
                .collect(),
        });
        let head =
            Head { version: VERSION, wall, clock: at.0, pods: pods.collect(), workloads: workloads.all() };
        Some(Snapshot { path: Arc::clone(&self.path), head, states })
    }
}

impl One {
    fn of(series: &Series) -> Self {
        Self {
            memory: series.of.memory,
            mode: series.of.mode,
            device: series.of.device.to_string(),
            workload: series.workload.clone(),
            settings: (*series.settings).clone(),
            began: series.began.0,
            whole: series.whole,
            known: series.known,
        }
    }

    fn resume(self, state: &[u8], at: Millis, wall: Timestamp) -> Option<Series> {
        let Self { memory, mode, device, workload, settings, began, whole, known } = self;
        let settings = Arc::new(settings);
        let state = State::from_bytes(state);
        let detector = state.and_then(|state| Detector::restore(Arc::clone(&settings), state, at));
        let detector = detector.inspect_err(|error| info!(%error, "a series is not gone on with")).ok()?;
        let of = Of { memory, mode, device: device.into() };
        let mut series = Series::new(of, workload, settings, detector, Millis(began));
        (series.whole, series.known) = (whole, known);
        series.resume(at, wall);
        // What an earlier agent suspected needs no more time to be known.
        series.known |= series.finding.is_some();
        Some(series)
    }
}

/// Writes snapshots, one after the other, until nobody takes any more. The last that was taken is then
/// written.
pub(crate) async fn keep(mut snapshots: UnboundedReceiver<Box<Snapshot>>) {
    while let Some(mut snapshot) = snapshots.recv().await {
        // The latest says how it is; those before it say how it was.
        while let Ok(later) = snapshots.try_recv() {
            snapshot = later;
        }
        // What comes of it the writer says.
        let _ = tokio::task::spawn_blocking(move || snapshot.write()).await;
    }
}

impl Snapshot {
    /// Writes it. What cannot be written is told; what was there before stands.
    fn write(&self) {
        if let Err(error) = replace(&self.path, |file| self.encode(file)) {
            warn!(%error, path = %self.path.display(), "what is seen of leaks cannot be kept: after a restart it begins anew");
        }
    }

    /// Part by part: all states as text at once would be many times what they take in memory.
    fn encode(&self, mut to: impl Write) -> io::Result<()> {
        let mut digest = Sha256::new();
        let head = serde_json::to_vec(&self.head)?;
        for part in std::iter::once(head).chain(self.states.iter().map(State::to_bytes)) {
            let length = u32::try_from(part.len()).map_err(io::Error::other)?.to_le_bytes();
            for bytes in [length.as_slice(), &part] {
                digest.update(bytes);
                to.write_all(bytes)?;
            }
        }
        to.write_all(&digest.finalize())
    }
}

/// The first part of what there is, and the rest.
fn part(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk()?;
    rest.split_at_checked(usize::try_from(u32::from_le_bytes(*length)).ok()?)
}

fn decode(bytes: &[u8], wall: Timestamp) -> Result<Found, Broken> {
    let end = bytes.len().checked_sub(DIGEST).ok_or(Broken::Damaged)?;
    let (body, digest) = bytes.split_at_checked(end).ok_or(Broken::Damaged)?;
    if Sha256::digest(body).as_slice() != digest {
        return Err(Broken::Damaged);
    }
    let (head, mut rest) = part(body).ok_or(Broken::Damaged)?;
    let Versioned { version } = serde_json::from_slice(head).map_err(|_| Broken::Damaged)?;
    if version != VERSION {
        return Err(Broken::Version(version));
    }
    let head: Head = serde_json::from_slice(head).map_err(|_| Broken::Damaged)?;
    // A clock that was set back has stood still at worst.
    let away = u64::try_from(wall.duration_since(head.wall).as_millis()).unwrap_or(0);
    let clock = Millis(head.clock.saturating_add(away));
    let mut pods = HashMap::new();
    for Pod { kubelet_uid, uid, life, series: saved } in head.pods {
        let mut series = Vec::new();
        for one in saved {
            let (state, next) = part(rest).ok_or(Broken::Damaged)?;
            rest = next;
            series.extend(one.resume(state, clock, wall));
        }
        let watched =
            Watched { pod: None, uid: uid.into(), life, series, host: None, framework: None, failing: false };
        pods.insert(kubelet_uid.into(), watched);
    }
    Ok(Found { pods, workloads: Workloads::of(head.workloads), clock: clock.0 })
}

#[cfg(test)]
mod tests {
    use highwater_policy::{leak::Sample, pod::PodFacts};

    use super::*;

    const WALL: &str = "2026-01-01T00:00:00Z";

    fn wall() -> Timestamp {
        WALL.parse().unwrap()
    }

    /// Of one pod that was seen for a while, and of nobody.
    fn snapshots(state_dir: &Path) -> [Snapshot; 2] {
        let (mut store, _) = Store::open(state_dir, wall());
        let workload =
            Workload::of(&PodFacts::default(), "NVIDIA H200", LeakMemory::Device, 0, Mode::Enforce);
        let mut detector = Detector::new(Arc::default());
        for at in 1..100_u64 {
            detector.push(&Sample { at: Millis(at * 10_000), bytes: Some(at << 30), ..Sample::default() });
        }
        let of = Of { memory: LeakMemory::Device, mode: Mode::Enforce, device: "GPU-0".into() };
        let series = Series::new(of, workload, Arc::default(), detector, Millis(10_000));
        let watched = Watched {
            pod: None,
            uid: "a".into(),
            life: Life::default(),
            series: vec![series],
            host: None,
            framework: None,
            failing: false,
        };
        let mut take = |pods| {
            let snapshot = store.snapshot(&pods, &Workloads::default(), Millis(1_000_000), wall(), Millis(0));
            snapshot.unwrap()
        };
        [take([("a".into(), watched)].into()), take(HashMap::new())]
    }

    fn snapshot(state_dir: &Path) -> Snapshot {
        let [snapshot, _] = snapshots(state_dir);
        snapshot
    }

    fn encoded(snapshot: &Snapshot) -> Vec<u8> {
        let mut bytes = Vec::new();
        snapshot.encode(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn a_later_agent_goes_on_where_the_last_one_was() {
        let state = tempfile::tempdir().unwrap();
        let snapshot = snapshot(state.path());
        snapshot.write();
        let later = wall() + jiff::SignedDuration::from_secs(7);
        let (_, found) = Store::open(state.path(), later);
        assert_eq!(found.clock, 1_007_000);
        let series = &found.pods["a"].series[0];
        assert_eq!(series.detector.state(), snapshot.states[0]);
        assert_eq!((series.began, &*series.of.device), (Millis(10_000), "GPU-0"));
        let (_, found) = Store::open(state.path(), wall() - jiff::SignedDuration::from_secs(7));
        assert_eq!(found.clock, 1_000_000, "a clock that was set back");
    }

    #[test]
    fn a_file_that_is_cut_off_or_changed_anywhere_begins_anew() {
        let state = tempfile::tempdir().unwrap();
        let bytes = encoded(&snapshot(state.path()));
        assert!(decode(&bytes, wall()).is_ok());
        for length in (0..bytes.len()).step_by(97) {
            assert!(matches!(decode(&bytes[..length], wall()), Err(Broken::Damaged)), "{length}");
        }
        for at in (0..bytes.len()).step_by(97) {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            assert!(decode(&changed, wall()).is_err(), "{at}");
        }
        fs::write(state.path().join("leaks.state"), &bytes[..40]).unwrap();
        assert!(Store::open(state.path(), wall()).1.pods.is_empty());
    }

    #[test]
    fn an_agent_that_is_killed_while_it_writes_leaves_what_was_written_before() {
        let state = tempfile::tempdir().unwrap();
        let [full, empty] = snapshots(state.path());
        full.write();
        let (bytes, unfinished) = (encoded(&empty), state.path().join("leaks.unfinished"));
        for length in 0..=bytes.len() {
            // All of it may be there, and only the name be missing.
            fs::write(&unfinished, &bytes[..length]).unwrap();
            assert_eq!(Store::open(state.path(), wall()).1.pods.len(), 1, "{length}");
        }
        // What is longer than what follows is cut off.
        fs::write(&unfinished, vec![7; 2 * encoded(&full).len()]).unwrap();
        full.write();
        assert_eq!(Store::open(state.path(), wall()).1.pods.len(), 1);
        assert!(!unfinished.exists());
    }

    #[test]
    fn that_nobody_is_watched_any_more_is_written_and_that_nobody_ever_was_is_not() {
        let state = tempfile::tempdir().unwrap();
        let empty = |store: &mut Store| {
            let pods = HashMap::new();
            store.snapshot(&pods, &Workloads::default(), Millis(5), wall(), Millis(5))
        };
        assert!(empty(&mut Store::open(state.path(), wall()).0).is_none());
        let [full, gone] = snapshots(state.path());
        full.write();
        assert!(empty(&mut Store::open(state.path(), wall()).0).is_some(), "an earlier agent watched one");
        gone.write();
        let (_, found) = Store::open(state.path(), wall());
        assert_eq!((found.pods.len(), found.clock), (0, 1_000_000), "and the clock goes on");
    }

    #[tokio::test]
    async fn one_writer_writes_to_the_last_that_was_taken() {
        let state = tempfile::tempdir().unwrap();
        let (send, snapshots_taken) = tokio::sync::mpsc::unbounded_channel();
        let writer = tokio::spawn(keep(snapshots_taken));
        for _ in 0..20 {
            let [full, empty] = snapshots(state.path());
            send.send(Box::new(full)).unwrap();
            // It may be at work on one of them, or not.
            tokio::task::yield_now().await;
            send.send(Box::new(empty)).unwrap();
        }
        send.send(Box::new(snapshot(state.path()))).unwrap();
        drop(send);
        writer.await.unwrap();
        assert_eq!(Store::open(state.path(), wall()).1.pods.len(), 1);
        assert!(!state.path().join("leaks.unfinished").exists());
    }

    #[test]
    fn another_version_is_left_aside() {
        let state = tempfile::tempdir().unwrap();
        let mut snapshot = snapshot(state.path());
        snapshot.head.version = 9;
        assert_eq!(decode(&encoded(&snapshot), wall()).unwrap_err(), Broken::Version(9));
    }
}
