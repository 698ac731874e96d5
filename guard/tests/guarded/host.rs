//! A host with a simulated driver, volumes of pods, and programs under the guard.

use std::collections::HashSet;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::LazyLock;
use std::thread;

use gpusim::client::Client;
use gpusim::config::Config;
use gpusim::daemon::Daemon;
use gpusim::protocol::{Memory, Region, Reply, Request, SOCKET_VARIABLE};
use highwater_guard_abi::page::{DeviceQuota, Managed};

use crate::CONTEXT;
use crate::agent::Agent;

/// The guard to test, where it is not the one that was built for the tests.
const GUARD_VARIABLE: &str = "HIGHWATER_GUARD_LIBRARY";

/// Where cargo puts what it builds with the profile of this test.
struct Built {
    profile: PathBuf,
}

static BUILT: LazyLock<Built> = LazyLock::new(|| {
    let profile = std::env::current_exe().unwrap().ancestors().nth(2).unwrap().to_owned();
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--quiet", "--lib", "--examples", "--manifest-path"]);
    build.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml"));
    for package in ["highwater-guard", "gpusim-cuda", "gpusim-nvml"] {
        build.args(["--package", package]);
    }
    build.arg("--target-dir").arg(profile.parent().unwrap());
    if profile.ends_with("release") {
        build.arg("--release");
    }
    assert!(build.status().unwrap().success(), "what the tests run does not build");
    Built { profile }
});

impl Built {
    fn library(&self, name: &str) -> PathBuf {
        self.profile.join(format!("lib{name}.so"))
    }

    /// The guard: what [`GUARD_VARIABLE`] names, so that the one that is shipped can be tested too.
    fn guard(&self) -> PathBuf {
        std::env::var_os(GUARD_VARIABLE).map_or_else(|| self.library("highwater_guard"), PathBuf::from)
    }

    fn example(&self, name: &str) -> PathBuf {
        self.profile.join("examples").join(name)
    }
}

/// A machine with GPUs.
pub(crate) struct Host {
    root: tempfile::TempDir,
    uuids: Vec<[u8; 16]>,
    /// Functions that its driver lacks.
    missing: Vec<&'static str>,
}

impl Host {
    /// One H200.
    pub(crate) fn start() -> Self {
        Self::with(Config::default())
    }

    pub(crate) fn with(config: Config) -> Self {
        Self::lacking(config, Vec::new())
    }

    /// One whose driver lacks functions, as one of an older release does.
    pub(crate) fn lacking(config: Config, missing: Vec<&'static str>) -> Self {
        let root = tempfile::tempdir().unwrap();
        let daemon = Daemon::bind(&root.path().join("gpu.sock"), config).unwrap();
        thread::spawn(move || daemon.serve().unwrap());
        let driver = root.path().join("driver");
        std::fs::create_dir(&driver).unwrap();
        let mut taken = 0;
        for (library, name) in [("gpusim_cuda", "libcuda.so.1"), ("gpusim_nvml", "libnvidia-ml.so.1")] {
            let (library, place) = (BUILT.library(library), driver.join(name));
            if missing.is_empty() {
                symlink(library, place).unwrap();
            } else {
                let (bytes, count) = without(&library, &missing);
                std::fs::write(place, bytes).unwrap();
                taken += count;
            }
        }
        assert_eq!(taken, missing.len(), "the simulated driver has not all of {missing:?}");
        let mut client = Client::connect(&root.path().join("gpu.sock")).unwrap();
        let Reply::Inventory(inventory) = client.call(&Request::Inventory).unwrap() else { panic!() };
        let uuids = inventory.devices.iter().map(|device| binary(&device.uuid)).collect();
        Self { root, uuids, missing }
    }

    /// Memory of the first device, as the driver has it.
    pub(crate) fn memory(&self) -> Memory {
        let mut client = Client::connect(&self.root.path().join("gpu.sock")).unwrap();
        match client.call(&Request::Memory(Region { device: 0, instance: None })).unwrap() {
            Reply::Memory(memory) => memory,
            other => panic!("{other:?}"),
        }
    }

    /// A quota on a device: all of it is granted, and a context is charged as it is.
    pub(crate) fn quota(&self, device: usize, limit: u64) -> DeviceQuota {
        DeviceQuota {
            uuid: self.uuids[device],
            limit,
            granted: limit,
            context: CONTEXT,
            free: u64::MAX,
            total: 0,
            managed: Managed::Charge,
            wait_milliseconds: 0,
        }
    }

