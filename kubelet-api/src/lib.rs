//! The gRPC APIs of the kubelet that a GPU tool needs: device plugins, to hand out devices; pod
//! resources, to learn which container was given which device; and volume drivers, to put files
//! into pods.
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

/// Container Storage Interface `v1`, as far as a node-only driver of inline volumes goes.
pub mod csi {
    mod generated {
        #![allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic)]
        tonic::include_proto!("csi.v1");
    }
    pub use generated::*;

    /// Attribute by which the kubelet says that a volume is inline: `true`.
    pub const EPHEMERAL: &str = "csi.storage.k8s.io/ephemeral";
    /// Attribute with the name of the pod.
    pub const POD_NAME: &str = "csi.storage.k8s.io/pod.name";
    /// Attribute with the namespace of the pod.
    pub const POD_NAMESPACE: &str = "csi.storage.k8s.io/pod.namespace";
    /// Attribute with the UID of the pod.
    pub const POD_UID: &str = "csi.storage.k8s.io/pod.uid";
}

/// How the kubelet learns of volume drivers, `v1`.
pub mod pluginregistration {
    mod generated {
        #![allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic)]
        tonic::include_proto!("pluginregistration");
    }
    pub use generated::*;

    /// Type of a driver that speaks [`crate::csi`].
    pub const CSI_PLUGIN: &str = "CSIPlugin";
    /// Version of that protocol, as the kubelet wants it written.
    pub const CSI_VERSION: &str = "1.0.0";
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

    /// Bytes as a kubelet writes them: each field by its number in the public specification.
    #[test]
    fn volume_requests_have_the_numbers_of_the_specification() {
        fn field(number: u8, value: &[u8]) -> Vec<u8> {
            let length = u8::try_from(value.len()).unwrap();
            [&[number << 3 | 2, length], value].concat()
        }
        let entry = [field(1, b"k"), field(2, b"v")].concat();
        let mount = [field(2, &field(1, b"ext4")), field(3, &[1 << 3, 1])].concat();
        let written = [
            field(1, b"csi-1"),
            field(3, b"/stage"),
            field(4, b"/target"),
            field(5, &mount),
            vec![6 << 3, 1],
            field(8, &entry),
        ];
        let request = csi::NodePublishVolumeRequest::decode(written.concat().as_slice()).unwrap();
        assert_eq!((request.volume_id.as_str(), request.target_path.as_str()), ("csi-1", "/target"));
        assert!(request.readonly);
        assert_eq!(request.volume_context["k"], "v");
        let capability = request.volume_capability.unwrap();
        assert!(matches!(capability.access_type, Some(csi::volume_capability::AccessType::Mount(_))));
        assert_eq!(
            capability.access_mode.unwrap().mode(),
            csi::volume_capability::access_mode::Mode::SingleNodeWriter
        );
        let unpublish = csi::NodeUnpublishVolumeRequest { volume_id: "i".into(), target_path: "p".into() };
        assert_eq!(unpublish.encode_to_vec(), [field(1, b"i"), field(2, b"p")].concat());
        let info = csi::NodeGetInfoResponse { node_id: "n".into(), ..Default::default() };
        assert_eq!(info.encode_to_vec(), field(1, b"n"));
        let plugin = pluginregistration::PluginInfo {
            r#type: "t".into(),
            name: "n".into(),
            endpoint: "e".into(),
            supported_versions: vec!["v".into()],
        };
        let written = [field(1, b"t"), field(2, b"n"), field(3, b"e"), field(4, b"v")];
        assert_eq!(plugin.encode_to_vec(), written.concat());
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
