//! A real Kubernetes on one machine for Highwater's end-to-end tests: etcd, API server,
//! controllers, kubelets, containerd and Helm, with simulated GPUs.
//!
//! The `cluster` program brings it up and down (`cluster up`, `cluster --help`); tests use it
//! through [`Cluster`]:
//!
//! ```no_run
//! use highwater_e2e::{Cluster, eventually};
//! # fn main() -> anyhow::Result<()> {
//! // Moves this thread into the cluster's network. The runtime of `block_on` is made there.
//! let cluster = Cluster::attach()?;
//! cluster.block_on(async {
//!     let client = cluster.client().await?; // kube, as the administrator
//!     cluster.install().await?; // the product, by its charts
//!     cluster.gpusim("n1", &["inject", "--device", "0", "lost"]).await?;
//!     cluster.kill("kube-scheduler").await?; // stays down until `start`
//!     # drop(client);
//!     anyhow::Ok(())
//! })?
//! # }
//! ```
//!
//! | file | concern |
//! |---|---|
//! | `lifecycle` | up, down, up to date |
//! | `packages`, `components`, `images` | what it is made of: Debian packages, built parts, container images |
//! | `pki`, `network`, `cgroup`, `namespace`, `mount_points` | what it stands on |
//! | `control_plane`, `node`, `prometheus`, `fleet` | what runs in it |
//! | `supervisor`, `control` | what keeps that running, and how it is asked for something |
//! | `cluster`, `install`, `wait` | what tests use |
//!
//! A node is a set of Linux namespaces (mounts, processes, network, host name) in which the usual
//! paths ([`node::OWN_PATHS`]) are folders of its own below [`paths::Paths::data`]. All processes
//! of a cluster are in one cgroup, by which `cluster down` finds them whatever happened before.
//!
//! Several clusters can stand side by side on one machine: `HIGHWATER_E2E_CLUSTER` says which one is
//! meant ([`paths::ClusterId`]). They share the machine and nothing else. The `lanes` program deals the
//! tests of a test program out over several.

pub mod cgroup;
pub mod cluster;
mod command;
pub mod components;
pub mod control;
mod control_plane;
pub mod fleet;
pub mod images;
mod install;
pub mod lifecycle;
mod mount_points;
pub mod namespace;
mod network;
pub mod node;
mod packages;
pub mod paths;
mod pki;
pub mod prometheus;
pub mod spec;
pub mod supervisor;
mod wait;

pub use cluster::Cluster;
pub use install::NAMESPACE;
pub use wait::{eventually, never};
