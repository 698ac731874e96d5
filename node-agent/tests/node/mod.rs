//! A node for a test: its simulated driver, its kubelet's directories, and keepers.

use std::{
    env, fs,
    os::fd::OwnedFd,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Output, Stdio},
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use gpusim::{
    client::Client,
    config::Config,
    daemon::Daemon,
    fault::{Fault, FaultKind},
    protocol::{Control, MemoryKind, ProcessList, Region, Request, SOCKET_VARIABLE},
};
use rustix::{
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with},
    process::{Pid, Signal, kill_process},
};
use tempfile::TempDir;
use tokio::time::sleep;

use crate::keeper_protocol::Keeper;

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;

/// No condition is awaited longer.
const PATIENCE: Duration = Duration::from_secs(20);

/// One GPU, and one cut in two. What a process has open costs nothing, so that only memory counts.
const CONFIG: &str = r#"{"contextOverhead": 0, "openOverhead": 0, "devices": [
    {},
    {"mig": [{"profile": "1g.18gb", "memory": "16Gi", "gpuInstance": 7},
             {"profile": "2g.35gb", "memory": "32Gi", "gpuInstance": 3}]}
]}"#;

/// Waits until it is so, and says what did not come.
pub(crate) async fn eventually(what: &str, mut is: impl AsyncFnMut() -> bool) {
    let started = Instant::now();
    while !is().await {
        assert!(started.elapsed() < PATIENCE, "no {what} in time");
        sleep(Duration::from_millis(5)).await;
    }
}

pub(crate) fn kill(pid: u32) {
    let pid = Pid::from_raw(pid.try_into().unwrap()).unwrap();
    // It may be gone already.
    let _ = kill_process(pid, Signal::KILL);
}

/// A connection without a word.
pub(crate) fn connect(path: &Path) -> OwnedFd {
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    socket
}

/// The directory of what is built, with the simulated libraries in it.
fn built() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let profile = Path::new(env!("CARGO_BIN_EXE_keeper")).parent().unwrap().to_owned();
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "-p", "gpusim-cuda", "-p", "gpusim-nvml", "--manifest-path"]);
        build.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml"));
        build.arg("--target-dir").arg(profile.parent().unwrap());
        if profile.ends_with("release") {
            build.arg("--release");
        }
        assert!(build.status().unwrap().success(), "the simulated libraries do not build");
        profile
    })
}

pub(crate) struct Node {
    directory: TempDir,
    gpu: PathBuf,
    simulator: Mutex<Client>,
    /// The whole GPU.
    pub(crate) uuid: String,
    /// The instances of the other.
    pub(crate) instances: Vec<String>,
}

impl Node {
    pub(crate) fn start() -> Self {
        Self::start_as(CONFIG)
    }

    /// With another host than usual, of two GPUs at least of which the second is cut.
    pub(crate) fn start_as(config: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let gpu = directory.path().join("gpu.sock");
        let config = Config::from_json(config).unwrap();
        let daemon = Daemon::bind(&gpu, config).unwrap();
        thread::spawn(|| daemon.serve());
        let mut client = Client::connect(&gpu).unwrap();
        let state = client.show().unwrap();
        let uuid = state.inventory.devices[0].uuid.clone();
        let instances = state.inventory.devices[1].instances.iter().map(|i| i.uuid.clone()).collect();
        for name in ["kubelet/pods", "kubelet/plugins_registry", "keeper"] {
            fs::create_dir_all(directory.path().join(name)).unwrap();
        }
        Self { directory, gpu, simulator: Mutex::new(client), uuid, instances }
    }

    /// With a keeper that holds, and an agent that is connected to it.
    pub(crate) async fn opened(self) -> (Self, KeeperProcess, Keeper) {
        let keeper = self.keeper().await;
        let agent = keeper.connect().await;
        (self, keeper, agent)
    }

    fn state(&self) -> gpusim::protocol::State {
        self.simulator.lock().unwrap().show().unwrap()
    }

    /// What is free on the whole GPU.
    pub(crate) fn free(&self) -> u64 {
        self.state().memory[0].as_ref().unwrap().free
    }

    /// How many processes hold memory.
    pub(crate) fn holders(&self) -> usize {
        self.state().holders.len()
    }

