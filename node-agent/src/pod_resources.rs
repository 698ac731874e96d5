//! Which container was given which device, as the kubelet tells: known from a pod's admission
//! on, before it uses a byte.
//!
//! The kubelet has no watch for this. It is asked on every change of the node's pods, again a
//! few times soon after (admission follows binding by a moment), and slowly otherwise. While the
//! kubelet is away the last answer stands, with its age.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use kubelet_api::podresources::{
    ListPodResourcesRequest, ListPodResourcesResponse, pod_resources_lister_client::PodResourcesListerClient,
};
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tracing::{debug, info, warn};

/// How long the kubelet may take to answer.
const CALL_LIMIT: Duration = Duration::from_secs(5);
/// Largest answer that is read: the kubelet's own limit.
const MESSAGE_LIMIT: usize = 16 << 20;
/// How long after a change the kubelet is asked often.
const SETTLE: Duration = Duration::from_secs(5);
/// How often it is asked while things settle, or while it is away.
const SOON: Duration = Duration::from_millis(500);
/// How often it is asked otherwise.
const RESYNC: Duration = Duration::from_secs(20);

/// What the kubelet said last, and when.
#[derive(Clone, Debug, Default)]
pub(crate) struct Snapshot {
    /// The assignments; empty before the first answer.
    pub(crate) assignments: Arc<Assignments>,
    /// When the kubelet said so; `None` before the first answer.
    pub(crate) at: Option<Instant>,
}

/// The devices of the node's active pods.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Assignments {
    /// By namespace, and then by name of the pod (the kubelet gives no UID): the containers that have GPUs.
    pub(crate) pods: BTreeMap<String, BTreeMap<String, Vec<ContainerDevices>>>,
    /// Number of resource claims (DRA) held by containers. Their devices are not resolved.
    pub(crate) claims: usize,
}

/// The devices of one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ContainerDevices {
    /// Name of the container.
    pub(crate) container: String,
    /// The devices as their plugin named them, replicas of one device once: UUIDs for the usual
    /// configuration of the GPU plugin.
    pub(crate) devices: BTreeSet<String>,
}

impl Assignments {
    /// The devices of a pod, over all of its containers: one that several have several times.
    pub(crate) fn devices(&self, namespace: &str, name: &str) -> impl Iterator<Item = &str> {
        let containers = self.pods.get(namespace).and_then(|pods| pods.get(name));
        containers.into_iter().flatten().flat_map(|c| c.devices.iter().map(String::as_str))
    }
}

impl From<ListPodResourcesResponse> for Assignments {
    fn from(response: ListPodResourcesResponse) -> Self {
        let mut assignments = Self::default();
        for pod in response.pod_resources {
            let mut containers = Vec::new();
            for container in pod.containers {
                assignments.claims += container.dynamic_resources.len();
                let devices: BTreeSet<_> = container
                    .devices
                    .iter()
                    .filter(|held| is_gpu(&held.resource_name))
                    .flat_map(|held| held.device_ids.iter().map(|id| device_of(id).to_owned()))
                    .collect();
                if !devices.is_empty() {
                    containers.push(ContainerDevices { container: container.name, devices });
                }
            }
            if !containers.is_empty() {
                assignments.pods.entry(pod.namespace).or_default().insert(pod.name, containers);
            }
        }
        assignments
    }
}

/// Whether the extended resource stands for GPUs: `nvidia.com/gpu`, `nvidia.com/gpu.shared`,
/// `nvidia.com/mig-1g.10gb`, ...
fn is_gpu(resource: &str) -> bool {
    resource
        .strip_prefix("nvidia.com/")
        .is_some_and(|name| name.starts_with("gpu") || name.starts_with("mig-"))
}

/// The device of a replica: where a device is shared, its plugin hands out `<device>::<number>`.
fn device_of(id: &str) -> &str {
    id.split_once("::").map_or(id, |(device, _)| device)
}

