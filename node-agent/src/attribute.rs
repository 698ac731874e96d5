//! From a PID that the driver lists to the pod it belongs to.
//!
//! `/proc` is read once for each process. What was learnt is kept for as long as that very
//! process lives, which a pidfd tells: one system call a sample asks the kernel which of them
//! ended. A PID that is used again is therefore never taken for its former owner. Where there is
//! no pidfd to be had, the start time is compared at each look instead.

use std::{
    collections::HashMap,
    fs, io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::{
    event::{
        Timespec,
        epoll::{self, CreateFlags, Event, EventData, EventFlags},
    },
    io::Errno,
    process::{Pid, PidfdFlags, pidfd_open},
};

use crate::cgroup::{self, CgroupOwner};

/// Processes kept at most. Far above what devices can serve; a bound against a driver or a
/// tenant gone wild.
const CAPACITY: usize = 4096;

/// A process that was not asked for in this many samples is forgotten.
const FORGET_AFTER: u64 = 600;

/// How long the memory of a process that has ended stays its owner's. The driver takes a while to
/// free much memory and lists it until then.
const DYING: Duration = Duration::from_secs(2);

/// Whose a process is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// A pod's.
    Pod(Arc<CgroupOwner>),
    /// Of no pod.
    Foreign,
    /// There is no such process (any more).
    Gone,
    /// It cannot be told.
    Unknown,
}

/// Knows the owners of processes.
#[derive(Debug)]
pub(crate) struct Attributor {
    proc_root: PathBuf,
    known: HashMap<u32, Known>,
    /// Holds the pidfd of every known process that has one; absent where the kernel gives none.
    exits: Option<OwnedFd>,
    sample: u64,
    now: Instant,
}

#[derive(Debug)]
struct Known {
    owner: Owner,
    comm: Box<str>,
    start_ticks: u64,
    /// Readable once the process has ended. Absent: compare `start_ticks` instead.
    pidfd: Option<OwnedFd>,
    /// When it was seen to have ended.
    ended: Option<Instant>,
    last_asked: u64,
}

/// What `/proc` says of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    /// Whose it is.
    pub(crate) owner: Owner,
    /// Its command name, which is what it says of itself.
    pub(crate) comm: Box<str>,
    /// When it started, in clock ticks since boot.
    pub(crate) start_ticks: u64,
}

/// Why nothing is known of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Missing {
    /// There is no such process, or only its remains.
    Gone,
    /// It could not be read.
    Unreadable,
}

impl From<io::Error> for Missing {
    fn from(error: io::Error) -> Self {
        let errno = Errno::from_io_error(&error);
        if matches!(errno, Some(Errno::NOENT | Errno::SRCH)) { Self::Gone } else { Self::Unreadable }
    }
}

impl Attributor {
    /// Reads processes below `proc_root`, which is `/proc` of the host's PID namespace.
    pub(crate) fn new(proc_root: impl Into<PathBuf>) -> Self {
        let exits = epoll::create(CreateFlags::CLOEXEC).ok();
        Self { proc_root: proc_root.into(), known: HashMap::new(), exits, sample: 0, now: Instant::now() }
    }

    /// Readable while there are processes that have ended and were not noted.
    pub(crate) fn exits(&self) -> Option<&OwnedFd> {
        self.exits.as_ref()
    }

    /// Begins a sample: notes the processes that have ended. To be called after the driver gave
    /// its lists and before their PIDs are looked up.
    pub(crate) fn begin_sample(&mut self) {
        self.begin_sample_at(Instant::now());
    }

