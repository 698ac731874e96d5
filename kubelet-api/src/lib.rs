//! The two gRPC APIs of the kubelet that a GPU tool needs: device plugins, to hand out devices,
//! and pod resources, to learn which container was given which device.
//!
//! Messages, clients and servers are generated from `proto/` at build time.

use std::path::Path;

use tonic::transport::{Channel, Endpoint, Error};

/// Device plugin API `v1beta1`: a plugin registers with the kubelet, then serves it.
pub mod deviceplugin {
    mod generated {
        #![allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic)]
        tonic::include_proto!("v1beta1");
    }
    pub use generated::*;

    /// The version to register with.
    pub const VERSION: &str = "v1beta1";
    /// Health of a device that pods may be given.
    pub const HEALTHY: &str = "Healthy";
    /// Health of a device that no new pod is given.
    pub const UNHEALTHY: &str = "Unhealthy";
    /// The kubelet's own socket, within the directory that the plugins' sockets share.
    pub const KUBELET_SOCKET: &str = "kubelet.sock";
    /// The directory of the plugins' sockets.
    pub const DEFAULT_DIRECTORY: &str = "/var/lib/kubelet/device-plugins";
}

/// Pod resources API `v1`: which container holds which device.
pub mod podresources {
    mod generated {
        #![allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic)]
        tonic::include_proto!("v1");
    }
    pub use generated::*;

    /// The kubelet's socket for this API.
    pub const DEFAULT_SOCKET: &str = "/var/lib/kubelet/pod-resources/kubelet.sock";
}

/// Connects a client channel to the unix socket at `path`.
///
/// The channel connects again by itself after a broken connection.
///
/// # Errors
/// Fails when nothing listens at `path`, or when `path` is not valid UTF-8.
pub async fn connect_unix(path: impl AsRef<Path>) -> Result<Channel, Error> {
    Endpoint::try_from(format!("unix:{}", path.as_ref().display()))?.connect().await
}

#[cfg(test)]
mod tests {
    use super::*;
    use podresources::pod_resources_lister_client::PodResourcesListerClient;
    use podresources::pod_resources_lister_server::{PodResourcesLister, PodResourcesListerServer};
    use podresources::{
        AllocatableResourcesRequest, AllocatableResourcesResponse, GetPodResourcesRequest,
        GetPodResourcesResponse, ListPodResourcesRequest, ListPodResourcesResponse, PodResources,
    };
    use prost::Message;
    use tonic::{Request, Response, Status};

    struct OnePod;

    #[tonic::async_trait]
    impl PodResourcesLister for OnePod {
        async fn list(
            &self,
            _: Request<ListPodResourcesRequest>,
        ) -> Result<Response<ListPodResourcesResponse>, Status> {
            let pod =
                PodResources { name: "server".into(), namespace: "team-a".into(), ..PodResources::default() };
            Ok(Response::new(ListPodResourcesResponse { pod_resources: vec![pod] }))
        }

        async fn get_allocatable_resources(
            &self,
            _: Request<AllocatableResourcesRequest>,
        ) -> Result<Response<AllocatableResourcesResponse>, Status> {
            Err(Status::unimplemented("not needed here"))
        }

        async fn get(
            &self,
            _: Request<GetPodResourcesRequest>,
        ) -> Result<Response<GetPodResourcesResponse>, Status> {
            Err(Status::unimplemented("not needed here"))
        }
    }

    #[tokio::test]
    async fn a_client_reads_a_server_over_a_unix_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kubelet.sock");
        let listener = tokio::net::UnixListener::bind(&path).unwrap();
        let server = tokio::spawn(
            tonic::transport::Server::builder()
                .add_service(PodResourcesListerServer::new(OnePod))
                .serve_with_incoming(tokio_stream::wrappers::UnixListenerStream::new(listener)),
        );
        let mut client = PodResourcesListerClient::new(connect_unix(&path).await.unwrap());
        let pods = client.list(ListPodResourcesRequest {}).await.unwrap().into_inner().pod_resources;
        assert_eq!(pods.len(), 1);
        assert_eq!(pods[0].name, "server");
        server.abort();
    }

    #[tokio::test]
    async fn a_missing_socket_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        assert!(connect_unix(dir.path().join("none.sock")).await.is_err());
    }

    #[test]
    fn a_share_id_has_field_number_five() {
        let claim = podresources::ClaimResource {
            share_id: Some("s".into()),
            ..podresources::ClaimResource::default()
        };
        assert_eq!(claim.encode_to_vec(), [5 << 3 | 2, 1, b's']);
    }
}
