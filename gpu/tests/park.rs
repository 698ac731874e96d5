//! Moving the memory of processes to the host and back, against a simulated driver. A daemon of its
//! own, served by a thread of this process.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

#[allow(dead_code, reason = "other tests use the rest")]
mod host;

use std::{
    env,
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{LazyLock, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use gpusim::{
    client::Client,
    protocol::{MemoryKind, ProcessList, Region, Reply, Request},
};
use highwater_gpu::{Checkpoint, ParkError, ProcessState};

use host::Host;

const GIB: u64 = 1 << 30;
const WHOLE: Region = Region { device: 0, instance: None };
/// Tells a run of this program that it is the process to be parked.
const PARKED: &str = "HIGHWATER_TEST_PARKED";

static HOST: LazyLock<Host> = LazyLock::new(|| {
    let config =
        r#"{"contextOverhead": 0, "openOverhead": 0, "devices": [{"memory": "8Gi", "reserved": 0}]}"#;
    Host::start(config, &["gpusim-cuda"])
});

/// The tests share one device.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // The process of the test before may be on its way out.
    let began = Instant::now();
    while used() != 0 {
        assert!(began.elapsed() < Duration::from_secs(10), "{} bytes stay in use", used());
        thread::sleep(Duration::from_millis(1));
    }
    alone
}

fn used() -> u64 {
    Client::connect(&HOST.socket).unwrap().show().unwrap().memory[0].unwrap().used
}

/// Not a test by itself: a process with 5 GiB that takes 1 MiB for each line that it is sent.
#[test]
fn child() {
    let Some(socket) = env::var_os(PARKED) else { return };
    let mut client = Client::connect(socket.as_ref()).unwrap();
    client.call(&Request::Attach { devices: vec![0], lists: vec![ProcessList::Compute] }).unwrap();
    let mut take = |bytes| {
        let request = Request::Allocate { region: WHOLE, kind: MemoryKind::Plain, bytes, context: None };
        assert!(matches!(client.call(&request), Ok(Reply::Made(_))));
    };
    take(5 * GIB);
    println!("taken");
    for line in std::io::stdin().lines() {
        line.unwrap();
        take(1 << 20);
        println!("taken");
    }
}

struct Parked {
    child: Child,
    input: ChildStdin,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Parked {
    fn start() -> Self {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", "child", "--nocapture"]).env(PARKED, &HOST.socket);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut parked = Self { input: child.stdin.take().unwrap(), child, lines };
        parked.await_taken();
        parked
    }

    fn await_taken(&mut self) {
        assert!(self.lines.by_ref().map_while(Result::ok).any(|line| line.contains("taken")));
    }

    fn pid(&self) -> i32 {
        self.child.id().try_into().unwrap()
    }
}

impl Drop for Parked {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn checkpoint() -> Checkpoint {
    Checkpoint::open(Some(&HOST.libraries.join("libgpusim_cuda.so"))).unwrap()
}

#[test]
fn memory_leaves_the_device_and_comes_back() {
    let _alone = alone();
    let driver = checkpoint();
    let mut parked = Parked::start();
    let pid = parked.pid();
    let whole = used();
    assert_eq!(driver.state(pid).unwrap(), ProcessState::Running);
    driver.lock(pid, Duration::from_secs(1)).unwrap();
    assert_eq!(driver.state(pid).unwrap(), ProcessState::Locked);
    driver.checkpoint(pid).unwrap();
    assert_eq!(driver.state(pid).unwrap(), ProcessState::Checkpointed);
    assert_eq!(used(), whole - 5 * GIB);
    // What it asks for meanwhile waits.
    writeln!(parked.input, "more").unwrap();
    driver.restore(pid).unwrap();
    assert_eq!(used(), whole);
    driver.unlock(pid).unwrap();
    assert_eq!(driver.state(pid).unwrap(), ProcessState::Running);
    parked.await_taken();
    assert_eq!(used(), whole + (2 << 20));
}

#[test]
fn each_refusal_is_told_apart() {
    let _alone = alone();
    let driver = checkpoint();
    let parked = Parked::start();
    let pid = parked.pid();
    let error = driver.restore(pid).unwrap_err();
    assert!(error.other_state() && !error.is_final(), "{error}");
    assert_eq!(
        error.to_string(),
        format!("cuCheckpointProcessRestore of process {pid}: CUDA_ERROR_ILLEGAL_STATE (401)")
    );
    let own = i32::try_from(std::process::id()).unwrap();
    for nobody in [0, -1, 1 << 22] {
        let error = driver.state(nobody).unwrap_err();
        assert!(matches!(error, ParkError::Refused { code: 1, .. }), "{error}");
    }
    driver.lock(pid, Duration::ZERO).unwrap();
    driver.checkpoint(pid).unwrap();
    let mut other = Client::connect(&HOST.socket).unwrap();
    let request = Request::Allocate { region: WHOLE, kind: MemoryKind::Plain, bytes: 4 * GIB, context: None };
    other.call(&request).unwrap();
    let error = driver.restore(pid).unwrap_err();
    assert!(error.out_of_memory() && !error.other_state(), "{error}");
    assert_eq!(driver.state(pid).unwrap(), ProcessState::Checkpointed);
    drop(other);
    assert_eq!(driver.state(own).unwrap(), ProcessState::Running);
}
