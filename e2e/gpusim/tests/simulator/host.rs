//! A simulated host for a test: its daemon, its libraries, and processes that use them.

use std::cell::Cell;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};

use gpusim::client::Client;
pub(crate) use rustix::process::Signal;
use rustix::process::{Pid, kill_process, kill_process_group};
use serde_json::Value;
use tempfile::TempDir;

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;

/// No condition is awaited longer.
const PATIENCE: Duration = Duration::from_secs(30);

/// What the tests need built.
struct Built {
    /// The libraries under the names that programs look for.
    libraries: PathBuf,
    workload: PathBuf,
    examples: PathBuf,
}

/// Builds the libraries and the workload, once for all tests.
fn built() -> &'static Built {
    static BUILT: OnceLock<Built> = OnceLock::new();
    BUILT.get_or_init(|| {
        let packages = ["-p", "gpusim-cuda", "-p", "gpusim-nvml", "-p", "highwater-workloads"];
        let mut cargo = Command::new(env!("CARGO"));
        cargo.arg("build").args(packages).current_dir(env!("CARGO_MANIFEST_DIR"));
        assert!(cargo.status().unwrap().success(), "build the libraries and the workload");
        let target = Path::new(env!("CARGO_BIN_EXE_gpusim")).parent().unwrap();
        let libraries = Path::new(env!("CARGO_TARGET_TMPDIR")).join("lib");
        std::fs::create_dir_all(&libraries).unwrap();
        for (built, name) in
            [("libgpusim_cuda.so", "libcuda.so.1"), ("libgpusim_nvml.so", "libnvidia-ml.so.1")]
        {
            // A running test of another process may have the old file open: replace it.
            let new = libraries.join(format!("{name}.{}", std::process::id()));
            std::fs::copy(target.join(built), &new).unwrap();
            std::fs::rename(new, libraries.join(name)).unwrap();
        }
        Built { libraries, workload: target.join("workload"), examples: target.join("examples") }
    })
}

/// Names that a library exports, by `nm`; nothing where there is no such tool.
pub(crate) fn exports(library: &str) -> Vec<String> {
    let path = built().libraries.join(library);
    let Ok(output) = Command::new("nm").args(["-D", "--defined-only"]).arg(path).output() else {
        return Vec::new();
    };
    let output = String::from_utf8(output.stdout).unwrap();
    let names = output.lines().filter_map(|line| line.split_whitespace().last());
    names.filter(|name| name.starts_with("cu") || name.starts_with("nvml")).map(str::to_owned).collect()
}

/// The command that starts a program in PID and mount namespaces below ours, if the user may.
pub(crate) fn namespaces() -> Option<Vec<String>> {
    let command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"].map(str::to_owned);
    let (program, arguments) = command.split_first()?;
    let works = Command::new(program).args(arguments).arg("true").stderr(Stdio::null()).status();
    works.is_ok_and(|status| status.success()).then(|| command.to_vec())
}

/// A process that has nothing to do with any of this.
pub(crate) fn sleeper() -> Child {
    Command::new("sleep").arg("1000").spawn().unwrap()
}

/// Sends SIGKILL.
pub(crate) fn kill(pid: u32) {
    signal(pid, Signal::KILL);
}

/// Sends a signal.
pub(crate) fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid.try_into().unwrap()).unwrap(), signal).unwrap();
}

pub(crate) struct Host {
    directory: TempDir,
    daemon: Child,
}

impl Host {
    /// Starts a daemon for a host with that configuration.
    pub(crate) fn start(config: &Value) -> Self {
        built();
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
        let daemon = Self::daemon(directory.path()).spawn().unwrap();
        let host = Self { directory, daemon };
        host.client();
        host
    }

    fn daemon(directory: &Path) -> Command {
        let mut daemon = Command::new(env!("CARGO_BIN_EXE_gpusim"));
        daemon.arg("daemon").arg("--socket").arg(directory.join("gpu.sock"));
        daemon.arg("--config").arg(directory.join("config.json")).stderr(Stdio::null());
        daemon
    }

    /// Kills the daemon and starts it again.
    pub(crate) fn restart(&mut self) {
        self.stop();
        self.daemon = Self::daemon(self.directory.path()).spawn().unwrap();
        self.client();
    }

    /// Kills the daemon.
    pub(crate) fn stop(&mut self) {
        self.daemon.kill().unwrap();
        self.daemon.wait().unwrap();
    }

    /// What a second daemon says that is started beside the first.
    pub(crate) fn second_daemon(&self) -> String {
        let output = Self::daemon(self.directory.path()).stderr(Stdio::piped()).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    }

