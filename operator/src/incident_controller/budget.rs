//! Tokens: what the budgets say, and the reservation before an act.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex as StdMutex, MutexGuard, PoisonError},
};

use highwater_crds::{
    Mode,
    names::{BUDGET_CONFIG_MAP, manager},
};
use highwater_policy::{
    budget::{self, Act, Answer, Limits, Request, Token, TokenLedger, leaks::Leak},
    remediation::Refusal,
};
use jiff::Timestamp;
use k8s_openapi::{api::core::v1::ConfigMap, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use kube::{Api, api::PostParams, runtime::reflector::ObjectRef};
use tokio::sync::Mutex;

use super::{dereference::Scene, workload};
use crate::{
    context::Context,
    error::{Error, call, code},
};

/// Key of the ledger in its ConfigMap.
const DATA_KEY: &str = "ledger.json";
/// How often a reservation is tried against others that are made at the same time.
const ATTEMPTS: usize = 5;

/// The reservations of this replica, one at a time: they change one object, so that together they
/// would only get into each other's way.
#[derive(Debug, Default)]
pub(crate) struct Reservations {
    turn: Mutex<()>,
    /// The ledger as last stored from here; the watch may not have heard of it.
    stored: StdMutex<Option<ConfigMap>>,
}

/// A token that is asked for.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub(crate) key: String,
    pub(crate) token: Token,
    /// UIDs of the workload's pods that are not ready; for a cordon the nodes that are being drained.
    pub(crate) unavailable: BTreeSet<String>,
    pub(crate) enforced: bool,
    /// The leak that the act is for, if it is.
    pub(crate) leak: Option<Leak>,
}

impl Wanted {
    /// What the budgets say, by this ledger, as of now.
    pub(crate) fn ask(&self, ctx: &Context, limits: &Limits, ledger: &TokenLedger) -> Answer {
        let request = Request {
            key: &self.key,
            token: Token { at: Timestamp::now(), ..self.token.clone() },
            unavailable: &self.unavailable,
            enforced: self.enforced,
            longest_window_minutes: longest_window(ctx),
            leak: self.leak,
        };
        budget::reserve(ledger, limits, &request)
    }
}

/// The longest window of any policy in minutes.
pub(crate) fn longest_window(ctx: &Context) -> i32 {
    ctx.known.borrow().policies.longest_window_minutes()
}

/// What is known of an act's token and of the budgets.
pub(crate) struct Standing {
    /// Whether it has its token.
    pub(crate) token: bool,
    /// What the budgets say against it.
    pub(crate) refusal: Option<Refusal>,
    /// Why another restart would be in vain.
    pub(crate) in_vain: Option<String>,
}

/// Where an act stands, by the ledger as last known.
pub(crate) fn look(ctx: &Context, scene: &Scene) -> Result<Standing, Error> {
    let ledger = ledger(ctx)?;
    let wanted = wanted(ctx, scene);
    let in_vain = if let Some(leak) = wanted.leak {
        let leaks_on = ledger.leaks_on(&wanted.key, &wanted.token, leak);
        leaks_on.or_else(|| ledger.in_vain(&wanted.key, &wanted.token))
    } else {
        let high_again = Token { at: scene.incident.spec.evidence.at.0, ..wanted.token.clone() };
        ledger.in_vain(&wanted.key, &high_again)
    };
    Ok(Standing {
        token: ledger.holds(&wanted.key),
        refusal: match wanted.ask(ctx, &scene.limits, &ledger) {
            Answer::Reserved { .. } => None,
            Answer::Refused { said, retry_at } => Some(Refusal { said, retry_at }),
        },
        in_vain,
    })
}

/// The ledger as last known.
pub(crate) fn ledger(ctx: &Context) -> Result<TokenLedger, Error> {
    let ledger = read(last_known(ctx).as_ref())?;
    show(ctx, &ledger);
    Ok(ledger)
}

/// Reserves the token of an incident's act.
pub(crate) async fn reserve(ctx: &Context, scene: &Scene) -> Result<Result<Vec<String>, Refusal>, Error> {
    reserve_token(ctx, &scene.limits, &wanted(ctx, scene)).await
}

