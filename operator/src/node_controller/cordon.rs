//! Sets a cordon for a drain, and takes back what nothing stands behind any more. Cordon and
//! annotation are one patch, with the version of the node that was read: whoever comes next reads off
//! the node whose cordon it is, and for what.

use highwater_crds::names::{CORDONED_FOR, manager};
use highwater_policy::drain::{self, Cordon, Field};
use k8s_openapi::{
    api::core::v1::Node,
    apimachinery::pkg::apis::meta::v1::{FieldsV1, ManagedFieldsEntry, ObjectMeta},
};
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};
use tracing::info;

use crate::error::{Error, call};

/// What the annotation says for which a node is cordoned by us, if it has it.
pub(crate) fn annotation(node: &Node) -> Option<&str> {
    node.metadata.annotations.as_ref()?.get(CORDONED_FOR).map(String::as_str)
}

/// Whose cordon a node has, for a drain that marks its own with `own`.
pub(crate) fn state(node: &Node, own: &str) -> Cordon {
    drain::cordon(field(node), annotation(node), own)
}

/// Whether a node is cordoned, and whose that field is. Somebody may have uncordoned and cordoned it
/// since we did: then it is theirs.
pub(crate) fn field(node: &Node) -> Option<Field> {
    is_cordoned(node).then(|| if is_ours(&node.metadata) { Field::Ours } else { Field::Theirs })
}

/// Forgets who wrote what of a node, but for who wrote the cordon of one that has our annotation.
pub(crate) fn strip_managed(node: &mut Node) {
    let marked = annotation(node).is_some();
    let mut managed = node.metadata.managed_fields.take().filter(|_| marked).unwrap_or_default();
    managed.retain(wrote_cordon);
    for entry in &mut managed {
        entry.fields_v1 = Some(FieldsV1(json!({"f:spec": {"f:unschedulable": {}}})));
    }
    node.metadata.managed_fields = Some(managed).filter(|managed| !managed.is_empty());
}

/// Whether nothing more is scheduled on a node.
pub(crate) fn is_cordoned(node: &Node) -> bool {
    node.spec.as_ref().and_then(|s| s.unschedulable).unwrap_or(false)
}

/// Cordons a node unless somebody else has, or has lifted ours. `allowed` is asked last of all,
/// between the read and the write. Says whose cordon it has now.
pub(crate) async fn set(
    client: &Client,
    name: &str,
    own: &str,
    allowed: impl Future<Output = Result<(), Error>> + Send,
) -> Result<Cordon, Error> {
    let api: Api<Node> = Api::all(client.clone());
    let node = call("read a node", api.get(name)).await?;
    let before = state(&node, own);
    if before != Cordon::Open {
        return Ok(before);
    }
    allowed.await?;
    let patch = json!({
        "metadata": {
            "resourceVersion": node.metadata.resource_version,
            "annotations": {CORDONED_FOR: own},
        },
        "spec": {"unschedulable": true},
    });
    call("cordon a node", api.patch(name, &params(), &Patch::Merge(patch))).await?;
    info!(node = name, incident = own, "cordoned the node");
    Ok(Cordon::Own)
}

/// What was taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Released {
    /// The cordon.
    Cordon,
    /// The annotation alone: somebody lifted our cordon, or has cordoned the node since.
    Annotation,
}

/// Takes our cordon off a node if `orphaned` says of its annotation that nothing stands behind it.
pub(crate) async fn release(
    client: &Client,
    name: &str,
    orphaned: impl Fn(&str) -> bool + Send,
) -> Result<Option<Released>, Error> {
    let api: Api<Node> = Api::all(client.clone());
    let node = call("read a node", api.get(name)).await?;
    let Some(mark) = annotation(&node).filter(|mark| orphaned(mark)) else { return Ok(None) };
    let (patch, released) = undo(&node);
    call("uncordon a node", api.patch(name, &params(), &Patch::Merge(patch))).await?;
    info!(node = name, incident = mark, ?released, "took our cordon back");
    Ok(Some(released))
}

fn undo(node: &Node) -> (Value, Released) {
    let mut patch = json!({"metadata": {
        "resourceVersion": node.metadata.resource_version,
        "annotations": {CORDONED_FOR: null},
    }});
    if field(node) == Some(Field::Ours) {
        if let Some(fields) = patch.as_object_mut() {
            fields.insert("spec".to_owned(), json!({"unschedulable": null}));
        }
        return (patch, Released::Cordon);
    }
    (patch, Released::Annotation)
}

/// Whether the cordon that a node has is the one we set, where anybody says who set it.
fn is_ours(meta: &ObjectMeta) -> bool {
    let mut owners = meta.managed_fields.iter().flatten().filter(|entry| wrote_cordon(entry));
    let first = owners.next();
    first.is_none_or(|first| {
        let ours = |manager: Option<&String>| manager.is_some_and(|m| m == manager::OPERATOR_CORDON);
        ours(first.manager.as_ref()) || owners.any(|entry| ours(entry.manager.as_ref()))
    })
}

fn wrote_cordon(entry: &ManagedFieldsEntry) -> bool {
    let fields = entry.fields_v1.as_ref();
    fields.is_some_and(|fields| fields.0.pointer("/f:spec/f:unschedulable").is_some())
}

fn params() -> PatchParams {
    PatchParams { field_manager: Some(manager::OPERATOR_CORDON.to_owned()), ..PatchParams::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(unschedulable: bool, owner: Option<&str>) -> Node {
        let managed: Vec<Value> = owner
            .map(|owner| {
                json!({"manager": owner, "operation": "Update", "fieldsType": "FieldsV1",
                    "fieldsV1": {"f:spec": {"f:unschedulable": {}}}})
            })
            .into_iter()
            .collect();
        serde_json::from_value(json!({
            "metadata": {"name": "n1", "resourceVersion": "7", "managedFields": managed,
                "annotations": {CORDONED_FOR: "hw/i/u"}},
            "spec": {"unschedulable": unschedulable}}))
        .unwrap()
    }

    #[test]
    fn d05_whoever_lifted_our_cordon_and_set_their_own_is_respected_as_the_watch_shows_it_too() {
        let ours = Some(manager::OPERATOR_CORDON);
        let cases = [
            (node(true, ours), Cordon::Own),
            (node(true, Some("kubectl-cordon")), Cordon::Lifted),
            (node(false, None), Cordon::Lifted),
        ];
        for (mut node, whose) in cases {
            assert_eq!(state(&node, "hw/i/u"), whose);
            strip_managed(&mut node);
            assert_eq!(state(&node, "hw/i/u"), whose);
        }
        let mut unmarked = node(true, ours);
        unmarked.metadata.annotations = None;
        strip_managed(&mut unmarked);
        assert_eq!(unmarked.metadata.managed_fields, None, "a fleet is held in memory");
    }

    #[test]
    fn d05_only_our_own_cordon_is_taken_back() {
        let ours = undo(&node(true, Some(manager::OPERATOR_CORDON)));
        assert_eq!((&ours.0["spec"], ours.1), (&json!({"unschedulable": null}), Released::Cordon));
        assert_eq!(ours.0["metadata"]["resourceVersion"], "7");
        assert_eq!(undo(&node(true, None)).1, Released::Cordon, "nobody says whose the field is");
        for other in [node(true, Some("kubectl-cordon")), node(false, None)] {
            let (patch, released) = undo(&other);
            assert_eq!(released, Released::Annotation);
            assert!(patch.get("spec").is_none());
            assert_eq!(patch["metadata"]["annotations"][CORDONED_FOR], Value::Null);
        }
    }
}
