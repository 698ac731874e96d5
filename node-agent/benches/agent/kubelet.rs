//! Stand-in for the kubelet's pod resources.

use std::path::Path;

use anyhow::Result;
use kubelet_api::podresources::{
    AllocatableResourcesRequest, AllocatableResourcesResponse, ContainerDevices, ContainerResources,
    GetPodResourcesRequest, GetPodResourcesResponse, ListPodResourcesRequest, ListPodResourcesResponse,
    PodResources,
    pod_resources_lister_server::{PodResourcesLister, PodResourcesListerServer},
};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status, transport::Server};

struct Kubelet(ListPodResourcesResponse);

/// Serves at `socket`, in the runtime that this is called from: each pod, by namespace and name, holds one device.
pub(crate) fn serve(socket: &Path, pods: Vec<(String, String, String)>) -> Result<()> {
    let pods = pods.into_iter().map(|(namespace, name, device)| {
        let devices = ContainerDevices {
            resource_name: "nvidia.com/gpu".into(),
            device_ids: vec![format!("{device}::{name}")],
            topology: None,
        };
        let container =
            ContainerResources { name: "server".into(), devices: vec![devices], ..Default::default() };
        PodResources { name, namespace, containers: vec![container], ..Default::default() }
    });
    let kubelet = Kubelet(ListPodResourcesResponse { pod_resources: pods.collect() });
    let connections = UnixListenerStream::new(UnixListener::bind(socket)?);
    let server = Server::builder().add_service(PodResourcesListerServer::new(kubelet));
    tokio::spawn(server.serve_with_incoming(connections));
    Ok(())
}

#[tonic::async_trait]
impl PodResourcesLister for Kubelet {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        Ok(Response::new(self.0.clone()))
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