    fn begin_sample_at(&mut self, now: Instant) {
        // The driver lists no more who ended and was not asked for at the last sample.
        let last = self.sample;
        self.known.retain(|_, known| known.ended.is_none() || known.last_asked >= last);
        self.sample += 1;
        self.now = now;
        if let Some(exits) = &self.exits {
            let mut ended = [Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; 64];
            while let Ok(count @ 1..) = epoll::wait(exits, &mut ended[..], Some(&NOW)) {
                for event in ended.iter().take(count) {
                    let pid = event.data;
                    let known = u32::try_from(pid.u64()).ok().and_then(|pid| self.known.get_mut(&pid));
                    if let Some(known) = known {
                        known.pidfd = None; // which takes it out of the epoll set
                        known.ended = Some(now);
                    }
                }
            }
        }
        if self.sample.is_multiple_of(FORGET_AFTER) {
            let oldest = self.sample - FORGET_AFTER;
            self.known.retain(|_, known| known.last_asked > oldest);
        }
    }

    /// The owner of the process `pid`.
    pub(crate) fn owner(&mut self, pid: u32) -> Owner {
        let (sample, now) = (self.sample, self.now);
        // As nearly always: it is known, and has not ended.
        if let Some(known) = self.known.get_mut(&pid).filter(|known| known.pidfd.is_some()) {
            known.last_asked = sample;
            return known.owner.clone();
        }
        match self.look_up(pid) {
            Ok(known) if known.ended.is_some_and(|at| now.saturating_duration_since(at) > DYING) => {
                Owner::Gone
            }
            Ok(known) => known.owner.clone(),
            Err(Missing::Gone) => Owner::Gone,
            Err(Missing::Unreadable) => Owner::Unknown,
        }
    }

    /// The command name of the process `pid`, at most 15 bytes, as evidence for people. It is
    /// what the process says of itself.
    pub(crate) fn comm(&mut self, pid: u32) -> Option<&str> {
        self.look_up(pid).ok().map(|known| known.comm.as_ref())
    }

    fn look_up(&mut self, pid: u32) -> Result<&Known, Missing> {
        let (sample, now) = (self.sample, self.now);
        if let Some(known) = self.known.get_mut(&pid).filter(|known| known.pidfd.is_none()) {
            match read_stat(&self.proc_root, pid) {
                Ok(stat) if stat.start_ticks != known.start_ticks => drop(self.known.remove(&pid)),
                Ok(stat) if !stat.is_dead() => {}
                Ok(_) | Err(Missing::Gone) => known.ended = known.ended.or(Some(now)),
                Err(Missing::Unreadable) => return Err(Missing::Unreadable),
            }
        }
        if !self.known.contains_key(&pid) {
            let known = self.learn(pid)?;
            if self.known.len() >= CAPACITY {
                self.known.clear(); // costs one read a process to learn again
            }
            self.known.insert(pid, known);
        }
        let known = self.known.get_mut(&pid).ok_or(Missing::Gone)?;
        known.last_asked = sample;
        Ok(known)
    }

    /// Reads what there is to know of a process.
    fn learn(&self, pid: u32) -> Result<Known, Missing> {
        // The pidfd first: if it has not ended afterwards, what was read in between is of the
        // process that the pidfd stands for.
        let pidfd = self.watch(pid);
        let Identity { owner, comm, start_ticks } = identify(&self.proc_root, pid)?;
        Ok(Known { owner, comm, start_ticks, pidfd, ended: None, last_asked: self.sample })
    }

    /// A pidfd whose end shows in `exits`.
    fn watch(&self, pid: u32) -> Option<OwnedFd> {
        let exits = self.exits.as_ref()?;
        let pidfd = pidfd_open(i32::try_from(pid).ok().and_then(Pid::from_raw)?, PidfdFlags::empty()).ok()?;
        epoll::add(exits, &pidfd, EventData::new_u64(pid.into()), EventFlags::IN).ok()?;
        Some(pidfd)
    }
}

/// Reads what there is to know of a live process. It is of one process; of which, the caller can tell
/// by a pidfd that it opened before and that has not ended after.
pub(crate) fn identify(proc_root: &Path, pid: u32) -> Result<Identity, Missing> {
    let alive = || read_stat(proc_root, pid).and_then(Stat::alive);
    let before = alive()?;
    let process = proc_root.join(pid.to_string());
    let cgroup = if before.leader_ended {
        of_a_live_thread(&process)?
    } else {
        fs::read_to_string(process.join("cgroup"))?
    };
    let stat = alive()?;
    if stat.start_ticks != before.start_ticks {
        return Err(Missing::Gone);
    }
    let owner = cgroup::owner(&cgroup).map_or(Owner::Foreign, |owner| Owner::Pod(Arc::new(owner)));
    Ok(Identity { owner, comm: stat.comm, start_ticks: stat.start_ticks })
}

