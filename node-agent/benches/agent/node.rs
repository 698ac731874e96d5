//! A GPU node with its pods, and the agent on it.

use std::{
    collections::BTreeMap,
    fs::{self, create_dir_all},
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use gpusim::{
    client::Client,
    fault::{Fault, FaultKind},
    protocol::{Control, ProcessList, Region, SOCKET_VARIABLE},
    size::Bytes,
};
use highwater_crds::{
    Action, ActionType, Breach, Breaker, BreakerScope, ByteSize, DefaultQuota, DeviceRule, GpuMemoryNode,
    GpuMemoryNodeSpec, KernelLimits, Leaks, Mode, Partition, PlanBreaker, PlanLayer, PlanLeaks, PlanQuota,
    Quota, Watermark, names,
};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use crate::{
    INTERVAL, Programs,
    api::{self, Objects},
    kubelet,
    process::Process,
    workload,
};

/// GPUs of the node.
pub(crate) const DEVICES: u32 = 8;
/// Pods, one process each, spread evenly over the devices.
pub(crate) const PODS: u32 = 128;

const NAME: &str = "bench";
const NAMESPACE: &str = "team";
const PRODUCT: &str = "NVIDIA H200";
const LIMIT: ByteSize = ByteSize::gib(8);
/// What the agent serves about each pod and device.
const SERIES: &str = "highwater_pod_memory_used_bytes{";

/// Everything on the node. What it is made of ends with it.
pub(crate) struct Node {
    pub(crate) agent: Process,
    /// One pod a device: it can be made to cross its limit.
    pub(crate) crossers: Vec<Crosser>,
    listen: SocketAddr,
    volumes: Vec<PathBuf>,
    _others: Vec<Process>,
    _driver: Process,
    _runtime: Runtime,
    _directory: TempDir,
}

/// A pod that can be made to cross its limit.
pub(crate) struct Crosser {
    /// Takes the lines of [`workload`] on its standard input.
    pub(crate) process: Process,
    /// The pod's volume for signals.
    pub(crate) volume: PathBuf,
}

impl Node {
    /// Starts driver, pods and agent.
    pub(crate) fn start(programs: &Programs) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let root = directory.path();
        let socket = root.join("gpu.sock");
        let driver = start_driver(&programs.gpusim, root, &socket)?;
        let mut client = Client::connect_within(&socket, Duration::from_secs(10))?;
        let devices: Vec<_> =
            client.show()?.inventory.devices.into_iter().map(|device| device.uuid).collect();

        let (mut pods, mut volumes) = (Vec::new(), Vec::new());
        let (mut crossers, mut others) = (Vec::new(), Vec::new());
        for (number, (device, uuid)) in (0..PODS).zip((0..).zip(&devices).cycle()) {
            let pod = Pod { number, device: uuid.clone() };
            let volume = pod.create_volume(root)?;
            pod.create_cgroup(root)?;
            volumes.push(volume.clone());
            if number < DEVICES {
                let mut command = Command::new(std::env::current_exe()?);
                command.args([workload::ARGUMENT, &device.to_string()]);
                command.env(SOCKET_VARIABLE, &socket).stdin(Stdio::piped());
                let process = Process::start(&mut command)?;
                pod.create_proc(root, process.pid())?;
                crossers.push(Crosser { process, volume });
            } else {
                let process = Process::start(Command::new("sleep").arg("infinity"))?;
                pod.create_proc(root, process.pid())?;
                let kind = FaultKind::Foreign {
                    pid: process.pid(),
                    bytes: Bytes(workload::BASE),
                    list: ProcessList::Compute,
                };
                client.control(Control::Inject(Fault { region: Region { device, instance: None }, kind }))?;
                others.push(process);
            }
            pods.push(pod);
        }

        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let (api, pod_resources) = (objects(&pods)?, root.join("kubelet.sock"));
        let held = pods.iter().map(|pod| (NAMESPACE.to_owned(), pod.name(), pod.device.clone())).collect();
        let api = runtime.block_on(async {
            kubelet::serve(&pod_resources, held)?;
            api::serve(api).await
        })?;

        // A port that was free a moment ago.
        let listen = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let mut command = Command::new(&programs.agent);
        command.args(["--node-name", NAME, "--namespace", "highwater-system"]);
        command.arg("--sample-interval-milliseconds").arg(INTERVAL.as_millis().to_string());
        command.arg("--driver-library").arg(&programs.library);
        command.arg("--pod-resources-socket").arg(&pod_resources);
        command.arg("--kubelet-root").arg(root.join("kubelet"));
        command.arg("--proc-root").arg(root.join("proc"));
        command.arg("--state-dir").arg(root);
        command.arg("--host-memory-root").arg(root.join("cgroup"));
        command.arg("--listen").arg(listen.to_string());
        command.env(SOCKET_VARIABLE, &socket).env("KUBECONFIG", kubeconfig(root, api)?);
        let log = fs::File::create(log_path())?;
        command.stdout(log.try_clone()?).stderr(log);
        let agent = Process::start(&mut command)?;
        Ok(Self {
            agent,
            crossers,
            listen,
            volumes,
            _others: others,
            _driver: driver,
            _runtime: runtime,
            _directory: directory,
        })
    }

    /// Scrapes the agent.
    pub(crate) fn metrics(&self) -> Result<String> {
        let mut stream = TcpStream::connect(self.listen)?;
        write!(stream, "GET /metrics HTTP/1.0\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    }

    /// Waits until the agent has started: it has a number for every pod, and has written every
    /// pod's file once, in case an earlier agent had left a signal there.
    pub(crate) fn await_start(&self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_mins(1);
        let (mut measured, mut written) = (0, 0);
        while Instant::now() < deadline {
            let metrics = self.metrics().unwrap_or_default();
            measured = metrics.lines().filter(|l| l.starts_with(SERIES) && !l.ends_with("} 0")).count();
            written = self.volumes.iter().filter(|volume| volume.join(names::SIGNAL_FILE).exists()).count();
            if measured == self.volumes.len() && written == self.volumes.len() {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(100));
        }
        bail!(
            "of {PODS} pods the agent has measured {measured} and written the files of {written}: see {}",
            log_path().display()
        )
    }
}

/// What the agent says.
fn log_path() -> PathBuf {
    std::env::temp_dir().join("bench-agent.log")
}

fn start_driver(program: &Path, root: &Path, socket: &Path) -> Result<Process> {
    let config = root.join("gpusim.json");
    fs::write(&config, json!({"devices": [{"count": DEVICES, "name": PRODUCT}]}).to_string())?;
    let mut command = Command::new(program);
    command.arg("daemon").arg("--socket").arg(socket).arg("--config").arg(config);
    Process::start(command.stderr(Stdio::null()))
}

/// A pod of the node.
struct Pod {
    number: u32,
    device: String,
}

impl Pod {
    fn name(&self) -> String {
        format!("server-{}", self.number)
    }

    fn uid(&self) -> String {
        format!("00000000-0000-4000-8000-{:012x}", self.number)
    }

    fn create_volume(&self, root: &Path) -> Result<PathBuf> {
        let volume = root.join(format!(
            "kubelet/pods/{}/volumes/kubernetes.io~empty-dir/{}",
            self.uid(),
            names::SIGNAL_VOLUME
        ));
        create_dir_all(&volume)?;
        Ok(volume)
    }

    /// What the kernel says of its host memory.
    fn create_cgroup(&self, root: &Path) -> Result<()> {
        fs::create_dir_all(root.join("cgroup"))?;
        fs::write(root.join("cgroup/cgroup.controllers"), "memory\n")?;
        let directory = root.join(format!("cgroup/kubepods/burstable/pod{}", self.uid()));
        create_dir_all(&directory)?;
        fs::write(directory.join("memory.max"), "17179869184\n")?;
        fs::write(directory.join("memory.current"), "8589934592\n")?;
        fs::write(directory.join("memory.stat"), "anon 4294967296\nfile 4294967296\nshmem 1048576\n")?;
        Ok(())
    }

    /// A process of the pod: real but for the cgroup that it is in.
    fn create_proc(&self, root: &Path, pid: u32) -> Result<()> {
        let directory = root.join(format!("proc/{pid}"));
        create_dir_all(&directory)?;
        symlink(format!("/proc/{pid}/stat"), directory.join("stat"))?;
        let container = format!("{:064x}", self.number);
        let cgroup = format!("0::/kubepods/burstable/pod{}/{container}\n", self.uid());
        fs::write(directory.join("cgroup"), cgroup)?;
        Ok(())
    }

    fn object(&self) -> Value {
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": self.name(), "namespace": NAMESPACE, "uid": self.uid(), "resourceVersion": "1",
                "labels": {"app": "server"},
                "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "server",
                    "uid": "server", "controller": true}],
            },
            "spec": {
                "nodeName": NAME,
                "containers": [{"name": "server", "resources": {"limits": {"nvidia.com/gpu": "1"}}}],
                "volumes": [{"name": names::SIGNAL_VOLUME, "emptyDir": {}}],
            },
            "status": {"phase": "Running"},
        })
    }
}