/// Reserves a token by compare-and-swap: first against the ledger as last known, which needs one
/// call, then against the ledger as it is.
pub(crate) async fn reserve_token(
    ctx: &Context,
    limits: &Limits,
    wanted: &Wanted,
) -> Result<Result<Vec<String>, Refusal>, Error> {
    let api: Api<ConfigMap> = Api::namespaced(ctx.client.clone(), &ctx.release_namespace);
    let _turn = ctx.reservations.turn.lock().await;
    let mut stored = last_known(ctx);
    for _ in 0..ATTEMPTS {
        let (next, said) = match wanted.ask(ctx, limits, &read(stored.as_ref())?) {
            Answer::Reserved { ledger: None, said } => return Ok(Ok(said)),
            Answer::Reserved { ledger: Some(next), said } => (next, said),
            Answer::Refused { said, retry_at } => return Ok(Err(Refusal { said, retry_at })),
        };
        match store(ctx, &api, stored.as_ref(), &next).await {
            Ok(map) => {
                *own(ctx) = Some(map);
                show(ctx, &next);
                return Ok(Ok(said));
            }
            Err(Error::Api { source, .. }) if matches!(code(&source), Some(404 | 409)) => {
                stored = call("read the token ledger", api.get_opt(BUDGET_CONFIG_MAP)).await?;
                own(ctx).clone_from(&stored);
            }
            Err(error) => return Err(error),
        }
    }
    Err(Error::Overtaken)
}

/// The newer of the ledger as heard and as stored from here.
fn last_known(ctx: &Context) -> Option<ConfigMap> {
    let heard = ctx.stores.ledger.get(&ObjectRef::new(BUDGET_CONFIG_MAP).within(&ctx.release_namespace));
    let own = own(ctx).clone();
    match (heard, own) {
        (Some(heard), own) if own.as_ref().is_none_or(|own| version(&heard) >= version(own)) => {
            Some(ConfigMap::clone(&heard))
        }
        (_, own) => own,
    }
}

/// Versions of one object are numbers that grow.
fn version(map: &ConfigMap) -> Option<u64> {
    map.metadata.resource_version.as_ref()?.parse().ok()
}

fn own(ctx: &Context) -> MutexGuard<'_, Option<ConfigMap>> {
    ctx.reservations.stored.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wanted(ctx: &Context, scene: &Scene) -> Wanted {
    let spec = &scene.incident.spec;
    let (namespace, pod) =
        spec.subject.as_ref().map(|s| (s.namespace.as_str(), s.uid.as_str())).unwrap_or_default();
    let unavailable =
        scene.workload.as_ref().map(|w| workload::unavailable(&ctx.stores, namespace, w)).unwrap_or_default();
    Wanted {
        key: budget::key(scene.incident.metadata.uid.as_deref().unwrap_or_default(), pod),
        token: Token {
            at: Timestamp::now(),
            policy: spec.policy.clone(),
            workload: scene.workload_name().unwrap_or_default(),
            namespace: namespace.to_owned(),
            node: spec.node.clone(),
            pod: pod.to_owned(),
            act: Act::of(&spec.proposed),
            born: scene
                .pod
                .as_ref()
                .and_then(|(pod, _)| pod.metadata.creation_timestamp.as_ref())
                .map(|at| at.0),
            keep_until: None,
        },
        unavailable,
        enforced: spec.mode == Mode::Enforce,
        leak: scene.leak.as_ref().map(|leak| Leak { horizon: leak.horizon, slope: leak.slope }),
    }
}

fn read(map: Option<&ConfigMap>) -> Result<TokenLedger, Error> {
    match map.and_then(|m| m.data.as_ref()?.get(DATA_KEY)) {
        Some(text) => Ok(TokenLedger::parse(text)?),
        None => Ok(TokenLedger::default()),
    }
}

async fn store(
    ctx: &Context,
    api: &Api<ConfigMap>,
    old: Option<&ConfigMap>,
    ledger: &TokenLedger,
) -> Result<ConfigMap, Error> {
    ctx.leader.check()?;
    let map = ConfigMap {
        metadata: ObjectMeta {
            name: Some(BUDGET_CONFIG_MAP.to_owned()),
            resource_version: old.and_then(|m| m.metadata.resource_version.clone()),
            labels: Some(
                [("app.kubernetes.io/managed-by".to_owned(), "highwater-operator".to_owned())].into(),
            ),
            ..ObjectMeta::default()
        },
        data: Some(BTreeMap::from([(DATA_KEY.to_owned(), ledger.to_text()?)])),
        ..ConfigMap::default()
    };
    let params = PostParams { field_manager: Some(manager::OPERATOR_BUDGET.to_owned()), dry_run: false };
    match old {
        Some(_) => call("store the token ledger", api.replace(BUDGET_CONFIG_MAP, &params, &map)).await,
        None => call("create the token ledger", api.create(&params, &map)).await,
    }
}

fn show(ctx: &Context, ledger: &TokenLedger) {
    let mut by_policy: BTreeMap<&str, u32> = BTreeMap::new();
    for token in ledger.tokens() {
        *by_policy.entry(token.policy.as_str()).or_default() += 1;
    }
    ctx.metrics.budget_tokens.reset();
    for (policy, count) in by_policy {
        ctx.metrics.budget_tokens.with_label_values(&[policy]).set(f64::from(count));
    }
}
