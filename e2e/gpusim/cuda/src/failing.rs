//! Calls that fail because a test wants it.

use std::ffi::c_uint;
use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;

/// Names a file of calls that fail: on each line the name of a function and the code that it answers
/// with, without doing anything. It is read at every call. No program of the real driver reads it.
const FAILING_VARIABLE: &str = "GPUSIM_FAILING_CALLS";

/// The code with which a function is to fail now.
pub(crate) fn code(function: &str) -> Option<c_uint> {
    static FILE: OnceLock<Option<PathBuf>> = OnceLock::new();
    let file = FILE.get_or_init(|| std::env::var_os(FAILING_VARIABLE).map(PathBuf::from)).as_ref()?;
    let lines = fs::read_to_string(file).ok()?;
    let mut calls = lines.lines().filter_map(|line| line.split_once(' '));
    calls.find(|(name, _)| *name == function).and_then(|(_, code)| code.parse().ok())
}
