//! The guard's volumes, as the kubelet asks for them: identity, node service and registration.

use std::{
    fs::DirBuilder,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::Context;
use futures::{Stream, stream};
use kubelet_api::{
    csi::{
        GetPluginCapabilitiesRequest, GetPluginCapabilitiesResponse, GetPluginInfoRequest,
        GetPluginInfoResponse, NodeGetCapabilitiesRequest, NodeGetCapabilitiesResponse, NodeGetInfoRequest,
        NodeGetInfoResponse, NodePublishVolumeRequest, NodePublishVolumeResponse, NodeUnpublishVolumeRequest,
        NodeUnpublishVolumeResponse, ProbeRequest, ProbeResponse,
        identity_server::{Identity, IdentityServer},
        node_server::{Node, NodeServer},
    },
    pluginregistration::{
        CSI_PLUGIN, CSI_VERSION, InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
        registration_server::{Registration, RegistrationServer},
    },
};
use tokio::{
    net::{UnixListener, UnixStream},
    time::sleep,
};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{Code, Request, Response, Status, transport::Server};
use tracing::{info, warn};

use crate::{
    args::Serve,
    place::Name,
    volume::{Kind, Refusal, Volumes},
};

/// Name of the driver.
pub(crate) const DRIVER: &str = "guard.highwater.dev";
/// The socket by which the kubelet learns of the driver. The kubelet's gRPC client makes the path of
/// the socket the authority of its requests, with `%2F` for each slash, which the HTTP library here
/// refuses in a host. In front of an `@`, where a URI has its user, percent-encoding is allowed.
const REGISTRATION: &str = "registration@guard.highwater.dev.sock";
/// Most calls of a connection that are worked on at once.
const MOST_CALLS: usize = 8;

/// The open sockets. Dropping it closes them; calls under way are answered.
#[derive(Debug)]
pub(crate) struct Csi {
    names: [Name; 2],
    _stop: DropGuard,
}

impl Csi {
    /// Serves the kubelet. The registration comes last: the kubelet calls at once.
    pub(crate) fn open(args: &Serve) -> anyhow::Result<Self> {
        let node = args.node_name.clone().context("the name of the node is not known")?;
        let plugin = args.kubelet_root.join("plugins").join(DRIVER);
        let made = DirBuilder::new().recursive(true).mode(0o750).create(&plugin);
        made.with_context(|| format!("make {}", plugin.display()))?;
        let endpoint = plugin.join("csi.sock");
        let registration = args.kubelet_root.join("plugins_registry").join(REGISTRATION);
        let volumes = Arc::new(Volumes::new(
            args.kubelet_root.clone(),
            args.guard_library.clone(),
            args.ready_helper.clone(),
        ));
        let stop = CancellationToken::new();

        let service = Service { node, endpoint: endpoint.clone(), volumes };
        let driver = Server::builder()
            .concurrency_limit_per_connection(MOST_CALLS)
            .add_service(IdentityServer::new(service.clone()))
            .add_service(NodeServer::new(service.clone()));
        let (incoming, name) = listen(&endpoint)?;
        serve(driver.serve_with_incoming_shutdown(incoming, stop.clone().cancelled_owned()));
        let registry = Server::builder()
            .concurrency_limit_per_connection(MOST_CALLS)
            .add_service(RegistrationServer::new(service));
        let (incoming, registered) = listen(&registration)?;
        serve(registry.serve_with_incoming_shutdown(incoming, stop.clone().cancelled_owned()));
        info!(endpoint = %endpoint.display(), "serving volumes");
        Ok(Self { names: [name, registered], _stop: stop.drop_guard() })
    }

    /// Whether the kubelet finds both sockets at their paths.
    pub(crate) fn holds(&self) -> bool {
        self.names.iter().all(Name::holds)
    }
}

fn listen(path: &Path) -> anyhow::Result<(impl Stream<Item = std::io::Result<UnixStream>> + use<>, Name)> {
    let listening = Name::take(path, |path| UnixListener::bind(path));
    let (listener, name) = listening.with_context(|| format!("listen at {}", path.display()))?;
    let incoming = stream::unfold(listener, |listener| async move {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => return Some((Ok(stream), listener)),
                // Out of descriptors, say. An error would end the server.
                Err(error) => {
                    warn!(%error, "cannot take a connection of the kubelet");
                    sleep(Duration::from_millis(200)).await;
                }
            }
        }
    });
    Ok((incoming, name))
}

