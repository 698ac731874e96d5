//! Version `v1alpha1`.

mod incident;
mod leaks;
mod node;
mod policy;

pub use incident::*;
pub use leaks::*;
pub use node::*;
pub use policy::*;
