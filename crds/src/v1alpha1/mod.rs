//! Version `v1alpha1`.

mod incident;
mod node;
mod policy;

pub use incident::*;
pub use node::*;
pub use policy::*;
