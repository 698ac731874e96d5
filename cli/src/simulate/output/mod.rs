//! Where decisions go.

mod json;
mod table;

pub(crate) use self::{json::Json, table::Table};

use std::io;

use super::decision::Decision;

/// Takes decisions as they are made.
pub(crate) trait Output {
    /// One more.
    fn decision(&mut self, decision: &Decision<'_>) -> io::Result<()>;

    /// There are no more; or, where the recording was not read as a `whole`, no more are known.
    fn finish(&mut self, whole: bool) -> io::Result<()>;
}