/// Asks the kubelet at `socket` until cancelled: at once, after each `changed`, and now and then.
pub(crate) async fn run(
    socket: PathBuf,
    changed: Arc<Notify>,
    snapshots: watch::Sender<Snapshot>,
    cancelled: CancellationToken,
) {
    let mut kubelet = Kubelet { socket, client: None };
    let mut away = false;
    let mut settled = Instant::now() + SETTLE;
    loop {
        match kubelet.list().await {
            Ok(assignments) => {
                if std::mem::take(&mut away) {
                    info!("the kubelet's pod resources are back");
                }
                publish(&snapshots, assignments);
            }
            Err(error) => {
                if !std::mem::replace(&mut away, true) {
                    warn!(error = &*error, socket = %kubelet.socket.display(),
                        "cannot ask the kubelet which pod has which device: the last answer stands");
                }
                debug!(error = &*error, "the kubelet is away");
            }
        }
        let pause = if away || Instant::now() < settled { SOON } else { RESYNC };
        tokio::select! {
            () = cancelled.cancelled() => return,
            () = changed.notified() => settled = Instant::now() + SETTLE,
            () = sleep(pause) => {}
        }
    }
}

/// Shows the answer; those who wait for a change wake only if there is one.
fn publish(snapshots: &watch::Sender<Snapshot>, assignments: Assignments) {
    snapshots.send_if_modified(|snapshot| {
        let first = snapshot.at.replace(Instant::now()).is_none();
        let differs = *snapshot.assignments != assignments;
        if differs {
            snapshot.assignments = Arc::new(assignments);
        }
        first || differs
    });
}

type Error = Box<dyn std::error::Error + Send + Sync>;

/// The kubelet's end; connected when needed.
struct Kubelet {
    socket: PathBuf,
    client: Option<PodResourcesListerClient<Channel>>,
}

impl Kubelet {
    async fn list(&mut self) -> Result<Assignments, Error> {
        let answer = timeout(CALL_LIMIT, self.try_list()).await.unwrap_or_else(|elapsed| Err(elapsed.into()));
        if answer.is_err() {
            self.client = None;
        }
        answer
    }

    async fn try_list(&mut self) -> Result<Assignments, Error> {
        let client = match &mut self.client {
            Some(client) => client,
            None => self.client.insert(connect(&self.socket).await?),
        };
        Ok(client.list(ListPodResourcesRequest {}).await?.into_inner().into())
    }
}

async fn connect(socket: &Path) -> Result<PodResourcesListerClient<Channel>, Error> {
    let channel = kubelet_api::connect_unix(socket).await?;
    Ok(PodResourcesListerClient::new(channel).max_decoding_message_size(MESSAGE_LIMIT))
}

#[cfg(test)]
mod tests {
    use kubelet_api::podresources::{
        AllocatableResourcesRequest, AllocatableResourcesResponse, ContainerDevices as HeldDevices,
        ContainerResources, DynamicResource, GetPodResourcesRequest, GetPodResourcesResponse, PodResources,
        pod_resources_lister_server::{PodResourcesLister, PodResourcesListerServer},
    };
    use tokio::{net::UnixListener, task::JoinHandle};
    use tokio_stream::wrappers::UnixListenerStream;
    use tonic::{Request, Response, Status};

    use super::*;

    struct FakeKubelet(watch::Receiver<ListPodResourcesResponse>);

    #[tonic::async_trait]
    impl PodResourcesLister for FakeKubelet {
        async fn list(
            &self,
            _: Request<ListPodResourcesRequest>,
        ) -> Result<Response<ListPodResourcesResponse>, Status> {
            Ok(Response::new(self.0.borrow().clone()))
        }

        async fn get_allocatable_resources(
            &self,
            _: Request<AllocatableResourcesRequest>,
        ) -> Result<Response<AllocatableResourcesResponse>, Status> {
            Err(Status::unimplemented("not asked"))
        }

        async fn get(
            &self,
            _: Request<GetPodResourcesRequest>,
        ) -> Result<Response<GetPodResourcesResponse>, Status> {
            Err(Status::unimplemented("not asked"))
        }
    }

