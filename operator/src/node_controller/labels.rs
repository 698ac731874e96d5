//! Writes the labels that say which strength a node gives. They are ours by server-side apply, so
//! that a label which somebody else set stays when ours goes.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Mutex, PoisonError},
};

use highwater_crds::names::manager::OPERATOR_STRENGTH;
use highwater_policy::node_labels::{ALL, VALUE};
use k8s_openapi::{api::core::v1::Node, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use tracing::info;

use crate::error::{Error, call};

/// Some of the labels.
pub(crate) type Set = BTreeSet<&'static str>;

/// What this replica last wrote while a node had what, by its name. A label that somebody else set
/// does not go with ours: then writing again would be in vain.
#[derive(Debug, Default)]
pub(crate) struct Told(Mutex<HashMap<String, (Set, Set)>>);

impl Told {
    /// Whether there is something to write.
    pub(crate) fn differs(&self, node: &str, present: &Set, desired: &Set) -> bool {
        let told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = told.get(node).is_some_and(|(there, wanted)| there == present && wanted == desired);
        present != desired && !known
    }

    /// Remembers a write.
    pub(crate) fn put(&self, node: &str, present: Set, desired: Set) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(node.to_owned(), (present, desired));
    }

    /// Forgets a node.
    pub(crate) fn forget(&self, node: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(node);
    }
}

/// Gives a node these labels of ours, and no other.
pub(crate) async fn write(client: &Client, meta: &ObjectMeta, labels: &Set) -> Result<(), Error> {
    let api: Api<Node> = Api::all(client.clone());
    let name = meta.name.as_deref().unwrap_or_default();
    let values: BTreeMap<_, _> = labels.iter().map(|key| (*key, VALUE)).collect();
    let patch = serde_json::json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "uid": meta.uid, "labels": values},
    });
    let params = PatchParams::apply(OPERATOR_STRENGTH).force();
    call("write a node's strength labels", api.patch(name, &params, &Patch::Apply(patch))).await?;
    info!(node = name, ?labels, "changed the strength labels");
    Ok(())
}

/// Whether a node has labels that we set. Needs its managed fields.
pub(crate) fn are_ours(node: &Node) -> bool {
    let ours = node.metadata.managed_fields.iter().flatten();
    ours.filter(|entry| entry.manager.as_deref() == Some(OPERATOR_STRENGTH)).any(|entry| {
        let labels = entry.fields_v1.as_ref().and_then(|fields| fields.0.pointer("/f:metadata/f:labels"));
        labels.is_some_and(|labels| ALL.iter().any(|key| labels.get(format!("f:{key}")).is_some()))
    })
}

#[cfg(test)]
mod tests {
    use highwater_crds::names::{KERNEL_LIMITS_LABEL, RESERVATION_LABEL};
    use serde_json::json;

    use super::*;

    #[test]
    fn what_somebody_else_set_is_not_written_against_for_ever() {
        let told = Told::default();
        let (by_hand, nothing) = (Set::from([RESERVATION_LABEL]), Set::new());
        assert!(told.differs("n", &by_hand, &nothing));
        told.put("n", by_hand.clone(), nothing.clone());
        assert!(!told.differs("n", &by_hand, &nothing), "it stayed: it is not ours");
        assert!(told.differs("n", &by_hand, &Set::from([RESERVATION_LABEL, KERNEL_LIMITS_LABEL])));
        assert!(!told.differs("n", &nothing, &nothing));
        told.forget("n");
        assert!(told.differs("n", &by_hand, &nothing));
    }

    #[test]
    fn labels_are_known_to_be_ours_by_their_manager() {
        let node = |manager: &str, label: &str| -> Node {
            serde_json::from_value(json!({"metadata": {
                "name": "n", "labels": {label: "true"},
                "managedFields": [{"manager": manager, "operation": "Apply", "fieldsType": "FieldsV1",
                    "fieldsV1": {"f:metadata": {"f:labels": {format!("f:{label}"): {}}}}}]}}))
            .unwrap()
        };
        assert!(are_ours(&node(OPERATOR_STRENGTH, RESERVATION_LABEL)));
        assert!(!are_ours(&node("kubectl-label", RESERVATION_LABEL)));
        assert!(!are_ours(&node(OPERATOR_STRENGTH, "pool")));
        assert!(!are_ours(&Node::default()));
    }
}
