//! Parked pods: whose memory of a device is on the host, and when it comes back.
//!
//! What is parked is known from the keeper, which knows it from the driver: this agent keeps nothing of it,
//! and so loses nothing. While the keeper is away nobody knows, and nothing is begun.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use highwater_crds::Level;
use highwater_policy::{
    ledger::{Charge, Holder},
    park::{self, Facts, Host, Parked, Refused},
    time::Millis,
};
use tracing::{info, warn};

use crate::{
    host::{Survey, Surveyed},
    keeper_protocol::{MOST_PROCESSES, Moved, Park, ParkAsk, ParkState, Parking, Process},
    link,
};

/// How long the driver may wait for a process to be between two of its calls, in milliseconds.
const LOCK: u32 = 10_000;
/// How often it is looked up what room there is for a pod that might be parked, in milliseconds.
const SURVEY_EVERY: u64 = 10_000;

/// UIDs of a pod, as the kubelet knows it, and of a device.
pub(crate) type Place = (Arc<str>, Arc<str>);

/// The parked pods of the node, and those that might be.
#[derive(Debug, Default)]
pub(crate) struct Parks {
    /// What the keeper said last; `None` while it does not answer, or cannot park.
    parking: Option<Parking>,
    /// What it was asked and has not answered.
    asked: BTreeMap<Place, Asked>,
    refused: HashMap<Place, Refused>,
    /// Pods that opted in, on the devices that they use.
    candidates: BTreeMap<Place, Candidate>,
    /// What came of parking, until somebody asks.
    outcomes: BTreeMap<Place, Result<u64, Undone>>,
    /// Moves by what came of them: parked, restored, refused, failed.
    pub(crate) moves: BTreeMap<(&'static str, &'static str), u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    /// So many bytes.
    Park(u64),
    Restore,
}

/// Why a pod is not parked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Undone {
    /// It runs as before.
    Running(String),
    /// The driver lost a process of it: it must be restarted.
    Lost(String),
}

/// A pod that opted in.
#[derive(Debug, Default)]
struct Candidate {
    pids: Vec<u32>,
    surveyed: Option<Surveyed>,
    looked: Option<Millis>,
}

/// A pod that is parked, or whose processes were lost, for longer than it may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Overdue {
    /// UID of the pod.
    pub(crate) pod: Arc<str>,
    /// UUID of the device.
    pub(crate) device: Arc<str>,
    /// Bytes that it is owed there.
    pub(crate) bytes: u64,
    /// Why it is to be restarted.
    pub(crate) why: String,
}

/// What a pod is, beside what is known here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Subject {
    /// Level of the breaker that asks.
    pub(crate) level: Level,
    /// It opted in by its label.
    pub(crate) opted_in: bool,
    /// What it holds on the device.
    pub(crate) used: Option<u64>,
    /// It holds memory of other devices.
    pub(crate) other_devices: bool,
    /// A process on the device uses managed memory, as far as that can be ruled out.
    pub(crate) managed: bool,
    /// The most that parked pods may take on the host.
    pub(crate) most: Option<u64>,
}

impl Parks {
    /// The keeper answers, and says this of parking.
    pub(crate) fn up(&mut self, parking: Option<&Parking>) {
        self.parking = parking.cloned();
    }

    /// The keeper does not answer. What it was asked is known when it answers again.
    pub(crate) fn away(&mut self) {
        self.parking = None;
        self.asked.clear();
    }

    /// Whether it is known what is parked.
    pub(crate) fn is_known(&self) -> bool {
        self.parking.is_some()
    }

    /// What is parked, under way or lost.
    pub(crate) fn all(&self) -> &[Park] {
        self.parking.as_ref().map_or(&[], |parking| parking.parks.as_slice())
    }

    /// How far the park of a pod on a device is; `None` where it runs.
    pub(crate) fn state(&self, pod: &str, device: &str) -> Option<ParkState> {
        self.parking.as_ref()?.find(pod, device).map(|park| park.state)
    }

