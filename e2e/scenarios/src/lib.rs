//! What the scenarios share: a namespace and policies of their own, model servers on simulated
//! GPUs, waiting for conditions, and saying why when something did not happen.

// A JSON value indexed by a name that it lacks is null; it does not panic.
#![allow(clippy::indexing_slicing)]

mod acts;
mod audit;
mod cordon;
mod fleet;
mod inside;
mod metrics;
mod node;
mod objects;
mod operator;
mod report;
mod scenario;
mod strike;

pub use acts::acted;
pub use audit::Write;
pub use cordon::two_nodes;
pub use fleet::{FleetNode, SimulatedFleet};
use inside::elapsed;
pub use inside::{Call, Line, Ran, calls, infos};
pub use metrics::{Samples, parse_metrics};
pub use node::{Kept, restarts};
pub use objects::{
    ModelServer, PRESSURE_FILE, broken_by, critical, deployment, enforce, policy, priority_class,
};
pub use scenario::{Scenario, scenario};
pub use strike::Strike;

/// The node on which single-node scenarios run.
pub const NODE: &str = "n1";

/// The second real node, where there is one.
pub const OTHER_NODE: &str = "n2";

/// Namespace of the release.
pub const SYSTEM: &str = "highwater-system";

/// How long a condition may take where nothing else is said.
pub const TIMEOUT: std::time::Duration = std::time::Duration::from_mins(1);

/// One GiB in bytes.
pub const GI: i64 = 1 << 30;

/// One MiB in bytes.
pub const MI: i64 = 1 << 20;