const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// What is used of `/proc/PID/stat`.
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    comm: Box<str>,
    /// When the process started, in clock ticks since boot.
    start_ticks: u64,
    /// Its first thread has ended; others may go on.
    leader_ended: bool,
    threads: u32,
}

impl Stat {
    /// Whether only the remains of a process are left. They hold no memory.
    fn is_dead(&self) -> bool {
        self.leader_ended && self.threads <= 1
    }

    fn alive(self) -> Result<Self, Missing> {
        if self.is_dead() { Err(Missing::Gone) } else { Ok(self) }
    }
}

/// When a live process started, in clock ticks since boot.
pub(crate) fn start_ticks(proc_root: &Path, pid: u32) -> Option<u64> {
    Some(read_stat(proc_root, pid).and_then(Stat::alive).ok()?.start_ticks)
}

fn read_stat(proc_root: &Path, pid: u32) -> Result<Stat, Missing> {
    read_stat_at(&proc_root.join(pid.to_string()))
}

/// Reads `stat` in the directory of a process or thread.
fn read_stat_at(directory: &Path) -> Result<Stat, Missing> {
    // A command name need not be UTF-8.
    let stat = fs::read(directory.join("stat"))?;
    parse_stat(&String::from_utf8_lossy(&stat)).ok_or(Missing::Unreadable)
}

fn parse_stat(text: &str) -> Option<Stat> {
    // The name is in parentheses and may contain some itself.
    let (head, fields) = text.rsplit_once(") ")?;
    let (_, comm) = head.split_once(" (")?;
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next()?;
    let threads = fields.nth(16)?.parse().ok()?;
    let start_ticks = fields.nth(1)?.parse().ok()?;
    Some(Stat { comm: comm.into(), start_ticks, leader_ended: matches!(state, "Z" | "X" | "x"), threads })
}

/// The text of `cgroup` of a thread that lives, in the directory of its process.
fn of_a_live_thread(process: &Path) -> Result<String, Missing> {
    for thread in fs::read_dir(process.join("task"))? {
        let thread = thread?.path();
        match read_stat_at(&thread) {
            Ok(stat) if !stat.leader_ended => {
                match fs::read_to_string(thread.join("cgroup")).map_err(Missing::from) {
                    Err(Missing::Gone) => {}
                    found => return found,
                }
            }
            Ok(_) | Err(Missing::Gone) => {}
            Err(unreadable) => return Err(unreadable),
        }
    }
    Err(Missing::Gone)
}

/// Bytes that the driver maps from [`UVM`] in every process with a context, managed memory or not.
const UVM_OWN_BYTES: u64 = 2 << 20;

/// The device file whose mappings are managed memory, after the common prefix.
const UVM: &str = "-uvm";

/// A live process that has a GPU's device files open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceUser {
    /// Its PID.
    pub(crate) pid: u32,
    /// Minor numbers of the GPUs that it has open, ascending.
    pub(crate) minors: Vec<u32>,
    /// Bytes of managed memory in its address space. How much of it is on a device, and on which,
    /// nobody can tell from outside; no process list of the driver shows any of it.
    pub(crate) managed_bytes: u64,
}