    /// The volume of a pod: the library, and a place for the agent's socket.
    pub(crate) fn volume(&self, name: &str) -> Volume<'_> {
        let path = self.root.path().join(name);
        std::fs::create_dir_all(path.join("run")).unwrap();
        std::fs::copy(BUILT.guard(), path.join("libhighwater-guard.so")).unwrap();
        Volume { host: self, path }
    }

    /// A pod with an agent that gives it this much of the first device.
    pub(crate) fn pod(&self, limit: u64) -> Pod<'_> {
        self.pod_with(&[self.quota(0, limit)])
    }

    pub(crate) fn pod_with(&self, quotas: &[DeviceQuota]) -> Pod<'_> {
        let volume = self.volume("pod");
        let agent = Agent::start(&volume.socket(), quotas);
        Pod { volume, agent }
    }

    /// A program without a guard.
    pub(crate) fn unguarded(&self) -> Program {
        self.command("handle", &[]).into()
    }

    fn command(&self, lookup: &str, preload: &[PathBuf]) -> Command {
        let mut command = Command::new(BUILT.example("probe"));
        let preload: Vec<_> = preload.iter().map(|path| path.to_str().unwrap()).collect();
        command
            .arg(lookup)
            .env("LD_LIBRARY_PATH", self.root.path().join("driver"))
            .env("LD_PRELOAD", preload.join(":"))
            .env(SOCKET_VARIABLE, self.root.path().join("gpu.sock"))
            .env("GPUSIM_MISSING_CALLS", self.missing.join(","))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        command
    }
}

/// A library without some of its functions, and how many of them it had. Their names are spelled
/// otherwise in its tables, where nobody finds them any more: a name is looked for by its hash.
fn without(library: &Path, missing: &[&str]) -> (Vec<u8>, usize) {
    let mut bytes = std::fs::read(library).unwrap();
    let (mut places, mut found, mut at) = (Vec::new(), HashSet::new(), 0);
    for text in bytes.split(|byte| *byte == 0) {
        // The table for debuggers has them as well.
        let named = matches!(text, [b'c', b'u', ..] | [b'n', b'v', ..]);
        if let Some(name) = missing.iter().find(|name| named && name.as_bytes() == text) {
            places.push(at);
            found.insert(*name);
        }
        at += text.len() + 1;
    }
    for place in places {
        bytes[place] = b'-';
    }
    (bytes, found.len())
}

/// The 16 bytes that a UUID spells after its prefix.
fn binary(uuid: &str) -> [u8; 16] {
    let digits: String = uuid.split_once('-').unwrap().1.chars().filter(char::is_ascii_hexdigit).collect();
    std::array::from_fn(|index| u8::from_str_radix(&digits[index * 2..index * 2 + 2], 16).unwrap())
}

/// The directory that a pod's containers have mounted.
pub(crate) struct Volume<'a> {
    host: &'a Host,
    path: PathBuf,
}

impl Volume<'_> {
    pub(crate) fn socket(&self) -> PathBuf {
        self.path.join("run/agent.sock")
    }

    pub(crate) fn library(&self) -> PathBuf {
        self.path.join("libhighwater-guard.so")
    }

    /// A program under the guard.
    pub(crate) fn program(&self) -> Program {
        self.program_that_looks("handle")
    }

    /// A program under the guard that finds functions in that way.
    pub(crate) fn program_that_looks(&self, lookup: &str) -> Program {
        self.command(lookup).into()
    }

    pub(crate) fn command(&self, lookup: &str) -> Command {
        self.host.command(lookup, &[self.library()])
    }

    /// A program under the guard and a library before it or after it.
    pub(crate) fn program_in_chain(&self, lookup: &str, before: bool) -> Program {
        let chain = BUILT.profile.join("examples/libchain.so");
        let mut preload = vec![chain, self.library()];
        if !before {
            preload.reverse();
        }
        self.host.command(lookup, &preload).into()
    }
}

/// A pod and its agent.
pub(crate) struct Pod<'a> {
    pub(crate) volume: Volume<'a>,
    pub(crate) agent: Agent,
}

impl Pod<'_> {
    pub(crate) fn program(&self) -> Program {
        self.volume.program()
    }

    /// A program that has a context already.
    pub(crate) fn ready(&self) -> Program {
        let mut program = self.program();
        program.start();
        program
    }
}

/// A program of the driver that does as it is told.
pub(crate) struct Program {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl From<Command> for Program {
    fn from(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let (input, output) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, input, output }
    }
}

impl Program {
    /// Gives an order without waiting for the answer.
    pub(crate) fn tell(&mut self, order: &str) {
        writeln!(self.input.as_mut().unwrap(), "{order}").unwrap();
    }

    pub(crate) fn answer(&mut self) -> String {
        let mut answer = String::new();
        self.output.read_line(&mut answer).unwrap();
        assert!(answer.ends_with('\n'), "the program has died");
        answer.trim_end().to_owned()
    }

    /// Gives an order; returns the answer.
    pub(crate) fn ask(&mut self, order: &str) -> String {
        self.tell(order);
        self.answer()
    }

    /// Gives orders that must all succeed.
    pub(crate) fn succeed(&mut self, orders: &[&str]) {
        for order in orders {
            let answer = self.ask(order);
            assert_eq!(answer.split(' ').next(), Some("0"), "{order}: {answer}");
        }
    }

    /// Initialises the driver and makes the primary context.
    pub(crate) fn start(&mut self) {
        self.succeed(&["init", "retain"]);
    }

    /// The numbers in an answer.
    pub(crate) fn numbers(&mut self, order: &str) -> Vec<u64> {
        let answer = self.ask(order);
        answer.split(' ').map(|word| word.parse().unwrap_or_else(|_| panic!("{order}: {answer}"))).collect()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Lets it end by itself.
    pub(crate) fn end(mut self) {
        drop(self.input.take());
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _gone = self.child.wait();
    }
}