fn objects(pods: &[Pod]) -> Result<Objects> {
    let mut plan = GpuMemoryNode::new(NAME, plan());
    plan.metadata.uid = Some("plan".into());
    plan.metadata.generation = Some(1);
    plan.metadata.resource_version = Some("1".into());
    let named = |kind: &str, name: &str| json!({"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "uid": name, "resourceVersion": "1"}});
    Ok(Objects {
        fixed: BTreeMap::from([
            ("pods", pods.iter().map(Pod::object).collect()),
            ("namespaces", vec![named("Namespace", NAMESPACE)]),
            ("nodes", vec![named("Node", NAME)]),
            ("gpumemoryincidents", vec![]),
        ]),
        plan: tokio::sync::watch::Sender::new(serde_json::to_value(plan)?),
    })
}

/// A policy as a fleet would have it, but without holds.
fn plan() -> GpuMemoryNodeSpec {
    let policy = || "bench".to_owned();
    let signal = || vec![Action::of(ActionType::Signal)];
    let mark = |trip_percent, clear_percent| {
        Some(Watermark { trip_percent, clear_percent, hold_milliseconds: 0, actions: signal() })
    };
    let breaker = PlanBreaker {
        policy: policy(),
        namespaces: None,
        owner_kinds: vec!["ReplicaSet".into()],
        value: Breaker {
            scope: BreakerScope::Device,
            preset: None,
            rise: None,
            minimum_stay_milliseconds: 2000,
            warning: mark(75, 72),
            critical: mark(88, 84),
            emergency: mark(95, 90),
            when_nobody_is_over: highwater_crds::WhenNobodyIsOver::None,
        },
    };
    let quota = PlanQuota {
        policy: policy(),
        namespaces: None,
        owner_kinds: vec!["ReplicaSet".into()],
        value: Quota {
            default: Some(DefaultQuota { guarantee: None, limit: LIMIT }),
            rules: vec![],
            breach: Some(Breach { tolerance: None, hold_milliseconds: 0, actions: signal() }),
            kernel_limits: KernelLimits::default(),
        },
    };
    let rule = DeviceRule {
        product: PRODUCT.into(),
        partition: Partition::Whole,
        quota_policies: vec![policy()],
        driver_reserve: None,
        pool: None,
        breakers: vec![breaker],
        host_memory: None,
        leaks: Some(PlanLeaks {
            policy: policy(),
            namespaces: None,
            owner_kinds: vec!["ReplicaSet".into()],
            value: Leaks::default(),
        }),
    };
    let layer = PlanLayer { mode: Mode::Enforce, rules: vec![rule], quotas: vec![quota] };
    GpuMemoryNodeSpec { plan_life_seconds: 600, stand_down: false, layers: vec![layer] }
}

fn kubeconfig(root: &Path, api: SocketAddr) -> Result<PathBuf> {
    let path = root.join("kubeconfig");
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": NAME, "cluster": {"server": format!("http://{api}")}}],
        "users": [{"name": NAME, "user": {}}],
        "contexts": [{"name": NAME, "context": {"cluster": NAME, "user": NAME}}],
        "current-context": NAME,
    });
    fs::write(&path, config.to_string()).context("write the kubeconfig")?;
    Ok(path)
}
