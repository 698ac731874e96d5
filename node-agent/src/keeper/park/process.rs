//! Processes by number and start.

use std::{fs, path::Path};

use crate::keeper_protocol::Process;

/// Whether the process is there still, and is that one.
pub(crate) fn is_there(process: Process) -> bool {
    started(Path::new("/proc"), process.pid) == Some(process.started)
}

/// When a process started, in clock ticks since boot; `None` where there is none, or only a dead one
/// that its parent has not looked after.
pub(crate) fn started(root: &Path, pid: i32) -> Option<u64> {
    let stat = fs::read_to_string(root.join(pid.to_string()).join("stat")).ok()?;
    // The name, in brackets, may have spaces and brackets in it.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    if matches!(fields.next()?, "Z" | "X" | "x") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_is_read_whatever_the_name_is() {
        let root = tempfile::tempdir().unwrap();
        let write = |pid: i32, text: &str| {
            fs::create_dir_all(root.path().join(pid.to_string())).unwrap();
            fs::write(root.path().join(pid.to_string()).join("stat"), text).unwrap();
        };
        let rest = "1 1 1 0 -1 4194304 95 0 0 0 0 0 0 0 20 0 1 0 12345 0 0";
        write(7, &format!("7 (a) b) R) S {rest}"));
        write(8, &format!("8 (dead) Z {rest}"));
        write(9, "9 (cut");
        assert_eq!(started(root.path(), 7), Some(12345));
        assert_eq!([8, 9, 10].map(|pid| started(root.path(), pid)), [None; 3]);
        let own = i32::try_from(std::process::id()).unwrap();
        let started = started(Path::new("/proc"), own).unwrap();
        assert!(is_there(Process { pid: own, started }));
        assert!(!is_there(Process { pid: own, started: started + 1 }));
    }
}