/// The processes that have device files of GPUs open: evidence for memory that no process list
/// explains. Reads the descriptors of every process on the node, so it is for rare use.
///
/// Also says whether there are processes of which the agent may not read that.
///
/// # Errors
/// Fails when `proc_root` cannot be listed.
pub(crate) fn device_users(proc_root: &Path) -> io::Result<(Vec<DeviceUser>, bool)> {
    let (mut users, mut denied) = (Vec::new(), false);
    let mut refused = |error: &io::Error| denied |= error.kind() == io::ErrorKind::PermissionDenied;
    for entry in fs::read_dir(proc_root)? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let process = proc_root.join(format!("{pid}"));
        let files = match fs::read_dir(process.join("fd")) {
            Ok(files) => files,
            Err(error) => {
                refused(&error);
                continue;
            }
        };
        let mut user = DeviceUser { pid, minors: Vec::new(), managed_bytes: 0 };
        for target in files.flatten().filter_map(|file| fs::read_link(file.path()).ok()) {
            match target.to_str().and_then(device_file) {
                Some(UVM) if user.managed_bytes == 0 => match fs::read_to_string(process.join("maps")) {
                    Ok(maps) => user.managed_bytes = managed_bytes(&maps),
                    Err(error) => refused(&error),
                },
                Some(minor) => user.minors.extend(minor.parse::<u32>().ok()),
                None => {}
            }
        }
        user.minors.sort_unstable();
        user.minors.dedup();
        if user.managed_bytes > 0 || !user.minors.is_empty() {
            users.push(user);
        }
    }
    users.sort_by_key(|user| user.pid);
    Ok((users, denied))
}

/// What tells the driver's device files apart: `0`, `ctl`, `-uvm`, ...
fn device_file(path: &str) -> Option<&str> {
    path.strip_prefix("/dev/nvidia")
}

