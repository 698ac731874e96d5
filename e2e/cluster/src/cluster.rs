//! A running cluster, as tests and commands use it.

use std::{
    fs,
    path::PathBuf,
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Node as NodeObject, Pod};
use kube::{
    Api, Client, Config,
    api::{ListParams, LogParams},
    config::{KubeConfigOptions, Kubeconfig},
};
use tokio::sync::OnceCell;

use crate::{
    cgroup, command,
    control::{self, ComponentStatus, Request},
    eventually,
    namespace::enter_network,
    node,
    paths::Paths,
    prometheus::{self, Prometheus},
    spec::{Node, Spec},
};

/// A handle on the running cluster. Cheap to clone.
///
/// The thread that made it is in the cluster's network, and so is every thread and process that
/// it starts afterwards: make the tokio runtime after, not before.
#[derive(Clone, Debug)]
pub struct Cluster {
    /// Where the cluster keeps its things.
    pub paths: Paths,
    /// Its shape.
    pub spec: Spec,
    client: Arc<OnceCell<ClientCell>>,
}

/// A client has no useful debug form of its own.
#[derive(Clone)]
struct ClientCell(Client);

impl std::fmt::Debug for ClientCell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Client")
    }
}

impl Cluster {
    /// Moves the calling thread into the cluster's network for good.
    ///
    /// Fails where no cluster is up, or without root.
    pub fn attach() -> Result<Self> {
        Self::attach_to(Paths::from_env()?)
    }

    /// The same for a cluster that the environment need not name.
    pub fn attach_to(paths: Paths) -> Result<Self> {
        let spec = Spec::load(&paths).context("no cluster is up: run `cluster up`")?;
        enter_network(&paths.id.network())?;
        Ok(Self { paths, spec, client: Arc::default() })
    }

