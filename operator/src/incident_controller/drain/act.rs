//! The act step of a drain.

use std::time::Duration;

use highwater_crds::DecisionState;
use highwater_policy::{
    drain::{Cordon, Step, decide, uses_gpu},
    pod::PodFacts,
    remediation::{
        BUDGET_EXHAUSTED, DISRUPTION_BUDGET, Eviction, Particulars, Refusal, Verdict, WITHIN_BUDGET,
        out_of_budget,
    },
};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use tokio::time::Instant;
use tracing::info;

use super::{
    dereference::{Scene, refusal_key},
    room::Room,
    write,
};
use crate::{
    claims::Claim,
    context::Context,
    error::{Error, call},
    incident_controller::{
        act::{AFTER_REFUSAL, AT_ONCE},
        budget::reserve_token,
        evict::{Run, evict_pod},
    },
    node_controller::cordon,
    queue::Again,
    uninstall,
};

/// How soon a pod that was asked to go is looked at again.
const NEWS: Duration = Duration::from_secs(1);

/// Reserves a token, records `Approved`, cordons the node, records that. Each may be done again after
/// a crash without doing it twice.
pub(super) async fn begin(ctx: &Context, mut scene: Scene) -> Result<Again, Error> {
    let node = scene.incident.spec.node.clone();
    let claim = Claim { device: format!("{node}/*"), subject: format!("node/{node}"), gentle: false };
    if !ctx.claims.take(&scene.key, &claim) {
        return Ok(AT_ONCE);
    }
    let done = reserve_and_cordon(ctx, &mut scene).await;
    ctx.claims.release(&scene.key);
    match done {
        Ok(false) => Ok(Again::Backoff(AFTER_REFUSAL)),
        Ok(true) | Err(Error::Overtaken) => Ok(AT_ONCE),
        Err(error) => Err(error),
    }
}

async fn reserve_and_cordon(ctx: &Context, scene: &mut Scene) -> Result<bool, Error> {
    let (token, budgets) = match reserve_token(ctx, &scene.limits, &scene.node_token()).await? {
        Ok(said) => ("a token is reserved", said),
        // The cordon stands, and its time has to be counted.
        Err(Refusal { said, .. }) if scene.cordon() == Some(Cordon::Own) => {
            ("its cordon stands already", said)
        }
        Err(Refusal { said, .. }) => {
            let verdict = out_of_budget(&said);
            write(ctx, scene, &verdict, Particulars { budgets: said, ..Particulars::default() }).await?;
            return Ok(false);
        }
    };
    let Room { targets, weighed } = scene.room.clone().unwrap_or_default();
    let going = scene.pods.iter().filter(|pod| pod.stays.is_none() && !pod.going).count();
    let node = scene.incident.spec.node.clone();
    let approved = |what: &str| Verdict {
        state: DecisionState::Approved,
        reason: WITHIN_BUDGET,
        message: format!(
            "{token}; {node} {what} and {going} pods are evicted one after the other{}",
            to(&targets, weighed.as_deref())
        ),
    };
    let particulars = Particulars { budgets, targets: targets.clone(), ..Particulars::default() };
    write(ctx, scene, &approved("is cordoned"), particulars).await?;
    // A pause, another policy or another drain may have come while the token was reserved.
    scene.look_again(ctx).await?;
    if decide(&scene.view(), Timestamp::now()) != Step::Begin {
        return Err(Error::Overtaken);
    }
    let allowed = async {
        uninstall::check(ctx).await?;
        ctx.leader.check()
    };
    if cordon::set(&ctx.client, &node, &scene.mark(), allowed).await? != Cordon::Own {
        return Err(Error::Overtaken);
    }
    let now = Timestamp::now();
    if let Some(on) = &scene.node {
        let text = format!("cordoned the node to drain it for incident {}", scene.mark());
        ctx.events.on_node(on, "Cordoned", "Cordon", &text);
    }
    if !targets.is_empty() {
        ctx.metrics.redirections.with_label_values(&["target"]).inc();
    }
    let reaction = now.duration_since(scene.incident.spec.evidence.at.0);
    ctx.metrics.reaction.observe(reaction.as_secs_f64().max(0.0));
    let particulars = Particulars { acted_at: Some(now), ..Particulars::default() };
    write(ctx, scene, &approved("was cordoned"), particulars).await?;
    Ok(true)
}

