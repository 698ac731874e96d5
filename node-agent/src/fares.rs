//! How the host fares, as its `/proc` says it. Read seldom and beside the loop; what is told of it is
//! decided in `highwater_policy::host_status`.

use std::{fs, path::Path};

use highwater_policy::host_status::{CpuTime, Reading};

/// Reads the host. What cannot be read is missing.
pub(crate) fn read(proc_root: &Path) -> Reading {
    let text = |name| fs::read_to_string(proc_root.join(name)).ok();
    Reading {
        cpu: text("stat").and_then(|stat| cpu_time(&stat)),
        memory: text("meminfo").and_then(|meminfo| available(&meminfo)),
        oom_kills: text("vmstat").and_then(|vmstat| oom_kills(&vmstat)),
    }
}

/// What all processors did, by `/proc/stat`: user, nice, system, idle, iowait, irq, softirq, steal. What
/// follows is in the first two already.
fn cpu_time(stat: &str) -> Option<CpuTime> {
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let fields = line.split_ascii_whitespace().take(8);
    let fields: Vec<u64> = fields.map(|field| field.parse().ok()).collect::<Option<_>>()?;
    let [_, _, _, idle, waiting, ..] = fields.as_slice() else { return None };
    let total = fields.iter().try_fold(0u64, |sum, field| sum.checked_add(*field))?;
    Some(CpuTime { idle: idle.checked_add(*waiting)?, total })
}

/// `MemAvailable` of `/proc/meminfo`, in bytes.
fn available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
    kib.checked_mul(1024)
}

/// Processes killed for want of memory since the host started, by `/proc/vmstat`.
fn oom_kills(vmstat: &str) -> Option<u64> {
    vmstat.lines().find_map(|line| line.strip_prefix("oom_kill "))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_read_as_one_without_counting_guests_twice() {
        let stat = "cpu  10 20 30 400 50 6 7 8 9 10\ncpu0 1 1 1 1 1 1 1 1 1 1\nintr 5\nbtime 1\n";
        assert_eq!(cpu_time(stat), Some(CpuTime { idle: 450, total: 531 }));
        assert_eq!(cpu_time("cpu0 1 2 3 4 5 6 7 8 0 0\n"), None);
        assert_eq!(cpu_time("cpu  1 2 3\n"), None);
        assert_eq!(cpu_time("cpu  1 2 x 4 5 6 7 8\n"), None);
        assert_eq!(cpu_time(&format!("cpu  {} 2 3 4 5 6 7 8\n", u64::MAX)), None);
        assert_eq!(cpu_time(""), None);
    }

    #[test]
    fn available_memory_is_not_free_memory() {
        let meminfo = "MemTotal:  24684084 kB\nMemFree:  13617528 kB\nMemAvailable:   21763540 kB\n";
        assert_eq!(available(meminfo), Some(21_763_540 * 1024));
        assert_eq!(available("MemTotal:  1 kB\nMemFree:  1 kB\n"), None, "a kernel before 3.14");
        assert_eq!(available("MemAvailable:   much kB\n"), None);
        assert_eq!(available("MemAvailable:   1\n"), None);
    }

    #[test]
    fn kills_are_those_of_the_field_of_this_name() {
        assert_eq!(oom_kills("pgfault 9\noom_kill 3\noom_kill_of_another 5\n"), Some(3));
        assert_eq!(oom_kills("oom_kill_of_another 5\n"), None, "a kernel before 4.13");
        assert_eq!(oom_kills("oom_kill -1\n"), None);
    }

    #[test]
    fn what_is_not_there_is_missing_and_not_zero() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(read(root.path()), Reading::default());
        fs::write(root.path().join("vmstat"), "oom_kill 0\n").unwrap();
        assert_eq!(read(root.path()), Reading { oom_kills: Some(0), ..Reading::default() });
    }

    #[test]
    fn a_real_host_says_all_of_it() {
        let read = read(Path::new("/proc"));
        assert!(read.cpu.is_some_and(|cpu| cpu.idle <= cpu.total), "{read:?}");
        assert!(read.memory.is_some_and(|bytes| bytes > 0) && read.oom_kills.is_some(), "{read:?}");
    }
}