    fn serve(socket: &Path, answer: watch::Receiver<ListPodResourcesResponse>) -> JoinHandle<()> {
        let connections = UnixListenerStream::new(UnixListener::bind(socket).unwrap());
        let service = PodResourcesListerServer::new(FakeKubelet(answer));
        let server =
            tonic::transport::Server::builder().add_service(service).serve_with_incoming(connections);
        tokio::spawn(async { server.await.unwrap() })
    }

    fn container(name: &str, held: &[(&str, &[&str])]) -> ContainerResources {
        let devices = held.iter().map(|(resource, ids)| HeldDevices {
            resource_name: (*resource).into(),
            device_ids: ids.iter().map(ToString::to_string).collect(),
            topology: None,
        });
        ContainerResources { name: name.into(), devices: devices.collect(), ..ContainerResources::default() }
    }

    fn answer(name: &str, containers: Vec<ContainerResources>) -> ListPodResourcesResponse {
        let pod = PodResources {
            name: name.into(),
            namespace: "llm".into(),
            containers,
            ..PodResources::default()
        };
        ListPodResourcesResponse { pod_resources: vec![pod] }
    }

    fn one_gpu(name: &str) -> ListPodResourcesResponse {
        answer(name, vec![container("server", &[("nvidia.com/gpu", &["GPU-1::3"])])])
    }

    #[test]
    fn replicas_collapse_and_other_resources_are_left_out() {
        let mut with_claim = container("claims", &[]);
        with_claim.dynamic_resources = vec![DynamicResource::default(); 2];
        let assignments = Assignments::from(answer(
            "server",
            vec![
                container("a", &[("nvidia.com/gpu.shared", &["GPU-1::0", "GPU-1::7", "GPU-2"])]),
                container("b", &[("nvidia.com/mig-1g.18gb", &["MIG-1"]), ("nvidia.com/gpu", &["GPU-1::1"])]),
                container(
                    "c",
                    &[("rdma/hca", &["0"]), ("nvidia.com/pgpu-x", &["x"]), ("amd.com/gpu", &["y"])],
                ),
                with_claim,
            ],
        ));
        let devices = |name| assignments.devices("llm", name).collect::<BTreeSet<_>>();
        assert_eq!(devices("server"), BTreeSet::from(["GPU-1", "GPU-2", "MIG-1"]));
        assert_eq!(devices("other"), BTreeSet::new());
        let names =
            assignments.pods.values().flat_map(BTreeMap::values).flatten().map(|c| c.container.as_str());
        assert_eq!(names.collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(assignments.claims, 2);
    }

    #[tokio::test]
    async fn changes_are_followed_and_an_absent_kubelet_leaves_the_last_answer() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("kubelet.sock");
        let (answers, answer) = watch::channel(one_gpu("first"));
        let changed = Arc::new(Notify::new());
        let (sender, mut snapshots) = watch::channel(Snapshot::default());
        let cancelled = CancellationToken::new();
        // The kubelet is away at first.
        let client = tokio::spawn(run(socket.clone(), changed.clone(), sender, cancelled.clone()));
        let server = serve(&socket, answer.clone());
        let holds = |name: &'static str| {
            move |snapshot: &Snapshot| snapshot.assignments.devices("llm", name).next().is_some()
        };
        snapshots.wait_for(holds("first")).await.unwrap();

        answers.send_replace(one_gpu("second"));
        changed.notify_one();
        let second = snapshots.wait_for(holds("second")).await.unwrap().at;

        // Away: the answer stands. Back, on a new socket: it is asked again.
        server.abort();
        assert!(server.await.unwrap_err().is_cancelled());
        std::fs::remove_file(&socket).unwrap();
        assert!(holds("second")(&snapshots.borrow()));
        answers.send_replace(one_gpu("third"));
        let _server = serve(&socket, answer);
        changed.notify_one();
        let third = snapshots.wait_for(holds("third")).await.unwrap().at;
        assert!(third > second && second.is_some());

        cancelled.cancel();
        client.await.unwrap();
    }
}