/// Where there is room, and where the scores of hosts decided.
fn to(targets: &[String], weighed: Option<&str>) -> String {
    if targets.is_empty() {
        return String::new();
    }
    let weighed = weighed.map(|weighed| format!("; {weighed}")).unwrap_or_default();
    format!("; there is room on {}{weighed}", targets.join(", "))
}

/// Reserves a token for a pod and evicts it, after a last look at pod and node.
pub(super) async fn evict(ctx: &Context, mut scene: Scene, index: usize) -> Result<Again, Error> {
    let Some((pod, wanted)) = scene.pods.get(index).cloned().zip(scene.tokens.get(index).cloned()) else {
        return Ok(AT_ONCE);
    };
    let said = match reserve_token(ctx, &scene.limits, &wanted).await? {
        Ok(said) => said,
        Err(Refusal { said, .. }) => {
            let why = format!("the eviction of {}/{} waits: {}", pod.namespace, pod.name, said.join("; "));
            let verdict = waits(BUDGET_EXHAUSTED, why);
            write(ctx, &mut scene, &verdict, Particulars { budgets: said, ..Particulars::default() }).await?;
            return Ok(Again::Backoff(AFTER_REFUSAL));
        }
    };
    let api: Api<Pod> = Api::namespaced(ctx.client.clone(), &pod.namespace);
    let live = call("read the pod", api.get_opt(&pod.name)).await?;
    let Some(live) = live.filter(|live| live.metadata.uid.as_deref() == Some(&pod.uid)) else {
        return Ok(Again::After(NEWS)); // gone: the store will hear of it
    };
    let facts = PodFacts::parse(&live);
    if facts.terminating || facts.node.as_ref() != Some(&scene.incident.spec.node) || !uses_gpu(&live) {
        return Ok(Again::After(NEWS));
    }
    // Somebody may have uncordoned the node, or the memory may be back.
    scene.look_again(ctx).await?;
    let still = matches!(decide(&scene.view(), Timestamp::now()), Step::Evict(at)
        if scene.pods.get(at).is_some_and(|chosen| chosen.uid == pod.uid));
    if !still || scene.stays(ctx, &facts).is_some() {
        return Ok(Again::After(NEWS));
    }
    ctx.leader.check()?;
    let eviction = evict_pod(ctx, &live, &facts, None, Run::Real).await;
    info!(node = scene.incident.spec.node, pod = pod.name, namespace = pod.namespace, ?eviction, "drain");
    let refused = |why: &str| ctx.refusals.put(&refusal_key(&facts), why, Instant::now());
    match &eviction {
        Eviction::Accepted => {
            let text = format!(
                "evicted from {}, which is drained for incident {}: {}",
                scene.incident.spec.node,
                scene.mark(),
                said.join("; ")
            );
            ctx.events.drained(&scene.incident, &live, &text);
            Ok(Again::After(NEWS))
        }
        Eviction::Gone => Ok(Again::After(NEWS)),
        Eviction::Conflict => Ok(AT_ONCE),
        Eviction::Budget(why) | Eviction::Denied(why) => {
            refused(why);
            let message = format!("the eviction of {}/{} waits: {why}", pod.namespace, pod.name);
            write(ctx, &mut scene, &waits(DISRUPTION_BUDGET, message), Particulars::default()).await?;
            Ok(Again::After(AFTER_REFUSAL))
        }
        Eviction::Unclear(why) => {
            refused(why);
            Ok(Again::Backoff(AFTER_REFUSAL))
        }
    }
}

fn waits(reason: &'static str, message: String) -> Verdict {
    Verdict { state: DecisionState::Approved, reason, message }
}

#[cfg(test)]
mod tests {
    use super::to;

    #[test]
    fn where_there_is_room_is_said_with_what_a_score_decided() {
        let targets = ["n2".to_owned(), "n3".to_owned()];
        assert_eq!(to(&targets, None), "; there is room on n2, n3");
        assert_eq!(to(&targets, Some("n3 goes before n1")), "; there is room on n2, n3; n3 goes before n1");
        assert_eq!(to(&[], Some("n3 goes before n1")), "");
    }
}