fn serve(server: impl Future<Output = Result<(), tonic::transport::Error>> + Send + 'static) {
    tokio::spawn(async move {
        if let Err(error) = server.await {
            warn!(%error, "a server of the kubelet's ended");
        }
    });
}

#[derive(Clone, Debug)]
struct Service {
    node: String,
    endpoint: PathBuf,
    volumes: Arc<Volumes>,
}

impl Service {
    /// Does what takes the file system's time in a thread of its own.
    async fn work<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Volumes) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Status> {
        let volumes = Arc::clone(&self.volumes);
        let worked = tokio::task::spawn_blocking(move || work(&volumes)).await;
        match worked {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(refusal)) => {
                warn!(%refusal, "a volume is refused");
                Err(status(&refusal))
            }
            Err(error) => Err(Status::internal(error.to_string())),
        }
    }
}

fn status(refusal: &Refusal) -> Status {
    let code = match refusal.kind {
        Kind::Invalid => Code::InvalidArgument,
        Kind::NotReady => Code::FailedPrecondition,
        Kind::Full => Code::ResourceExhausted,
        Kind::Failed => Code::Internal,
    };
    Status::new(code, refusal.message.clone())
}

#[tonic::async_trait]
impl Identity for Service {
    async fn get_plugin_info(
        &self,
        _: Request<GetPluginInfoRequest>,
    ) -> Result<Response<GetPluginInfoResponse>, Status> {
        Ok(Response::new(GetPluginInfoResponse {
            name: DRIVER.to_owned(),
            vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
            ..GetPluginInfoResponse::default()
        }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<GetPluginCapabilitiesRequest>,
    ) -> Result<Response<GetPluginCapabilitiesResponse>, Status> {
        Ok(Response::new(GetPluginCapabilitiesResponse::default()))
    }

    async fn probe(&self, _: Request<ProbeRequest>) -> Result<Response<ProbeResponse>, Status> {
        Ok(Response::new(ProbeResponse::default()))
    }
}

#[tonic::async_trait]
impl Node for Service {
    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Result<Response<NodePublishVolumeResponse>, Status> {
        let request = request.into_inner();
        let published = self.work(move |volumes| volumes.publish(&request)).await?;
        if published.new {
            info!(pod = published.pod, volume = published.volume, "a volume is published");
        }
        Ok(Response::new(NodePublishVolumeResponse {}))
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Result<Response<NodeUnpublishVolumeResponse>, Status> {
        let request = request.into_inner();
        self.work(move |volumes| volumes.unpublish(&request)).await?;
        Ok(Response::new(NodeUnpublishVolumeResponse {}))
    }

    async fn node_get_capabilities(
        &self,
        _: Request<NodeGetCapabilitiesRequest>,
    ) -> Result<Response<NodeGetCapabilitiesResponse>, Status> {
        Ok(Response::new(NodeGetCapabilitiesResponse::default()))
    }

    async fn node_get_info(
        &self,
        _: Request<NodeGetInfoRequest>,
    ) -> Result<Response<NodeGetInfoResponse>, Status> {
        Ok(Response::new(NodeGetInfoResponse {
            node_id: self.node.clone(),
            ..NodeGetInfoResponse::default()
        }))
    }
}

#[tonic::async_trait]
impl Registration for Service {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: CSI_PLUGIN.to_owned(),
            name: DRIVER.to_owned(),
            endpoint: self.endpoint.to_string_lossy().into_owned(),
            supported_versions: vec![CSI_VERSION.to_owned()],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let RegistrationStatus { plugin_registered, error } = request.into_inner();
        if plugin_registered {
            info!("the kubelet took the volume driver");
        } else {
            // It asks again by itself.
            warn!(error, "the kubelet refused the volume driver");
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