/// The bytes of managed memory in the text of `/proc/PID/maps`.
fn managed_bytes(maps: &str) -> u64 {
    let mapped = maps.lines().filter_map(|line| {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let bytes = u64::from_str_radix(end, 16).ok()?.saturating_sub(u64::from_str_radix(start, 16).ok()?);
        (fields.nth(4).and_then(device_file) == Some(UVM)).then_some(bytes)
    });
    mapped.fold(0, u64::saturating_add).saturating_sub(UVM_OWN_BYTES)
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::fs::symlink,
        process::{Command, Stdio},
    };

    use super::*;

    const POD_A: &str = "0::/kubepods/burstable/pod8f0c1c3e-52f4-4c8e-9a66-6f5b4f2c9d10/x\n";
    const POD_B: &str = "0::/kubepods/burstable/pod00000000-1111-2222-3333-444444444444/x\n";
    /// Larger than any PID the kernel gives (2^22).
    const NO_PID: u32 = 1 << 30;

    struct FakeProc(tempfile::TempDir);

    impl FakeProc {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn process(&self, pid: u32, start: u64, state: char, cgroup: &str) {
            let dir = self.0.path().join(pid.to_string());
            fs::create_dir_all(dir.join("fd")).unwrap();
            fs::write(dir.join("stat"), stat(pid, start, state, 1)).unwrap();
            fs::write(dir.join("cgroup"), cgroup).unwrap();
        }

        fn thread(&self, pid: u32, tid: u32, state: char, cgroup: &str) {
            let dir = self.0.path().join(format!("{pid}/task/{tid}"));
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("stat"), stat(tid, 5, state, 2)).unwrap();
            fs::write(dir.join("cgroup"), cgroup).unwrap();
        }

        fn open_file(&self, pid: u32, fd: u32, target: &str) {
            symlink(target, self.0.path().join(format!("{pid}/fd/{fd}"))).unwrap();
        }
    }

    fn stat(pid: u32, start: u64, state: char, threads: u32) -> String {
        let zeros = "0 ".repeat(16);
        format!("{pid} (a) b (c) {state} {zeros}{threads} 0 {start} 9 9\n")
    }

    fn pod(owner: &Owner) -> &str {
        match owner {
            Owner::Pod(owner) => &owner.pod_uid,
            other => panic!("{other:?} is no pod"),
        }
    }

    #[test]
    fn a_process_is_its_pods_or_foreign_or_gone() {
        let proc = FakeProc::new();
        proc.process(NO_PID, 5, 'S', POD_A);
        proc.process(NO_PID + 1, 6, 'R', "0::/system.slice/x.service\n");
        proc.process(NO_PID + 2, 7, 'Z', POD_A);
        let mut attributor = Attributor::new(proc.0.path());
        attributor.begin_sample();
        assert_eq!(pod(&attributor.owner(NO_PID)), "8f0c1c3e-52f4-4c8e-9a66-6f5b4f2c9d10");
        assert_eq!(attributor.comm(NO_PID), Some("a) b (c"));
        assert_eq!(attributor.owner(NO_PID + 1), Owner::Foreign);
        assert_eq!(attributor.owner(NO_PID + 2), Owner::Gone);
        assert_eq!(attributor.owner(NO_PID + 3), Owner::Gone);
    }

    #[test]
    fn a_pid_used_again_belongs_to_its_new_owner() {
        let proc = FakeProc::new();
        let mut attributor = Attributor::new(proc.0.path());
        proc.process(NO_PID, 5, 'S', POD_A);
        attributor.begin_sample();
        let first = attributor.owner(NO_PID);
        proc.process(NO_PID, 900, 'S', POD_B);
        attributor.begin_sample();
        assert_ne!(attributor.owner(NO_PID), first);
        assert_eq!(pod(&attributor.owner(NO_PID)), "00000000-1111-2222-3333-444444444444");
    }

    #[test]
    fn the_end_of_a_real_process_is_seen_without_reading_proc() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let mut attributor = Attributor::new("/proc");
        attributor.begin_sample();
        let owner = attributor.owner(child.id());
        assert_ne!(owner, Owner::Gone);
        assert!(attributor.known[&child.id()].pidfd.is_some());
        assert_eq!(attributor.comm(child.id()), Some("cat"));
        attributor.begin_sample();
        assert_eq!(attributor.owner(child.id()), owner);
        child.kill().unwrap();
        child.wait().unwrap();
        // The driver lists it still: its memory is being freed.
        attributor.begin_sample();
        assert_eq!(attributor.owner(child.id()), owner);
        attributor.begin_sample_at(Instant::now() + 2 * DYING);
        assert_eq!(attributor.owner(child.id()), Owner::Gone);
        attributor.begin_sample();
        attributor.begin_sample();
        assert!(attributor.known.is_empty());
    }

    #[test]
    fn a_process_that_is_dying_keeps_its_owner_for_a_while_and_its_pid_used_again_has_another() {
        let proc = FakeProc::new();
        let mut attributor = Attributor::new(proc.0.path());
        proc.process(NO_PID, 5, 'S', POD_A);
        attributor.begin_sample();
        let owner = attributor.owner(NO_PID);
        proc.process(NO_PID, 5, 'Z', POD_A);
        attributor.begin_sample();
        assert_eq!(attributor.owner(NO_PID), owner);
        let at = attributor.now;
        attributor.begin_sample_at(at + DYING);
        assert_eq!(attributor.owner(NO_PID), owner);
        attributor.begin_sample_at(at + 2 * DYING);
        assert_eq!(attributor.owner(NO_PID), Owner::Gone);
        proc.process(NO_PID, 900, 'S', POD_B);
        attributor.begin_sample_at(at + 2 * DYING);
        assert_eq!(pod(&attributor.owner(NO_PID)), "00000000-1111-2222-3333-444444444444");
    }

    #[test]
    fn a_process_whose_first_thread_ended_lives_on_in_the_others() {
        let proc = FakeProc::new();
        proc.process(NO_PID, 5, 'Z', "0::/\n");
        fs::write(proc.0.path().join(format!("{NO_PID}/stat")), stat(NO_PID, 5, 'Z', 2)).unwrap();
        proc.thread(NO_PID, NO_PID, 'Z', "0::/\n");
        proc.thread(NO_PID, NO_PID + 1, 'S', POD_A);
        let mut attributor = Attributor::new(proc.0.path());
        for _ in 0..3 {
            attributor.begin_sample();
            assert_eq!(pod(&attributor.owner(NO_PID)), "8f0c1c3e-52f4-4c8e-9a66-6f5b4f2c9d10");
        }
    }

    #[test]
    fn a_process_that_cannot_be_read_is_not_called_gone() {
        let proc = FakeProc::new();
        // Reading a directory fails, whoever reads it.
        fs::create_dir_all(proc.0.path().join(format!("{NO_PID}/stat"))).unwrap();
        let mut attributor = Attributor::new(proc.0.path());
        attributor.begin_sample();
        assert_eq!(attributor.owner(NO_PID), Owner::Unknown);
    }

    #[test]
    fn many_ends_at_once_are_all_seen() {
        let mut children: Vec<_> = (0..100)
            .map(|_| Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap())
            .collect();
        let mut attributor = Attributor::new("/proc");
        attributor.begin_sample();
        for child in &children {
            assert_ne!(attributor.owner(child.id()), Owner::Gone);
        }
        for child in &mut children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        attributor.begin_sample();
        assert!(attributor.known.values().all(|known| known.ended.is_some()));
        attributor.begin_sample();
        assert!(attributor.known.is_empty());
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let proc = FakeProc::new();
        let mut attributor = Attributor::new(proc.0.path());
        proc.process(NO_PID, 1, 'S', POD_A);
        for _ in 0..2 * FORGET_AFTER {
            attributor.begin_sample();
        }
        attributor.owner(NO_PID);
        for _ in 0..2 * FORGET_AFTER {
            attributor.begin_sample();
        }
        assert!(attributor.known.is_empty());
        let most = u32::try_from(CAPACITY).unwrap();
        for pid in NO_PID + 1..NO_PID + most + 10 {
            symlink(NO_PID.to_string(), proc.0.path().join(pid.to_string())).unwrap();
            assert_ne!(attributor.owner(pid), Owner::Gone);
        }
        assert!(attributor.known.len() <= CAPACITY);
    }

    #[test]
    fn a_stat_line_is_read_by_its_last_parenthesis() {
        let zeros = "0 ".repeat(16);
        let stat = parse_stat(&format!("7 (x) S 1 (y) S {zeros}3 0 42 0")).unwrap();
        let comm = "x) S 1 (y".into();
        assert_eq!(stat, Stat { comm, start_ticks: 42, leader_ended: false, threads: 3 });
        for bad in ["", "7 (x", "7 (x) S", "7 (x) S 1 2 3"] {
            assert_eq!(parse_stat(bad), None, "{bad}");
        }
    }

    #[test]
    fn open_device_files_are_evidence() {
        let proc = FakeProc::new();
        for pid in [1, 2, 3] {
            proc.process(pid, 1, 'S', POD_A);
        }
        proc.open_file(1, 3, "/dev/nvidiactl");
        proc.open_file(1, 4, "/dev/null");
        proc.open_file(2, 3, "/dev/nvidia1");
        proc.open_file(2, 4, "/dev/nvidia0");
        proc.open_file(2, 5, "/dev/nvidia1");
        proc.open_file(3, 3, "/dev/nvidia0");
        proc.open_file(3, 4, "/dev/nvidia-uvm");
        let maps = "204a00000-204c00000 rw-s 204a00000 00:06 144      /dev/nvidia-uvm\n\
                    7f0000000000-7f0000001000 r-xp 00000000 08:01 7    /usr/lib/libc.so.6\n\
                    7f0000001000-7f0000002000 rw-p 00000000 00:00 0\n\
                    7f0040000000-7f0080000000 rw-s 7f0040000000 00:06 144 /dev/nvidia-uvm\n\
                    7f0080000000-7f0080001000 rw-s 00000000 00:06 140  /dev/nvidia0\n";
        fs::write(proc.0.path().join("3/maps"), maps).unwrap();
        fs::create_dir(proc.0.path().join("self")).unwrap();
        assert_eq!(
            device_users(proc.0.path()).unwrap(),
            (
                vec![
                    DeviceUser { pid: 2, minors: vec![0, 1], managed_bytes: 0 },
                    DeviceUser { pid: 3, minors: vec![0], managed_bytes: 1 << 30 },
                ],
                false
            )
        );
    }
}
