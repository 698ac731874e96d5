//! Incidents: created once, observed while somebody waits.

use highwater_crds::{GpuMemoryIncident, Observation, names::manager};
use kube::{
    Api, Client, Resource,
    api::{Patch, PatchParams},
};
use serde_json::json;

use crate::episodes::Name;

/// Creates an incident. One of the same name is of the same episode: it stands as it is, since
/// evidence is written once.
pub(super) async fn create(client: &Client, incident: &GpuMemoryIncident) -> kube::Result<GpuMemoryIncident> {
    let namespace = incident.metadata.namespace.as_deref().unwrap_or_default();
    let name = incident.metadata.name.as_deref().unwrap_or_default();
    let api: Api<GpuMemoryIncident> = Api::namespaced(client.clone(), namespace);
    let params = PatchParams::apply(manager::AGENT_INCIDENT);
    let mut there = match api.patch(name, &params, &Patch::Apply(incident)).await {
        Err(kube::Error::Api(status)) if [409, 422].contains(&status.code) => {
            api.get_opt(name).await?.ok_or(kube::Error::Api(status))?
        }
        written => written?,
    };
    there.metadata.managed_fields = None;
    Ok(there)
}

/// Writes the observation of an incident.
pub(super) async fn observe(
    client: &Client,
    (namespace, name): &Name,
    observation: &Observation,
) -> kube::Result<GpuMemoryIncident> {
    let api: Api<GpuMemoryIncident> = Api::namespaced(client.clone(), namespace);
    let patch = json!({
        "apiVersion": GpuMemoryIncident::api_version(&()),
        "kind": GpuMemoryIncident::kind(&()),
        "status": {"observation": observation},
    });
    api.patch_status(name, &PatchParams::apply(manager::AGENT_OBSERVATION).force(), &Patch::Apply(patch))
        .await
}
