//! The plan that the agent follows: the operator's, or the last one known, for as long as it
//! lives.
//!
//! The time since the API server was heard is taken on the monotonic clock. Only how old the plan
//! in the file is can be told by nothing but the wall clock.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use highwater_crds::{GpuMemoryNode, GpuMemoryNodeSpec};
use highwater_policy::time::Millis;
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use tracing::{info, warn};

/// Version of the file's form.
const VERSION: u32 = 1;
/// How old the time of contact in the file may get.
const SAVE_EVERY: SignedDuration = SignedDuration::from_secs(30);

/// The plan in force.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Plan {
    version: u32,
    node: String,
    /// Generation of the `GpuMemoryNode`.
    pub(crate) generation: Option<i64>,
    /// When the API server was last heard, for a later agent.
    contact: Timestamp,
    /// The same on the monotonic clock; the start of this agent for a plan from the file.
    #[serde(skip)]
    heard: Millis,
    /// How old it was then, in milliseconds.
    #[serde(skip)]
    aged: u64,
    /// What it says.
    pub(crate) spec: GpuMemoryNodeSpec,
}

impl Plan {
    /// The plan of a `GpuMemoryNode`.
    pub(crate) fn of(node: &str, object: &GpuMemoryNode, now: Millis, wall: Timestamp) -> Self {
        Self {
            version: VERSION,
            node: node.to_owned(),
            generation: object.metadata.generation,
            contact: wall,
            heard: now,
            aged: 0,
            spec: object.spec.clone(),
        }
    }

    /// The API server was heard.
    pub(crate) fn confirm(&mut self, now: Millis, wall: Timestamp) {
        self.contact = wall;
        self.heard = now;
        self.aged = 0;
    }

    /// How long ago the API server was last heard.
    pub(crate) fn age(&self, now: Millis) -> Duration {
        Duration::from_millis(now.since(self.heard).saturating_add(self.aged))
    }

    /// Whether it still binds: contact was not lost for longer than the life it states.
    pub(crate) fn binds(&self, now: Millis) -> bool {
        self.age(now) <= Duration::from_secs(self.spec.plan_life_seconds.try_into().unwrap_or(0))
    }
}

/// The file that keeps the last plan over a restart.
#[derive(Debug)]
pub(crate) struct Cache {
    path: PathBuf,
    saved: Option<Plan>,
}

impl Cache {
    /// The file in the state directory.
    pub(crate) fn new(state_dir: &Path) -> Self {
        Self { path: state_dir.join("plan.json"), saved: None }
    }

    /// The plan in the file, if it is one of this node that can be read. `now` is the start of this
    /// agent.
    pub(crate) fn load(&mut self, node: &str, now: Millis, wall: Timestamp) -> Option<Plan> {
        let text = match fs::read(&self.path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => {
                warn!(%error, path = %self.path.display(), "cannot read the last plan: starting without");
                return None;
            }
        };
        match serde_json::from_slice::<Plan>(&text) {
            Ok(mut plan) if plan.version == VERSION && plan.node == node => {
                // A contact that is yet to come tells nothing of how long it has been.
                let aged = wall.duration_since(plan.contact).as_millis();
                plan.aged = u64::try_from(aged).unwrap_or(u64::MAX);
                plan.heard = now;
                info!(generation = plan.generation, contact = %plan.contact, "going on with the last plan");
                self.saved = Some(plan.clone());
                Some(plan)
            }
            Ok(plan) => {
                info!(
                    version = plan.version,
                    node = plan.node,
                    "the last plan is not for this agent: starting without"
                );
                None
            }
            Err(error) => {
                warn!(%error, "the last plan cannot be read: starting without");
                None
            }
        }
    }

    /// Keeps the plan, if it differs enough from what is kept.
    pub(crate) fn save(&mut self, plan: &Plan) {
        let fresh = self.saved.as_ref().is_some_and(|saved| {
            saved.spec == plan.spec
                && saved.generation == plan.generation
                && plan.contact.duration_since(saved.contact).abs() < SAVE_EVERY
        });
        if fresh {
            return;
        }
        // Said once a content, whether it can be written or not.
        self.saved = Some(plan.clone());
        if let Err(error) = write(&self.path, plan) {
            warn!(%error, path = %self.path.display(), "cannot keep the plan: a restart without the API server will only measure");
        }
    }
}

fn write(path: &Path, plan: &Plan) -> io::Result<()> {
    let unfinished = path.with_extension("unfinished");
    fs::write(&unfinished, serde_json::to_vec(plan)?)?;
    fs::rename(unfinished, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn plan(node: &str) -> Plan {
        let spec = GpuMemoryNodeSpec { plan_life_seconds: 600, ..GpuMemoryNodeSpec::default() };
        Plan::of(node, &GpuMemoryNode::new(node, spec), Millis(5_000), at(1000))
    }

    #[test]
    fn a_plan_binds_for_the_life_that_it_states_whatever_the_wall_clock_says() {
        let mut plan = plan("n1");
        assert!(plan.binds(Millis(605_000)));
        assert!(!plan.binds(Millis(605_001)));
        plan.confirm(Millis(605_001), at(1));
        assert!(plan.binds(Millis(1_205_001)));
    }

    #[test]
    fn the_last_plan_survives_a_restart_with_its_age() {
        let dir = tempfile::tempdir().unwrap();
        Cache::new(dir.path()).save(&plan("n1"));
        let load = |node, wall| Cache::new(dir.path()).load(node, Millis(0), at(wall));
        let loaded = load("n1", 1500).unwrap();
        assert_eq!(loaded.spec, plan("n1").spec);
        assert_eq!(loaded.age(Millis(1_000)), Duration::from_secs(501));
        assert!(loaded.binds(Millis(100_000)) && !loaded.binds(Millis(100_001)));
        assert_eq!(load("n2", 1500), None, "another node's");
        assert!(!load("n1", 999).unwrap().binds(Millis(0)), "of the future");
    }

    #[test]
    fn a_file_that_makes_no_sense_or_is_of_another_version_is_left_aside() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Cache::new(dir.path()).load("n1", Millis(0), at(1000)), None);
        fs::write(dir.path().join("plan.json"), "{").unwrap();
        assert_eq!(Cache::new(dir.path()).load("n1", Millis(0), at(1000)), None);
        write(&dir.path().join("plan.json"), &Plan { version: 9, ..plan("n1") }).unwrap();
        assert_eq!(Cache::new(dir.path()).load("n1", Millis(0), at(1000)), None);
    }
}