    /// A connection to the daemon.
    pub(crate) fn client(&self) -> Client {
        Client::connect_within(&self.socket(), PATIENCE).unwrap()
    }

    /// One that asks only for what may have changed.
    pub(crate) fn watcher(&self) -> Client {
        Client::observe(&self.socket()).unwrap()
    }

    fn socket(&self) -> PathBuf {
        self.path("gpu.sock")
    }

    /// A place in the host's folder.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Writes a file, and gives its path.
    pub(crate) fn file(&self, name: &str, content: &Value) -> String {
        let path = self.directory.path().join(name);
        std::fs::write(&path, content.to_string()).unwrap();
        path.to_str().unwrap().to_owned()
    }

    /// A program of this host.
    fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command
            .env("LD_LIBRARY_PATH", &built().libraries)
            .env("GPUSIM_SOCKET", self.socket())
            .env("WORKLOAD", &built().workload)
            .env_remove("NVIDIA_VISIBLE_DEVICES");
        command
    }

    /// Starts a workload.
    pub(crate) fn workload(&self, script: &str) -> Process {
        self.workload_with(script, &[])
    }

    /// Starts a workload with variables in its environment.
    pub(crate) fn workload_with(&self, script: &str, variables: &[(&str, &str)]) -> Process {
        let mut command = self.command(&built().workload);
        command.args(["--script", script]).envs(variables.iter().copied());
        Process::spawn(command)
    }

    /// Starts a workload by another command.
    pub(crate) fn workload_in(&self, prefix: &[String], script: &str) -> Process {
        let (program, arguments) = prefix.split_first().unwrap();
        let mut command = self.command(program);
        command.args(arguments).arg(&built().workload).args(["--script", script]);
        Process::spawn(command)
    }

    /// Starts a workload that gets at the driver in another way.
    pub(crate) fn workload_by(&self, arguments: &[&str], script: &str) -> Process {
        let mut command = self.command(&built().workload);
        command.args(arguments).args(["--script", script]);
        Process::spawn(command)
    }

    /// The answer of a call about limits of cgroups: of `nvml`'s `limits`.
    pub(crate) fn limits(&self, arguments: &[&str]) -> Value {
        let mut command = self.command(built().examples.join("nvml"));
        json(command.arg("limits").args(arguments))
    }

    /// Starts a shell.
    pub(crate) fn shell(&self, script: &str) -> Process {
        let mut command = self.command("sh");
        command.args(["-c", script]);
        Process::spawn(command)
    }

    /// What an independent reader of NVML sees, with variables in its environment.
    pub(crate) fn nvml(&self, variables: &[(&str, &str)]) -> Value {
        let mut command = self.command(built().examples.join("nvml"));
        json(command.envs(variables.iter().copied()))
    }

    /// What a reader sees that runs in the PID namespace of a file.
    pub(crate) fn nvml_in(&self, _: &[String], namespace: &str) -> Value {
        let mut command = self.command("nsenter");
        json(command.arg(format!("--pid={namespace}")).arg(built().examples.join("nvml")))
    }

    /// Starts a reader of NVML that keeps the driver open between its looks.
    pub(crate) fn observer(&self) -> Observer {
        self.observer_by(&[], "lines")
    }

    /// Starts one by another command, in a mode of the program.
    pub(crate) fn observer_by(&self, prefix: &[String], mode: &str) -> Observer {
        let example = built().examples.join("nvml").into_os_string();
        let mut words = prefix.iter().map(Into::into).chain([example]);
        let mut command = self.command(words.next().unwrap());
        command.args(words).arg(mode).stdin(Stdio::piped());
        Observer { process: Process::spawn(command), looks: Cell::new(0) }
    }

    /// One device, as that reader sees it.
    pub(crate) fn device(&self, index: usize) -> Value {
        self.nvml(&[])["devices"][index].clone()
    }

    /// Bytes in use on a device.
    pub(crate) fn used(&self, index: usize) -> u64 {
        let device = self.device(index);
        device["memory"]["used"].as_u64().unwrap_or_else(|| panic!("{device}"))
    }

    /// The compute list of a device: PIDs and bytes.
    pub(crate) fn charged(&self, index: usize) -> Vec<(u32, u64)> {
        crate::entries(&self.device(index)["compute"])
    }

    /// The output of the conformance program.
    pub(crate) fn conformance(&self, arguments: &[&str]) -> String {
        let output = self.command(built().examples.join("conformance")).args(arguments).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    /// Everything that the daemon knows.
    pub(crate) fn show(&self) -> Value {
        serde_json::from_str(&self.ctl("show")).unwrap()
    }

    /// Runs `gpusim ctl`, and gives its output.
    pub(crate) fn ctl(&self, arguments: &str) -> String {
        let output = self.control(arguments);
        assert!(output.status.success(), "ctl {arguments}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs `gpusim ctl`, and gives the words with which it fails.
    pub(crate) fn ctl_refusal(&self, arguments: &str) -> String {
        let output = self.control(arguments);
        assert!(!output.status.success(), "ctl {arguments} succeeded");
        String::from_utf8(output.stderr).unwrap()
    }

    fn control(&self, arguments: &str) -> std::process::Output {
        let mut command = self.command(env!("CARGO_BIN_EXE_gpusim"));
        command.arg("ctl").args(arguments.split_whitespace()).output().unwrap()
    }

    /// Waits until so much is in use on a device.
    pub(crate) fn await_used(&self, index: usize, bytes: u64) {
        self.await_that(&format!("device {index} uses {bytes} bytes"), || self.used(index) == bytes);
    }

    /// Waits until a condition holds; each look starts a process, which is pause enough.
    pub(crate) fn await_that(&self, what: &str, condition: impl Fn() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !condition() {
            assert!(Instant::now() < deadline, "never true: {what}; the daemon has {}", self.show());
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

/// A process of a host, and what it has printed.
pub(crate) struct Process {
    child: Child,
    printed: Arc<(Mutex<Vec<String>>, Condvar)>,
    reader: Option<std::thread::JoinHandle<()>>,
}

impl Process {
    fn spawn(mut command: Command) -> Self {
        let mut child =
            command.process_group(0).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let output = child.stdout.take().unwrap();
        let printed = Arc::new((Mutex::new(Vec::new()), Condvar::new()));
        let sink = printed.clone();
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                sink.0.lock().unwrap().push(line);
                sink.1.notify_all();
            }
        });
        Self { child, printed, reader: Some(reader) }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until a line with these words has been printed.
    pub(crate) fn await_line(&self, words: &str) {
        let (lines, changed) = &*self.printed;
        let missing = |lines: &mut Vec<String>| !lines.iter().any(|line| line.contains(words));
        let (lines, waited) = changed.wait_timeout_while(lines.lock().unwrap(), PATIENCE, missing).unwrap();
        assert!(!waited.timed_out(), "never printed {words:?}, but {lines:#?}");
    }

    /// Waits for a line with these words, and gives what follows them.
    pub(crate) fn await_rest(&self, words: &str) -> String {
        self.await_line(words);
        let lines = self.lines();
        let rest = lines.iter().find_map(|line| line.split_once(words)).map(|(_, rest)| rest.to_owned());
        rest.unwrap()
    }

    /// What has been printed so far.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.printed.0.lock().unwrap().clone()
    }

    pub(crate) fn terminate(&self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
    }

    /// Sends SIGKILL, and waits until the process is gone.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits for the end of the process and of its output.
    pub(crate) fn exit_code(&mut self) -> Option<i32> {
        let code = self.child.wait().unwrap().code();
        if let Some(reader) = self.reader.take() {
            reader.join().unwrap();
        }
        code
    }
}

/// A reader of NVML that keeps the driver open between its looks.
pub(crate) struct Observer {
    process: Process,
    looks: Cell<u32>,
}

impl Observer {
    /// Everything, as it sees it now.
    pub(crate) fn look(&self) -> Value {
        self.looks.set(self.looks.get() + 1);
        let name = format!("look {}", self.looks.get());
        let mut input = self.process.child.stdin.as_ref().unwrap();
        writeln!(input, "{name}").unwrap();
        serde_json::from_str(&self.process.await_rest(&format!("{name}: "))).unwrap()
    }

    /// Device 0, as it sees it now.
    pub(crate) fn device(&self) -> Value {
        self.look()["devices"][0].clone()
    }

    /// Bytes in use there.
    pub(crate) fn used(&self) -> u64 {
        let device = self.device();
        device["memory"]["used"].as_u64().unwrap_or_else(|| panic!("{device}"))
    }

    /// What the kernel says of its mapping of the daemon's page.
    pub(crate) fn page(&self) -> String {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.process.pid())).unwrap();
        let mut pages = maps.lines().filter(|line| line.contains("memfd:gpusim-epoch"));
        let page = pages.next().unwrap().to_owned();
        assert_eq!(pages.next(), None);
        page
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // With whatever it started.
        let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        let _ = self.child.wait();
    }
}

fn json(command: &mut Command) -> Value {
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    serde_json::from_str(&text)
        .unwrap_or_else(|error| panic!("{error}: {text:?} {}", String::from_utf8_lossy(&output.stderr)))
}
