//! The service that the kubelet calls.

use std::collections::BTreeSet;
use std::pin::Pin;

use futures::{Stream, stream};
use kubelet_api::deviceplugin::device_plugin_server::DevicePlugin;
use kubelet_api::deviceplugin::{
    AllocateRequest, AllocateResponse, ContainerAllocateRequest, ContainerAllocateResponse,
    ContainerPreferredAllocationResponse, DevicePluginOptions, Empty, ListAndWatchResponse,
    PreStartContainerRequest, PreStartContainerResponse, PreferredAllocationRequest,
    PreferredAllocationResponse,
};
use tokio::sync::watch;
use tonic::{Request, Response, Status};

use crate::access::Access;
use crate::allocation::{device_of, preferred, units};
use crate::devices::Gpu;

/// What can be called beyond the minimum.
pub(crate) const OPTIONS: DevicePluginOptions =
    DevicePluginOptions { pre_start_required: false, get_preferred_allocation_available: true };

/// The devices, and how containers get at them.
#[derive(Debug, Clone)]
pub(crate) struct Plugin {
    devices: watch::Receiver<Vec<Gpu>>,
    access: Access,
    replicas: u32,
}

impl Plugin {
    pub(crate) fn new(devices: watch::Receiver<Vec<Gpu>>, access: Access, replicas: u32) -> Self {
        Self { devices, access, replicas }
    }

    fn allocate_container(
        &self,
        request: &ContainerAllocateRequest,
    ) -> Result<ContainerAllocateResponse, Status> {
        let wanted: BTreeSet<&str> = request.devices_ids.iter().map(|unit| device_of(unit)).collect();
        let gpus: Vec<Gpu> =
            self.devices.borrow().iter().filter(|gpu| wanted.contains(gpu.uuid.as_str())).cloned().collect();
        if gpus.len() < wanted.len() {
            return Err(Status::not_found(format!("not all of {wanted:?} are devices of this node")));
        }
        tracing::info!(units = ?request.devices_ids, "allocated");
        self.access.response(&gpus).map_err(|error| Status::failed_precondition(error.to_string()))
    }
}

#[tonic::async_trait]
impl DevicePlugin for Plugin {
    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(OPTIONS))
    }

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let replicas = self.replicas;
        let mut devices = self.devices.clone();
        devices.mark_changed();
        let lists = stream::unfold(devices, move |mut devices| async move {
            devices.changed().await.ok()?;
            let list = ListAndWatchResponse { devices: units(&devices.borrow_and_update(), replicas) };
            Some((Ok(list), devices))
        });
        Ok(Response::new(Box::pin(lists)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let requests = request.into_inner().container_requests;
        let responses = requests.iter().map(|request| {
            let size = usize::try_from(request.allocation_size).unwrap_or(0);
            let chosen = preferred(&request.available_device_i_ds, &request.must_include_device_i_ds, size);
            ContainerPreferredAllocationResponse { device_i_ds: chosen }
        });
        Ok(Response::new(PreferredAllocationResponse { container_responses: responses.collect() }))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let requests = request.into_inner().container_requests;
        let responses: Result<_, Status> =
            requests.iter().map(|request| self.allocate_container(request)).collect();
        Ok(Response::new(AllocateResponse { container_responses: responses? }))
    }

    async fn pre_start_container(
        &self,
        _: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        Ok(Response::new(PreStartContainerResponse {}))
    }
}
