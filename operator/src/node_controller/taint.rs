//! Reads and writes our taint. The list of taints is atomic and shared with others, so it is
//! changed by read, modify, write with the version that was read.

use highwater_crds::names::{PRESSURE_TAINT, manager};
use highwater_policy::taint::{TaintChange, value_of};
use k8s_openapi::api::core::v1::{Node, Taint};
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use tracing::info;

use crate::error::{Error, call};

const EFFECT: &str = "NoSchedule";

/// The value of our taint, if the node has it.
pub(crate) fn present(node: &Node) -> Option<String> {
    let ours = node.spec.as_ref()?.taints.as_ref()?.iter().find(|t| is_ours(t))?;
    Some(ours.value.clone().unwrap_or_default())
}

/// Changes our taint and leaves every other as it is. `allowed` is asked last of all, between the
/// read and the write.
pub(crate) async fn write(
    client: &Client,
    name: &str,
    change: TaintChange,
    allowed: impl Future<Output = Result<(), Error>> + Send,
) -> Result<(), Error> {
    let api: Api<Node> = Api::all(client.clone());
    let node = call("read a node", api.get(name)).await?;
    let old = node.spec.and_then(|s| s.taints).unwrap_or_default();
    let new = changed(&old, change);
    if new == old {
        return Ok(());
    }
    allowed.await?;
    let patch = serde_json::json!({
        "metadata": {"resourceVersion": node.metadata.resource_version},
        "spec": {"taints": new},
    });
    let params =
        PatchParams { field_manager: Some(manager::OPERATOR_TAINT.to_owned()), ..PatchParams::default() };
    call("write a node's taints", api.patch(name, &params, &Patch::Merge(patch))).await?;
    info!(node = name, ?change, "changed the taint");
    Ok(())
}

fn changed(old: &[Taint], change: TaintChange) -> Vec<Taint> {
    let mut new: Vec<Taint> = old.iter().filter(|t| !is_ours(t)).cloned().collect();
    if let TaintChange::Set(level) = change {
        new.push(Taint {
            key: PRESSURE_TAINT.to_owned(),
            value: Some(value_of(level).to_owned()),
            effect: EFFECT.to_owned(),
            time_added: None,
        });
    }
    new
}

fn is_ours(taint: &Taint) -> bool {
    taint.key == PRESSURE_TAINT && taint.effect == EFFECT
}

#[cfg(test)]
mod tests {
    use highwater_crds::Level;

    use super::*;

    #[test]
    fn only_our_own_taint_changes() {
        let other = Taint { key: "gpu".into(), effect: EFFECT.into(), ..Taint::default() };
        let by_hand = Taint { key: PRESSURE_TAINT.into(), effect: "NoExecute".into(), ..Taint::default() };
        let old = vec![other, by_hand];
        let set = changed(&old, TaintChange::Set(Level::Critical));
        assert_eq!(set.len(), 3);
        assert_eq!(changed(&set, TaintChange::Set(Level::Critical)), set);
        assert_eq!(changed(&set, TaintChange::Remove), old);
    }
}