    /// Sees to it that descriptors alone keep so much.
    pub(crate) async fn assert_kept(&self, bytes: u64) {
        let kept = || self.state().kept.iter().map(|kept| kept.bytes).sum::<u64>();
        let started = Instant::now();
        while kept() != bytes {
            assert!(started.elapsed() < PATIENCE, "{} bytes are kept, not {bytes}", kept());
            sleep(Duration::from_millis(2)).await;
        }
    }

    /// Each call about the whole GPU takes longer.
    pub(crate) fn slow(&self, milliseconds: u64) {
        self.inject(FaultKind::Slow { milliseconds });
    }

    /// Begins a fault of the whole GPU.
    pub(crate) fn inject(&self, kind: FaultKind) {
        let fault = Fault { region: Region { device: 0, instance: None }, kind };
        self.simulator.lock().unwrap().control(Control::Inject(fault)).unwrap();
    }

    /// Makes this very process one that uses the whole GPU, for as long as the connection lasts.
    #[allow(dead_code, reason = "only what is parked is used")]
    pub(crate) fn use_gpu(&self, bytes: u64) -> Client {
        let mut client = Client::connect(&self.gpu).unwrap();
        let attach = Request::Attach { devices: vec![0], lists: vec![ProcessList::Compute] };
        client.call(&attach).unwrap();
        let region = Region { device: 0, instance: None };
        client.call(&Request::Allocate { region, kind: MemoryKind::Plain, bytes, context: None }).unwrap();
        client
    }

    pub(crate) fn fast(&self) {
        self.simulator.lock().unwrap().control(Control::Clear { device: None, kind: None }).unwrap();
    }

