//! Removes incidents that ended long ago, and the oldest where there are too many.

use std::{sync::Arc, time::Duration};

use highwater_crds::GpuMemoryIncident;
use jiff::{SignedDuration, Timestamp};
use kube::{
    Api,
    api::{DeleteParams, Preconditions},
};
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::{
    context::{Context, is_open, key},
    error::call,
};

/// How often is looked.
const EVERY: Duration = Duration::from_mins(10);
/// How long an incident is kept after it ended.
const RETENTION: SignedDuration = SignedDuration::from_hours(24);
/// Most ended incidents that are kept.
const MOST: usize = 1000;

/// Removes ended incidents while this replica leads.
pub(crate) async fn collect_finished(ctx: Arc<Context>, stop: CancellationToken) {
    loop {
        tokio::select! { () = stop.cancelled() => return, () = tokio::time::sleep(EVERY) => {} }
        let ended = ctx.stores.incidents(|i| !is_open(i));
        for incident in surplus(&ended, Timestamp::now()) {
            if !ctx.leader.holds() {
                break;
            }
            let (namespace, name) = key(&incident.metadata);
            let api: Api<GpuMemoryIncident> = Api::namespaced(ctx.client.clone(), &namespace);
            let params = DeleteParams::default()
                .preconditions(Preconditions { uid: incident.metadata.uid.clone(), resource_version: None });
            match call("remove an ended incident", api.delete(&name, &params)).await {
                Ok(_) => info!(namespace, name, "removed an ended incident"),
                Err(error) => {
                    ctx.failed("collect", &name, &error);
                }
            }
        }
    }
}

/// What may go: the oldest above [`MOST`], and all that ended longer than [`RETENTION`] ago.
fn surplus(ended: &[GpuMemoryIncident], now: Timestamp) -> Vec<&GpuMemoryIncident> {
    let since = |i: &GpuMemoryIncident| i.status.as_ref()?.decision.as_ref().map(|d| d.since.0);
    let mut by_age: Vec<_> = ended.iter().filter_map(|i| Some((since(i)?, i))).collect();
    by_age.sort_by_key(|(at, _)| *at);
    let too_many = by_age.len().saturating_sub(MOST);
    by_age
        .into_iter()
        .enumerate()
        .filter(|(i, (at, _))| *i < too_many || now.duration_since(*at) > RETENTION)
        .map(|(_, (_, incident))| incident)
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn ended(name: &str, second: i64) -> GpuMemoryIncident {
        serde_json::from_value(json!({
            "apiVersion": "highwater.dev/v1alpha1", "kind": "GpuMemoryIncident",
            "metadata": {"name": name, "namespace": "team"},
            "spec": {"kind": "QuotaBreach", "mode": "Enforce", "policy": "p", "node": "n", "device": "d", "episode": 1,
                     "evidence": {"at": "2026-01-01T00:00:00.000000Z"}, "proposed": {"action": "Restart"}},
            "status": {"decision": {"state": "Succeeded", "reason": "MemoryReturned",
                "since": format!("{:.6}", Timestamp::from_second(second).unwrap())}},
        }))
        .unwrap()
    }

    #[test]
    fn the_old_and_the_surplus_go() {
        let day = 24 * 3600;
        let now = Timestamp::from_second(day + 10).unwrap();
        let few = [ended("old", 9), ended("young", 11)];
        let names = |gone: Vec<&GpuMemoryIncident>| {
            gone.iter().map(|i| i.metadata.name.clone().unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(names(surplus(&few, now)), ["old"]);
        let many: Vec<_> = (0..1002).map(|i| ended(&format!("i{i}"), day + i % 10)).collect();
        assert_eq!(surplus(&many, now).len(), 2);
    }
}