    /// Bytes of a pod on the host that it is owed on a device.
    pub(crate) fn bytes(&self, pod: &str, device: &str) -> Option<u64> {
        let park = self.parking.as_ref()?.find(pod, device)?;
        matches!(park.state, ParkState::Parked | ParkState::Restoring | ParkState::Lost).then_some(park.bytes)
    }

    /// How many pods are parked on a device.
    pub(crate) fn count(&self, device: &str) -> usize {
        let parked = |park: &&Park| park.device == device && park.state != ParkState::Running;
        self.all().iter().filter(parked).count()
    }

    /// A device was sampled: notes the processes of pods that opted in, `pods`, and asks what room there is
    /// for them.
    pub(crate) fn sample(
        &mut self,
        device: &Arc<str>,
        charges: &[Charge],
        pods: &[Arc<str>],
        now: Millis,
        mut survey: impl FnMut(Survey),
    ) {
        self.candidates.retain(|(pod, of), _| of != device || pods.contains(pod));
        for pod in pods {
            let of_pod =
                |charge: &&Charge| matches!(&charge.holder, Holder::Container { pod: of, .. } if of == pod);
            let mut processes: Vec<u32> = charges.iter().filter(of_pod).map(|charge| charge.pid).collect();
            processes.sort_unstable();
            processes.dedup();
            let candidate = self.candidates.entry((Arc::clone(pod), Arc::clone(device))).or_default();
            let changed = candidate.pids != processes;
            if changed {
                candidate.surveyed = None;
                candidate.pids = processes;
            }
            let due = candidate.looked.is_none_or(|looked| now.since(looked) >= SURVEY_EVERY);
            if (changed || due) && !candidate.pids.is_empty() && self.parking.is_some() {
                candidate.looked = Some(now);
                let (pod, device) = (Arc::clone(pod), Arc::clone(device));
                survey(Survey { pod, device, pids: candidate.pids.clone() });
            }
        }
    }

    /// What was found of a pod that might be parked.
    pub(crate) fn surveyed(&mut self, surveyed: Surveyed) {
        let place = (Arc::clone(&surveyed.pod), Arc::clone(&surveyed.device));
        if let Some(candidate) = self.candidates.get_mut(&place) {
            let same = surveyed.processes.as_ref().is_some_and(|found| found.len() == candidate.pids.len());
            candidate.surveyed = Some(surveyed).filter(|_| same);
        }
    }

    /// Whether a pod may be parked: the bytes that it frees, or why not.
    pub(crate) fn may(
        &self,
        pod: &Arc<str>,
        device: &Arc<str>,
        subject: Subject,
    ) -> Result<u64, park::Refusal> {
        let place = (Arc::clone(pod), Arc::clone(device));
        let surveyed = self.candidates.get(&place).and_then(|candidate| candidate.surveyed.as_ref());
        let host = Host {
            cgroup_room: surveyed.and_then(|surveyed| surveyed.room),
            available: surveyed.and_then(|surveyed| surveyed.available),
            parked: self.all().iter().fold(0, |sum, park| sum.saturating_add(park::host_bytes(park.bytes))),
            most: subject.most,
        };
        park::may_park(&Facts {
            opted_in: subject.opted_in,
            level: subject.level,
            able: self.parking.as_ref().is_some_and(|parking| parking.unable.is_none()),
            parked: self.state(pod, device).is_some() || self.asked.contains_key(&place),
            image: subject.used,
            other_devices: subject.other_devices,
            // What is lent or shared shows in no list: the keeper's worker finds out and refuses.
            imported: false,
            exported: false,
            managed: subject.managed,
            host,
        })
    }

