//! Being there for the kubelet, which wipes the directory of plugins whenever it starts.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use kubelet_api::connect_unix;
use kubelet_api::deviceplugin::device_plugin_server::DevicePluginServer;
use kubelet_api::deviceplugin::registration_client::RegistrationClient;
use kubelet_api::deviceplugin::{KUBELET_SOCKET, RegisterRequest, VERSION};
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;

use crate::plugin::{OPTIONS, Plugin};

/// Our socket, within the directory of plugins.
const SOCKET: &str = "highwater-gpu.sock";
/// Between two looks at the directory.
const PERIOD: Duration = Duration::from_millis(500);

/// Serves the plugin, and registers it with each kubelet that comes, until SIGTERM.
pub(crate) async fn serve(directory: &Path, resource: &str, plugin: Plugin) -> Result<()> {
    let mut terminated = signal(SignalKind::terminate()).context("watch for SIGTERM")?;
    tokio::select! {
        result = serve_each_kubelet(directory, resource, plugin) => result,
        _ = terminated.recv() => {
            // The kubelet takes a refused connection for what it is.
            let _ = std::fs::remove_file(directory.join(SOCKET));
            Ok(())
        }
    }
}

async fn serve_each_kubelet(directory: &Path, resource: &str, plugin: Plugin) -> Result<()> {
    loop {
        let (kubelet, own) = (directory.join(KUBELET_SOCKET), directory.join(SOCKET));
        let known = await_file(&kubelet).await;
        let listener = listen(&own).with_context(|| format!("listen at {}", own.display()))?;
        let ours = identity(&own);
        let server = Server::builder().add_service(DevicePluginServer::new(plugin.clone()));
        let server = tokio::spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
        match register(&kubelet, resource).await {
            Ok(()) => {
                tracing::info!(resource, "registered");
                while identity(&kubelet) == Some(known) && identity(&own) == ours && !server.is_finished() {
                    tokio::time::sleep(PERIOD).await;
                }
                tracing::info!("the kubelet was started anew");
            }
            Err(error) => {
                tracing::warn!(error = format!("{error:#}"), "not registered");
                tokio::time::sleep(PERIOD).await;
            }
        }
        server.abort();
    }
}

fn listen(path: &Path) -> io::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => UnixListener::bind(path),
    }
}

async fn register(kubelet: &Path, resource: &str) -> Result<()> {
    let channel = connect_unix(kubelet).await.context("connect to the kubelet")?;
    let request = RegisterRequest {
        version: VERSION.to_owned(),
        endpoint: SOCKET.to_owned(),
        resource_name: resource.to_owned(),
        options: Some(OPTIONS),
    };
    RegistrationClient::new(channel).register(request).await.context("register with the kubelet")?;
    Ok(())
}

async fn await_file(path: &Path) -> Identity {
    loop {
        match identity(path) {
            Some(identity) => return identity,
            None => tokio::time::sleep(PERIOD).await,
        }
    }
}

/// Tells a file from another of the same name.
type Identity = (u64, u64, i64, i64);

fn identity(path: &Path) -> Option<Identity> {
    let of = |file: Metadata| (file.dev(), file.ino(), file.ctime(), file.ctime_nsec());
    path.metadata().ok().map(of)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::Access;
    use crate::devices::Gpu;
    use kubelet_api::deviceplugin::device_plugin_client::DevicePluginClient;
    use kubelet_api::deviceplugin::registration_server::{Registration, RegistrationServer};
    use kubelet_api::deviceplugin::{AllocateRequest, ContainerAllocateRequest, Empty};
    use tokio::sync::{mpsc, watch};
    use tonic::{Request, Response, Status};

    /// As much of a kubelet as a plugin meets first.
    struct Kubelet(mpsc::UnboundedSender<RegisterRequest>);

    #[tonic::async_trait]
    impl Registration for Kubelet {
        async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
            self.0.send(request.into_inner()).unwrap();
            Ok(Response::new(Empty {}))
        }
    }

    fn start_kubelet(
        directory: &Path,
    ) -> (mpsc::UnboundedReceiver<RegisterRequest>, tokio::task::JoinHandle<()>) {
        let (sender, receiver) = mpsc::unbounded_channel();
        let listener = listen(&directory.join(KUBELET_SOCKET)).unwrap();
        let server = Server::builder().add_service(RegistrationServer::new(Kubelet(sender)));
        let server = server.serve_with_incoming(UnixListenerStream::new(listener));
        (receiver, tokio::spawn(async move { server.await.unwrap() }))
    }

    fn gpu(healthy: bool) -> Vec<Gpu> {
        vec![Gpu { uuid: "GPU-a".into(), minor: Some(0), file: Some(0), healthy }]
    }

    #[tokio::test]
    async fn each_kubelet_finds_the_plugin_and_follows_its_devices() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_owned();
        let (devices, receiver) = watch::channel(gpu(true));
        let access = Access::simulated(Path::new("/lib"), Path::new("/run/gpusim"));
        let plugin = Plugin::new(receiver, access, 2);
        let task = tokio::spawn({
            let path = path.clone();
            async move { serve(&path, "nvidia.com/gpu", plugin).await }
        });

        let (mut registered, kubelet) = start_kubelet(&path);
        let request = registered.recv().await.unwrap();
        assert_eq!((request.version.as_str(), request.resource_name.as_str()), ("v1beta1", "nvidia.com/gpu"));
        let channel = connect_unix(path.join(&request.endpoint)).await.unwrap();
        let mut client = DevicePluginClient::new(channel);
        let mut lists = client.list_and_watch(Empty {}).await.unwrap().into_inner();
        let list = lists.message().await.unwrap().unwrap().devices;
        assert_eq!(list.iter().map(|unit| unit.id.as_str()).collect::<Vec<_>>(), ["GPU-a::0", "GPU-a::1"]);
        devices.send(gpu(false)).unwrap();
        assert_eq!(lists.message().await.unwrap().unwrap().devices[0].health, "Unhealthy");

        let allocate = |unit: &str| AllocateRequest {
            container_requests: vec![ContainerAllocateRequest { devices_ids: vec![unit.to_owned()] }],
        };
        let response = client.allocate(allocate("GPU-a::1")).await.unwrap().into_inner();
        assert_eq!(response.container_responses[0].envs["NVIDIA_VISIBLE_DEVICES"], "GPU-a");
        let refusal = client.allocate(allocate("GPU-x::1")).await.unwrap_err();
        assert_eq!(refusal.code(), tonic::Code::NotFound);

        // The next kubelet wipes the directory first.
        kubelet.abort();
        for entry in std::fs::read_dir(&path).unwrap() {
            std::fs::remove_file(entry.unwrap().path()).unwrap();
        }
        let (mut registered, _kubelet) = start_kubelet(&path);
        let request = registered.recv().await.unwrap();
        connect_unix(path.join(&request.endpoint)).await.unwrap();
        task.abort();
    }
}
