//! Eviction requests.

use std::time::Duration;

use highwater_policy::{pod::PodFacts, remediation::Eviction};
use k8s_openapi::{
    api::{core::v1::Pod, policy::v1},
    apimachinery::pkg::apis::meta::v1::{DeleteOptions, ObjectMeta, Preconditions},
};
use kube::{
    Api,
    api::PostParams,
    core::{Status, response::StatusDetails},
};

use super::dereference::Scene;
use crate::context::Context;

/// How long one request may take.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Whether it is done or only asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Run {
    /// Only what the API server would say.
    Dry,
    /// For good.
    Real,
}

/// Asks the API server to evict the subject: see [`evict_pod`].
pub(crate) async fn evict(ctx: &Context, scene: &Scene, run: Run) -> Eviction {
    let Some((pod, facts)) = &scene.pod else { return Eviction::Gone };
    let grace = scene.incident.spec.proposed.grace_period_seconds.map(i64::from);
    evict_pod(ctx, pod, facts, grace, run).await
}

/// Asks the API server to evict a pod. The request names UID and version of the pod as it
/// was read for the decision, so that it cannot hit a pod that has changed, whoever sends it and
/// however late. It is never sent again by itself.
pub(crate) async fn evict_pod(
    ctx: &Context,
    pod: &Pod,
    facts: &PodFacts,
    grace: Option<i64>,
    run: Run,
) -> Eviction {
    let body = v1::Eviction {
        metadata: ObjectMeta {
            name: Some(facts.name.clone()),
            namespace: Some(facts.namespace.clone()),
            ..ObjectMeta::default()
        },
        delete_options: Some(DeleteOptions {
            grace_period_seconds: grace,
            preconditions: Some(Preconditions {
                uid: Some(facts.uid.clone()),
                resource_version: pod.metadata.resource_version.clone(),
            }),
            ..DeleteOptions::default()
        }),
    };
    let api: Api<Pod> = Api::namespaced(ctx.client.clone(), &facts.namespace);
    let params = PostParams { dry_run: run == Run::Dry, field_manager: None };
    // Not `Api::evict`: that writes the options under a name that the API server ignores.
    let request = api.create_subresource::<_, Status>("eviction", &facts.name, &params, &body);
    let outcome = match tokio::time::timeout(TIMEOUT, request).await {
        Ok(Ok(_)) => Eviction::Accepted,
        Ok(Err(kube::Error::Api(status))) => refused(&status),
        Ok(Err(error)) => Eviction::Unclear(error.to_string()),
        Err(_) => Eviction::Unclear(format!("no answer within {} s", TIMEOUT.as_secs())),
    };
    if run == Run::Real {
        ctx.metrics.evictions.with_label_values(&[label(&outcome)]).inc();
    }
    outcome
}

fn refused(status: &Status) -> Eviction {
    let causes = status.details.as_ref().map(causes).unwrap_or_default();
    let why = if causes.is_empty() { status.message.clone() } else { format!("{} {causes}", status.message) };
    let by_budget = causes.contains("DisruptionBudget")
        || ["disruption budget", "PodDisruptionBudget", "pdb "]
            .iter()
            .any(|word| status.message.contains(word));
    match status.code {
        404 => Eviction::Gone,
        409 => Eviction::Conflict,
        // 429 is also the answer of a busy API server; two budgets for one pod are a 500.
        429 | 403 | 500 if by_budget => Eviction::Budget(why),
        400 | 403 | 405 | 422 => Eviction::Denied(why),
        _ => Eviction::Unclear(why),
    }
}

fn causes(details: &StatusDetails) -> String {
    let causes: Vec<_> = details.causes.iter().map(|c| format!("({}: {})", c.reason, c.message)).collect();
    causes.join(" ")
}

fn label(outcome: &Eviction) -> &'static str {
    match outcome {
        Eviction::Accepted => "accepted",
        Eviction::Gone => "gone",
        Eviction::Conflict => "conflict",
        Eviction::Budget(_) => "disruption_budget",
        Eviction::Unclear(_) => "unclear",
        Eviction::Denied(_) => "denied",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn answer(value: Value) -> Eviction {
        refused(&serde_json::from_value(value).unwrap())
    }

    #[test]
    fn a_disruption_budget_is_told_from_a_busy_server() {
        let message = "Cannot evict pod as it would violate the pod's disruption budget.";
        let budget = answer(
            json!({"code": 429, "message": message, "reason": "TooManyRequests", "details": {"causes": [
            {"reason": "DisruptionBudget", "message": "The disruption budget server needs 2 healthy pods and has 2 currently"}]}}),
        );
        let Eviction::Budget(why) = budget else { panic!("{budget:?}") };
        assert!(why.contains("needs 2 healthy pods"));
        let busy = json!({"code": 429, "message": "too many requests, please try again later"});
        assert!(matches!(answer(busy), Eviction::Unclear(_)));
    }

    #[test]
    fn two_budgets_for_one_pod_wait_for_a_person() {
        let message = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.";
        assert!(matches!(answer(json!({"code": 500, "message": message})), Eviction::Budget(_)));
        assert!(matches!(answer(json!({"code": 500, "message": "etcd"})), Eviction::Unclear(_)));
    }

    #[test]
    fn a_changed_pod_is_looked_at_again() {
        assert_eq!(answer(json!({"code": 409, "message": "uid mismatch"})), Eviction::Conflict);
        assert_eq!(answer(json!({"code": 404, "message": "not found"})), Eviction::Gone);
        assert!(matches!(answer(json!({"code": 403, "message": "no"})), Eviction::Denied(_)));
    }
}
