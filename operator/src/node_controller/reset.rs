//! Keeps the annotation of a node that asks for a reset of its devices: somebody who can reset them
//! may take it as a request.

use std::collections::BTreeSet;

use highwater_crds::{
    GpuMemoryIncident,
    names::{RESET_REQUESTED, manager},
};
use highwater_policy::drain::wants_reset;
use k8s_openapi::{api::core::v1::Node, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use tracing::info;

use crate::error::{Error, call};

/// The devices that the annotation names.
pub(crate) fn present(node: &Node) -> Option<&str> {
    node.metadata.annotations.as_ref()?.get(RESET_REQUESTED).map(String::as_str)
}

/// What the annotation ought to say, by the incidents of the node. None: it ought not to be there.
pub(crate) fn desired(incidents: &[GpuMemoryIncident]) -> Option<String> {
    let devices: BTreeSet<&str> =
        incidents.iter().filter(|i| wants_reset(i)).map(|i| i.spec.device.as_str()).collect();
    (!devices.is_empty()).then(|| devices.into_iter().collect::<Vec<_>>().join(","))
}

/// Whether every device of `desired` is in `present` already, so that nothing new is asked for.
pub(crate) fn asks_for_no_more(present: Option<&str>, desired: Option<&str>) -> bool {
    let there: BTreeSet<&str> = present.into_iter().flat_map(|p| p.split(',')).collect();
    desired.into_iter().flat_map(|d| d.split(',')).all(|device| there.contains(device))
}

/// Writes the annotation, or takes it away.
pub(crate) async fn write(client: &Client, meta: &ObjectMeta, value: Option<&str>) -> Result<(), Error> {
    let api: Api<Node> = Api::all(client.clone());
    let name = meta.name.as_deref().unwrap_or_default();
    let patch = serde_json::json!({"metadata": {"uid": meta.uid, "annotations": {RESET_REQUESTED: value}}});
    let params =
        PatchParams { field_manager: Some(manager::OPERATOR_CORDON.to_owned()), ..PatchParams::default() };
    call("write a request for a reset", api.patch(name, &params, &Patch::Merge(patch))).await?;
    info!(node = name, devices = value.unwrap_or("none"), "changed the request for a reset");
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn zombie(device: &str, seen: &str) -> GpuMemoryIncident {
        serde_json::from_value(json!({
            "metadata": {"name": device, "namespace": "hw"},
            "spec": {"kind": "ZombieMemory", "mode": "Enforce", "policy": "p", "node": "n", "device": device,
                "episode": 1, "evidence": {"at": "2026-01-01T00:00:00.000000Z"}, "proposed": {"action": "Drain"}},
            "status": {"observation": {"state": seen, "at": "2026-01-01T00:00:01.000000Z"}}}))
        .unwrap()
    }

    #[test]
    fn l03_l04_a_reset_is_asked_for_while_zombie_memory_is_there() {
        let both = [zombie("GPU-B", "Over"), zombie("GPU-A", "Over"), zombie("GPU-A", "Over")];
        assert_eq!(desired(&both).as_deref(), Some("GPU-A,GPU-B"));
        assert_eq!(desired(&[zombie("GPU-A", "Recovered")]), None, "l13: it goes when the memory is back");
        assert_eq!(desired(&[]), None, "also when the incident was deleted");
    }

    #[test]
    fn to_ask_for_less_is_no_new_act() {
        assert!(asks_for_no_more(Some("A,B"), Some("B")));
        assert!(asks_for_no_more(Some("A"), None) && asks_for_no_more(None, None));
        assert!(!asks_for_no_more(Some("A"), Some("A,B")));
    }
}