    /// Begins to park a pod that holds `bytes`. An error says why that cannot be done.
    pub(crate) fn park(
        &mut self,
        pod: &Arc<str>,
        device: &Arc<str>,
        bytes: u64,
        mut order: impl FnMut(link::Order),
    ) -> Result<(), String> {
        let place = (Arc::clone(pod), Arc::clone(device));
        let surveyed = self.candidates.get(&place).and_then(|candidate| candidate.surveyed.as_ref());
        let Some(processes) = surveyed.and_then(|surveyed| surveyed.processes.clone()) else {
            return Err("its processes are not known".to_owned());
        };
        if processes.is_empty() || processes.len() > MOST_PROCESSES {
            return Err(format!(
                "it has {} processes there, and at most {MOST_PROCESSES} are parked together",
                processes.len()
            ));
        }
        self.outcomes.remove(&place);
        self.asked.insert(place, Asked::Park(bytes));
        info!(%pod, %device, bytes, processes = processes.len(), "parking");
        order(link::Order::Park(ParkAsk {
            pod: pod.to_string(),
            device: device.to_string(),
            processes: Vec::<Process>::clone(&processes),
            bytes,
            lock_milliseconds: LOCK,
        }));
        Ok(())
    }

    /// Whether something of a pod on a device is under way.
    pub(crate) fn is_moving(&self, pod: &Arc<str>, device: &Arc<str>) -> bool {
        let under_way = matches!(
            self.state(pod, device),
            Some(ParkState::Parking | ParkState::Restoring | ParkState::Other)
        );
        under_way || self.asked.contains_key(&(Arc::clone(pod), Arc::clone(device)))
    }

    /// What came of a move.
    pub(crate) fn moved(&mut self, pod: &str, device: &str, result: Result<Moved, String>, now: Millis) {
        let place: Place = (pod.into(), device.into());
        let Some(asked) = self.asked.remove(&place) else { return };
        let (state, message) = match result {
            Ok(moved) => {
                // The status that follows says the same; nothing waits for it.
                self.note(&place, moved.state, asked);
                (Some(moved.state), moved.message.unwrap_or_default())
            }
            Err(error) => (None, error),
        };
        let (what, outcome) = match (asked, state) {
            (Asked::Park(bytes), Some(ParkState::Parked)) => {
                self.outcomes.insert(place, Ok(bytes));
                ("park", "done")
            }
            (Asked::Park(_), Some(ParkState::Lost)) => {
                self.outcomes.insert(place, Err(Undone::Lost(message.clone())));
                ("park", "lost")
            }
            (Asked::Park(_), _) => {
                self.outcomes.insert(place, Err(Undone::Running(message.clone())));
                ("park", "failed")
            }
            (Asked::Restore, Some(ParkState::Running)) => {
                self.refused.remove(&place);
                ("restore", "done")
            }
            (Asked::Restore, Some(ParkState::Lost)) => ("restore", "lost"),
            (Asked::Restore, _) => {
                let refused = self.refused.entry(place).or_default();
                *refused = refused.again(now);
                ("restore", "refused")
            }
        };
        *self.moves.entry((what, outcome)).or_default() += 1;
        if outcome == "done" {
            info!(pod, device, what, "moved");
        } else {
            warn!(pod, device, what, outcome, message, "not moved");
        }
    }

    fn note(&mut self, (pod, device): &Place, state: ParkState, asked: Asked) {
        let Some(parking) = &mut self.parking else { return };
        if state == ParkState::Running {
            parking.parks.retain(|park| *park.pod != **pod || *park.device != **device);
        } else if let Some(park) =
            parking.parks.iter_mut().find(|park| *park.pod == **pod && *park.device == **device)
        {
            park.state = state;
        } else if let Asked::Park(bytes) = asked {
            let (pod, device) = (pod.to_string(), device.to_string());
            // Since when is told right after.
            parking.parks.push(Park { pod, device, bytes, state, since: u64::MAX, message: None });
        }
    }

