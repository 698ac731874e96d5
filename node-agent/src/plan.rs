//! The plan that the agent follows: the operator's, or the last one known, for as long as it
//! lives.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use highwater_crds::{GpuMemoryNode, GpuMemoryNodeSpec};
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
    /// When the API server was last heard.
    pub(crate) contact: Timestamp,
    /// What it says.
    pub(crate) spec: GpuMemoryNodeSpec,
}

impl Plan {
    /// The plan of a `GpuMemoryNode`.
    pub(crate) fn of(node: &str, object: &GpuMemoryNode, contact: Timestamp) -> Self {
        Self {
            version: VERSION,
            node: node.to_owned(),
            generation: object.metadata.generation,
            contact,
            spec: object.spec.clone(),
        }
    }

    /// How long ago the API server was last heard.
    pub(crate) fn age(&self, now: Timestamp) -> SignedDuration {
        now.duration_since(self.contact).max(SignedDuration::ZERO)
    }

    /// Whether it still binds: contact was not lost for longer than the life it states.
    pub(crate) fn binds(&self, now: Timestamp) -> bool {
        self.age(now) <= SignedDuration::from_secs(self.spec.plan_life_seconds.into())
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

    /// The plan in the file, if it is one of this node that can be read.
    pub(crate) fn load(&mut self, node: &str) -> Option<Plan> {
        let text = match fs::read(&self.path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => {
                warn!(%error, path = %self.path.display(), "cannot read the last plan: starting without");
                return None;
            }
        };
        match serde_json::from_slice::<Plan>(&text) {
            Ok(plan) if plan.version == VERSION && plan.node == node => {
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
                && plan.contact.duration_since(saved.contact) < SAVE_EVERY
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
        Plan::of(node, &GpuMemoryNode::new(node, spec), at(1000))
    }

    #[test]
    fn a_plan_binds_for_the_life_that_it_states() {
        assert!(plan("n1").binds(at(1600)));
        assert!(!plan("n1").binds(at(1601)));
        assert!(plan("n1").binds(at(0)), "a clock that was set back ends nothing");
    }

    #[test]
    fn the_last_plan_survives_a_restart_with_its_age() {
        let dir = tempfile::tempdir().unwrap();
        Cache::new(dir.path()).save(&plan("n1"));
        assert_eq!(Cache::new(dir.path()).load("n1"), Some(plan("n1")));
        assert_eq!(Cache::new(dir.path()).load("n2"), None, "another node's");
    }

    #[test]
    fn a_file_that_makes_no_sense_or_is_of_another_version_is_left_aside() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Cache::new(dir.path()).load("n1"), None);
        fs::write(dir.path().join("plan.json"), "{").unwrap();
        assert_eq!(Cache::new(dir.path()).load("n1"), None);
        write(&dir.path().join("plan.json"), &Plan { version: 9, ..plan("n1") }).unwrap();
        assert_eq!(Cache::new(dir.path()).load("n1"), None);
    }
}
