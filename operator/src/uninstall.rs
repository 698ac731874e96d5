//! The mark of an uninstall, on the Lease of the release: until the time that it names, no replica
//! sets taints, writes plans or evicts, whichever of them leads. It ends by itself, so that an
//! uninstall that failed needs no hand, and concerns only replicas that were running when it was
//! last renewed, so that a new install begins at once.

use highwater_crds::names::{LEADER_LEASE, UNINSTALLING, manager};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::{api::coordination::v1::Lease, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};

use crate::{
    context::Context,
    error::{Error, call},
};

/// How long the mark lasts: longer than the operators take to end once Helm deletes them.
const LASTS: SignedDuration = SignedDuration::from_secs(60);

/// Whether a Lease says that the release is being uninstalled to which a replica belongs that runs
/// since `started`.
pub(crate) fn under_way(lease: &Lease, started: Timestamp, now: Timestamp) -> bool {
    let until = lease.metadata.annotations.as_ref().and_then(|a| a.get(UNINSTALLING));
    let until = until.and_then(|at| at.parse::<Timestamp>().ok());
    until.is_some_and(|until| now < until && until.duration_since(started) >= LASTS)
}

/// Fails while the release is being uninstalled, by the Lease as it is now.
pub(crate) async fn check(ctx: &Context) -> Result<(), Error> {
    let api: Api<Lease> = Api::namespaced(ctx.client.clone(), &ctx.release_namespace);
    let lease = call("read the lease", api.get_opt(LEADER_LEASE)).await?;
    if lease.is_some_and(|lease| under_way(&lease, ctx.started, Timestamp::now())) {
        return Err(Error::Uninstalling);
    }
    Ok(())
}

/// Sets the mark, or makes it last longer.
pub(crate) async fn mark(client: &Client, namespace: &str) -> Result<(), Error> {
    let api: Api<Lease> = Api::namespaced(client.clone(), namespace);
    let until = Timestamp::now().saturating_add(LASTS).map_or(Timestamp::MAX, |until| until);
    let lease = Lease {
        metadata: ObjectMeta {
            name: Some(LEADER_LEASE.to_owned()),
            annotations: Some([(UNINSTALLING.to_owned(), until.to_string())].into()),
            ..ObjectMeta::default()
        },
        spec: None,
    };
    let params = PatchParams::apply(manager::OPERATOR_CLEANUP).force();
    call("mark the lease", api.patch(LEADER_LEASE, &params, &Patch::Apply(lease))).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mark_holds_until_its_time_and_no_longer() {
        let marked = |value: &str| -> Lease {
            serde_json::from_value(serde_json::json!({
                "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                "metadata": {"name": LEADER_LEASE, "annotations": {UNINSTALLING: value}}}))
            .unwrap()
        };
        let at = |second| Timestamp::from_second(second).unwrap();
        let lease = marked("1970-01-01T00:01:40Z");
        assert!(under_way(&lease, at(0), at(99)));
        assert!(!under_way(&lease, at(0), at(100)));
        assert!(!under_way(&marked("yes"), at(0), at(0)));
        assert!(!under_way(&Lease::default(), at(0), at(0)));
    }

    #[test]
    fn the_mark_is_none_of_a_later_installs_business() {
        let mut lease = Lease::default();
        lease.metadata.annotations =
            Some([(UNINSTALLING.to_owned(), "1970-01-01T00:01:40Z".to_owned())].into());
        let at = |second| Timestamp::from_second(second).unwrap();
        assert!(under_way(&lease, at(40), at(50)), "it was set after the start");
        assert!(!under_way(&lease, at(41), at(50)), "it was set before the start");
    }
}