    /// What came of parking a pod, since it was begun.
    pub(crate) fn outcome(&self, pod: &Arc<str>, device: &Arc<str>) -> Option<&Result<u64, Undone>> {
        self.outcomes.get(&(Arc::clone(pod), Arc::clone(device)))
    }

    /// Restores the next pod of a device, if there is room: `free` bytes that are owed to nobody else.
    pub(crate) fn restore(
        &mut self,
        device: &Arc<str>,
        free: Option<u64>,
        level: Level,
        priority: impl Fn(&str) -> i32,
        now: Millis,
        mut order: impl FnMut(link::Order),
    ) {
        // One after the other: what the first takes is not free for the second.
        if self.parking.is_none() || self.asked.keys().any(|(_, of)| of == device) {
            return;
        }
        let here = || self.all().iter().filter(|park| *park.device == **device);
        if here().any(|park| matches!(park.state, ParkState::Parking | ParkState::Restoring)) {
            return;
        }
        let places: Vec<(Place, Parked<'_>)> = here()
            .filter(|park| park.state == ParkState::Parked)
            .map(|park| {
                let place: Place = (park.pod.as_str().into(), Arc::clone(device));
                let refused = self.refused.get(&place).copied().unwrap_or_default();
                let parked = Parked {
                    uid: &park.pod,
                    priority: priority(&park.pod),
                    since: i64::try_from(park.since).unwrap_or(i64::MAX),
                    image: park.bytes,
                    refused,
                };
                (place, parked)
            })
            .collect();
        let parked: Vec<Parked<'_>> = places.iter().map(|(_, parked)| parked.clone()).collect();
        let next = park::next_restore(&parked, free, level, now).and_then(|at| places.get(at));
        let Some(place) = next.map(|(place, _)| place.clone()) else { return };
        info!(pod = %place.0, %device, "restoring");
        order(link::Order::Restore { pod: place.0.to_string(), device: device.to_string() });
        self.asked.insert(place, Asked::Restore);
    }

    /// Asks for everything back, whatever the level: the pods are not to be left behind.
    pub(crate) fn restore_all(&mut self, mut order: impl FnMut(link::Order)) {
        let parked = self.all().iter().filter(|park| park.state == ParkState::Parked);
        let places: Vec<Place> =
            parked.map(|park| (park.pod.as_str().into(), park.device.as_str().into())).collect();
        for place in places {
            if !self.asked.contains_key(&place) && !self.refused.contains_key(&place) {
                order(link::Order::Restore { pod: place.0.to_string(), device: place.1.to_string() });
                self.asked.insert(place, Asked::Restore);
            }
        }
    }

    /// The pods that are to be restarted instead of being restored: those that were lost, and those that
    /// have been parked for too long. `wall` is in milliseconds since the epoch.
    pub(crate) fn overdue(&self, wall: u64, max_minutes: impl Fn(&str) -> i32) -> Vec<Overdue> {
        let of = |park: &Park| {
            let why = match park.state {
                ParkState::Lost => format!(
                    "the driver lost a process while its memory was moved{}",
                    park.message.as_ref().map(|message| format!(": {message}")).unwrap_or_default()
                ),
                ParkState::Parked => {
                    let minutes = max_minutes(&park.device);
                    if !park::is_overdue(wall.saturating_sub(park.since), minutes) {
                        return None;
                    }
                    format!("it has been parked for {minutes} min and there was no room to restore it")
                }
                _ => return None,
            };
            let (pod, device) = (park.pod.as_str().into(), park.device.as_str().into());
            Some(Overdue { pod, device, bytes: park.bytes, why })
        };
        self.all().iter().filter_map(of).collect()
    }

    /// Forgets pods that are gone.
    pub(crate) fn retain(&mut self, is_there: impl Fn(&str) -> bool) {
        self.candidates.retain(|(pod, _), _| is_there(pod));
        self.refused.retain(|(pod, _), _| is_there(pod));
        self.outcomes.retain(|(pod, _), _| is_there(pod));
    }
}
