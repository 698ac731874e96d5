//! The API of Highwater: group `highwater.dev`, version `v1alpha1`.
//!
//! Types only: no client, no runtime. The schema, its CEL rules and the printer columns are
//! derived from these types; `cargo xtask generate` writes them to `crds/yaml` and to the
//! `highwater-crds` chart.

// The KubeSchema derive repeats each type inside a function, where `pub` reaches nobody.
#![allow(unreachable_pub)]
// Several `printcolumn` attributes stand on one type, as they must.
#![allow(clippy::duplicated_attributes)]

pub mod names;
mod size;
mod v1alpha1;

pub use size::{ByteSize, ParseSizeError};
pub use v1alpha1::*;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;

/// Every custom resource definition of the group, in the order in which they are installed.
pub fn all_crds() -> Vec<CustomResourceDefinition> {
    vec![GpuMemoryPolicy::crd(), GpuMemoryNode::crd(), GpuMemoryIncident::crd()]
}
