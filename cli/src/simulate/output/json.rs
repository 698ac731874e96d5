//! One JSON object a line.

use std::io::{self, Write};

use super::Output;
use crate::simulate::decision::Decision;

/// Writes objects, each on a line of its own.
#[derive(Debug)]
pub(crate) struct Json<W>(pub(crate) W);

impl<W: Write> Output for Json<W> {
    fn decision(&mut self, decision: &Decision<'_>) -> io::Result<()> {
        serde_json::to_writer(&mut self.0, decision)?;
        self.0.write_all(b"\n")
    }

    fn finish(&mut self, _whole: bool) -> io::Result<()> {
        self.0.flush()
    }
}