    /// Watches how much is used at least.
    pub(crate) fn watch_lowest(&self) -> Lowest {
        let (end, lowest) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(u64::MAX)));
        let mut client = Client::connect(&self.gpu).unwrap();
        let watch = thread::spawn({
            let (end, lowest) = (Arc::clone(&end), Arc::clone(&lowest));
            move || {
                while !end.load(Ordering::Relaxed) {
                    let used = client.show().unwrap().memory[0].as_ref().unwrap().used;
                    lowest.fetch_min(used, Ordering::Relaxed);
                }
            }
        });
        Lowest { end, used: lowest, watch }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("keeper/keeper.sock")
    }

    pub(crate) fn kubelet_root(&self) -> PathBuf {
        self.directory.path().join("kubelet")
    }

    pub(crate) fn registration(&self) -> PathBuf {
        self.kubelet_root().join("plugins_registry/registration@guard.highwater.dev.sock")
    }

    /// The directory of a pod's volume.
    pub(crate) fn volume(&self, uid: &str) -> PathBuf {
        self.kubelet_root().join(format!("pods/{uid}/volumes/kubernetes.io~csi/highwater-guard"))
    }

    fn serve(&self) -> Vec<String> {
        let libraries = [("--driver-library", "libgpusim_nvml.so"), ("--cuda-library", "libgpusim_cuda.so")];
        let libraries = libraries.map(|(flag, name)| format!("{flag}={}", built().join(name).display()));
        let state = format!("--state-dir={}", self.directory.path().join("keeper").display());
        ["serve".to_owned(), state].into_iter().chain(libraries).collect()
    }

    fn with_volumes(&self, library: &[u8]) -> Vec<String> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let path = self.directory.path().join(format!("guard-{}.so", COUNT.fetch_add(1, Ordering::Relaxed)));
        fs::write(&path, library).unwrap();
        let more = [
            "--node-name=node-1".to_owned(),
            format!("--kubelet-root={}", self.kubelet_root().display()),
            format!("--guard-library={}", path.display()),
        ];
        [self.serve(), more.to_vec()].concat()
    }

    fn spawn(&self, mut command: Command) -> KeeperProcess {
        let child = command
            .env(SOCKET_VARIABLE, &self.gpu)
            .env("HIGHWATER_LOG", env::var("HIGHWATER_LOG").unwrap_or_else(|_| "warn".into()))
            .process_group(0)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        KeeperProcess { child, socket: self.socket() }
    }

    /// Starts a keeper, and does not wait for it.
    pub(crate) fn spawn_keeper(&self) -> KeeperProcess {
        let mut command = Command::new(env!("CARGO_BIN_EXE_keeper"));
        command.args(self.serve()).arg("--no-csi");
        self.spawn(command)
    }

    /// Starts a keeper, and waits until it holds.
    pub(crate) async fn keeper(&self) -> KeeperProcess {
        let before = identity(&self.socket());
        let keeper = self.spawn_keeper();
        self.holds(keeper, before).await
    }

    /// Starts a keeper whose end may take so long, and waits until it holds.
    #[allow(dead_code, reason = "only what is parked takes long")]
    pub(crate) async fn keeper_that_ends_within(&self, seconds: u32) -> KeeperProcess {
        let before = identity(&self.socket());
        let mut command = Command::new(env!("CARGO_BIN_EXE_keeper"));
        command.args(self.serve()).arg("--no-csi").arg(format!("--end-seconds={seconds}"));
        let keeper = self.spawn(command);
        self.holds(keeper, before).await
    }

    pub(crate) async fn keeper_with_volumes(&self, library: &[u8]) -> KeeperProcess {
        let before = identity(&self.socket());
        let mut command = Command::new(env!("CARGO_BIN_EXE_keeper"));
        command.args(self.with_volumes(library));
        let keeper = self.spawn(command);
        self.holds(keeper, before).await
    }

    /// A keeper for which the pods' directory is a disk of 64 KiB, if the user may mount one.
    pub(crate) async fn keeper_on_small_disk(&self, library: &[u8], uid: &str) -> Option<KeeperProcess> {
        const SCRIPT: &str =
            "mount -t tmpfs -o size=64k none \"$1\" && mkdir -p \"$2\" && shift 2 && exec \"$@\"";
        let may = Command::new("unshare").args(["--mount", "true"]).stderr(Stdio::null()).status();
        if !may.is_ok_and(|status| status.success()) {
            return None;
        }
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", SCRIPT, "sh"]).arg(self.kubelet_root().join("pods"));
        command.arg(self.volume(uid)).arg(env!("CARGO_BIN_EXE_keeper")).args(self.with_volumes(library));
        let keeper = self.spawn(command);
        Some(self.holds(keeper, None).await)
    }

    async fn holds(&self, keeper: KeeperProcess, before: Option<u64>) -> KeeperProcess {
        eventually("keeper that holds", async || {
            let socket = self.socket();
            identity(&socket) != before
                && match Keeper::connect_as(&socket, crate::Role::Probe).await {
                    Ok(keeper) => keeper.status().await.is_ok(),
                    Err(_) => false,
                }
        })
        .await;
        keeper
    }

    /// Runs `keeper status`.
    pub(crate) fn probe(&self) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_keeper"));
        command.arg("status").arg(format!("--state-dir={}", self.directory.path().join("keeper").display()));
        command.output().unwrap()
    }
}

fn identity(path: &Path) -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(path).ok().map(|file| file.ino())
}

/// How much was used at least.
pub(crate) struct Lowest {
    end: Arc<AtomicBool>,
    used: Arc<AtomicU64>,
    watch: thread::JoinHandle<()>,
}

impl Lowest {
    pub(crate) fn end(self) -> u64 {
        self.end.store(true, Ordering::Relaxed);
        self.watch.join().unwrap();
        self.used.load(Ordering::Relaxed)
    }
}

/// A keeper; killed when dropped.
pub(crate) struct KeeperProcess {
    child: Child,
    socket: PathBuf,
}

impl KeeperProcess {
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Connects as the agent, as soon as a keeper answers.
    pub(crate) async fn connect(&self) -> Keeper {
        let started = Instant::now();
        loop {
            match Keeper::connect(&self.socket).await {
                Ok(keeper) if keeper.status().await.is_ok() => return keeper,
                Ok(_) | Err(_) => assert!(started.elapsed() < PATIENCE, "no keeper answers"),
            }
            sleep(Duration::from_millis(5)).await;
        }
    }

    pub(crate) fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    /// It lives on, and does nothing.
    pub(crate) fn stop(&self) {
        self.signal(Signal::STOP);
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().try_into().unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    pub(crate) fn wait(&mut self) -> ExitStatus {
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(started.elapsed() < PATIENCE, "the keeper does not end");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for KeeperProcess {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