    /// Runs a future to its end on a new runtime, whose threads are in the cluster's network.
    pub fn block_on<T>(&self, future: impl Future<Output = T>) -> Result<T> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let result = runtime.block_on(future);
        // Tasks left behind (watches, agents' output) need no goodbye.
        runtime.shutdown_timeout(Duration::from_secs(1));
        Ok(result)
    }

    /// The administrator's client. It belongs to the runtime that first asked for it.
    pub async fn client(&self) -> Result<Client> {
        let cell = self
            .client
            .get_or_try_init(|| async { anyhow::Ok(ClientCell(client(&self.paths, "admin").await?)) })
            .await?;
        Ok(cell.0.clone())
    }

    /// A client with another identity, say `kubelet-n1`: one that a kubeconfig was written for.
    pub async fn client_of(&self, identity: &str) -> Result<Client> {
        client(&self.paths, identity).await
    }

    /// The text that the API server serves under a path that is no resource: `readyz`, `metrics`.
    pub async fn get_raw(&self, path: &str) -> Result<String> {
        let request = kube::core::Request::new("").get(path, &kube::api::GetParams::default())?;
        Ok(self.client().await?.request_text(request).await?)
    }

    /// kubectl with the administrator's rights, in the cluster's network: add arguments and run it.
    pub fn kubectl_command(&self) -> Command {
        let mut command = Command::new(self.paths.program("kubectl"));
        self.with_kubeconfig(&mut command);
        command
    }

    /// helm, likewise.
    pub fn helm_command(&self) -> Command {
        let mut command = Command::new(self.paths.program("helm"));
        self.with_kubeconfig(&mut command);
        command
    }

    fn with_kubeconfig(&self, command: &mut Command) {
        command.env("KUBECONFIG", self.paths.kubeconfig("admin")).env("NO_PROXY", "*").env("no_proxy", "*");
    }

    /// Runs kubectl to its end; its standard output, or an error with what it said.
    pub async fn kubectl<'a>(&self, arguments: impl IntoIterator<Item = &'a str>) -> Result<String> {
        run(self.kubectl_command(), arguments, None).await
    }

    /// `kubectl apply --server-side -f -` of a manifest.
    pub async fn apply(&self, manifest: &str) -> Result<String> {
        run(self.kubectl_command(), ["apply", "--server-side", "-f", "-"], Some(manifest)).await
    }

    /// Runs a program inside a node (its mounts, processes and network); its standard output.
    pub async fn on_node(&self, node: &str, program: &str, arguments: &[&str]) -> Result<String> {
        let (paths, node) = (self.paths.clone(), node.to_owned());
        let mut command = Command::new(program);
        command.args(arguments);
        tokio::task::spawn_blocking(move || node::output(&paths, &node, &mut command)).await?
    }

    /// The host's name for a path on a node, for those of [`node::OWN_PATHS`].
    pub fn node_path(&self, node: &str, path: &str) -> PathBuf {
        self.paths.on_node(node, path)
    }

    /// `gpusim ctl ARGUMENTS` for a node's simulated driver; what it printed. Process ids in the
    /// arguments and the answer are the node's.
    pub async fn gpusim(&self, node: &str, arguments: &[&str]) -> Result<String> {
        // On the node: the driver turns away callers that have no pid there.
        let program = self.paths.program("gpusim").display().to_string();
        self.on_node(node, &program, &[&["ctl"], arguments].concat()).await
    }

    /// Asks the supervisor for something about a component (`kube-apiserver`, `kubelet-n1`, ...).
    pub async fn control(&self, request: Request) -> Result<Vec<ComponentStatus>> {
        let paths = self.paths.clone();
        tokio::task::spawn_blocking(move || control::send(&paths, &request)).await?
    }

    /// Ends a component with SIGTERM; it stays down until [`Cluster::start`].
    pub async fn stop(&self, component: &str) -> Result<()> {
        self.control(Request::Stop(component.into())).await.map(drop)
    }

    /// Ends a component with SIGKILL; it stays down until [`Cluster::start`].
    pub async fn kill(&self, component: &str) -> Result<()> {
        self.control(Request::Kill(component.into())).await.map(drop)
    }

    /// Starts a component that was stopped or killed. Returns once its process runs.
    pub async fn start(&self, component: &str) -> Result<()> {
        self.control(Request::Start(component.into())).await.map(drop)
    }

    /// Halts a component in mid-flight (SIGSTOP) until [`Cluster::resume`].
    pub async fn pause(&self, component: &str) -> Result<()> {
        self.control(Request::Pause(component.into())).await.map(drop)
    }

    /// Lets a paused component go on.
    pub async fn resume(&self, component: &str) -> Result<()> {
        self.control(Request::Resume(component.into())).await.map(drop)
    }

    /// Waits until the API server is ready to serve.
    pub async fn api_ready(&self) -> Result<()> {
        eventually("the API server's readiness", Duration::from_mins(1), async || {
            self.get_raw("readyz").await
        })
        .await
        .map(drop)
    }

    /// Waits until every real node reports itself Ready.
    pub async fn nodes_ready(&self, limit: Duration) -> Result<()> {
        let nodes: Api<NodeObject> = Api::all(self.client().await?);
        for name in self.spec.nodes().map(Node::name) {
            eventually(&format!("node {name} to be Ready"), limit, async || {
                // A list: a get of what is not there yet would be logged as a failure.
                let found =
                    nodes.list(&ListParams::default().fields(&format!("metadata.name={name}"))).await?;
                let node = found.items.into_iter().next().context("it is not registered")?;
                let conditions = node.status.and_then(|status| status.conditions).unwrap_or_default();
                let ready = conditions.iter().find(|condition| condition.type_ == "Ready");
                let ready = ready.context("no condition yet")?;
                ensure!(ready.status == "True", "{}", ready.message.as_deref().unwrap_or("not ready"));
                Ok(())
            })
            .await?;
        }
        Ok(())
    }

    /// Ends every process of a node at once, empties what lies in memory there, and starts it
    /// again. Returns when its programs run; its pods follow.
    pub async fn reboot(&self, node: &str) -> Result<()> {
        let component = node::component_name(node);
        self.kill(&component).await?;
        cgroup::remove_pods(self.paths.id, Node::parse(node)?)?;
        for path in node::OWN_PATHS.iter().filter(|path| path.starts_with("/run/")) {
            let folder = self.node_path(node, path);
            fs::remove_dir_all(&folder)
                .and_then(|()| fs::create_dir(&folder))
                .with_context(|| format!("emptying {}", folder.display()))?;
        }
        self.start(&component).await?;
        eventually(&format!("the programs of {node}"), Duration::from_secs(30), async || {
            let all = self.control(Request::Status).await?;
            let down = all.iter().find(|one| one.wanted && one.pid.is_none());
            ensure!(down.is_none(), "{down:?} does not run");
            Ok(())
        })
        .await
    }

    /// Starts a Prometheus with empty data that scrapes the product, and waits until it is ready.
    pub async fn prometheus(&self) -> Result<Prometheus> {
        let paths = self.paths.clone();
        tokio::task::spawn_blocking(move || prometheus::start(&paths)).await??;
        Prometheus::ready().await
    }

    /// The last `lines` lines of a container's output (of its only container where none is named).
    pub async fn logs(
        &self,
        namespace: &str,
        pod: &str,
        container: Option<&str>,
        lines: i64,
    ) -> Result<String> {
        let pods: Api<Pod> = Api::namespaced(self.client().await?, namespace);
        let parameters = LogParams {
            container: container.map(str::to_owned),
            tail_lines: Some(lines),
            ..LogParams::default()
        };
        Ok(pods.logs(pod, &parameters).await?)
    }
}

async fn client(paths: &Paths, identity: &str) -> Result<Client> {
    let kubeconfig = Kubeconfig::read_from(paths.kubeconfig(identity))
        .with_context(|| format!("no kubeconfig of {identity}: is the cluster up?"))?;
    let mut config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    // A proxy of the host's does not lead into the cluster's network.
    config.proxy_url = None;
    Ok(Client::try_from(config)?)
}

async fn run<'a>(
    command: Command,
    arguments: impl IntoIterator<Item = &'a str>,
    input: Option<&str>,
) -> Result<String> {
    use tokio::io::AsyncWriteExt as _;
    let mut command = tokio::process::Command::from(command);
    command.args(arguments).stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() });
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let name = command::display(command.as_std());
    let mut child = command.spawn().with_context(|| format!("starting {name}"))?;
    if let (Some(mut stdin), Some(input)) = (child.stdin.take(), input) {
        // A program that refuses its arguments reads nothing; its message tells why.
        let _ = stdin.write_all(input.as_bytes()).await;
    }
    command::check(&name, child.wait_with_output().await?)
}
