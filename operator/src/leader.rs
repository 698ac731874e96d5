//! Leader election: every replica watches, only the leader writes.
//!
//! A lease is no fence, so every write is safe with two leaders: server-side apply with the UID of
//! the object, a transition rule on decisions, compare-and-swap for tokens, and evictions that
//! name the version of the pod that was looked at.

use std::time::Duration;

use highwater_crds::names;
use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, Client};
use kube_lease_manager::{LeaseManager, LeaseManagerBuilder, LeaseParams};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::error::{Error, call};

/// How long the lease lasts without renewal, in seconds.
pub(crate) const LEASE_SECONDS: u64 = 10;
/// How long before its end it is renewed, in seconds. Calls for the lease must fail sooner.
const RENEW_BEFORE_END_SECONDS: u64 = 4;
/// How long a lease that was just won may still be taken by another that found it expired.
const SETTLING: Duration = Duration::from_millis(1500);
/// How soon the lease is tried again after an error.
const AFTER_ERROR: Duration = Duration::from_secs(1);
/// How long one call for the lease may take, so that a leader that cannot renew steps down before
/// its lease is another's.
pub(crate) const CALL: Duration = Duration::from_secs(3);

/// Whether this replica leads.
#[derive(Clone, Debug)]
pub(crate) struct Leadership(watch::Receiver<bool>);

impl Leadership {
    pub(crate) fn new() -> (watch::Sender<bool>, Self) {
        let (sender, receiver) = watch::channel(false);
        (sender, Self(receiver))
    }

    pub(crate) fn holds(&self) -> bool {
        *self.0.borrow()
    }

    /// Fails unless this replica leads: to be asked before every write.
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.holds() { Ok(()) } else { Err(Error::NotLeader) }
    }

    /// Waits until leadership is won or lost.
    pub(crate) async fn changed(&mut self) -> bool {
        if self.0.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        *self.0.borrow_and_update()
    }
}

/// Tries to lead until told to stop, then gives the lease back.
pub(crate) async fn campaign(
    client: Client,
    namespace: String,
    identity: String,
    leads: watch::Sender<bool>,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    loop {
        match term(&client, &namespace, &identity, &leads, &stop).await {
            Ok(()) => return Ok(()),
            Err(error) => warn!(%error, "cannot tell who leads; not leading"),
        }
        step(&leads, false);
        tokio::select! { () = stop.cancelled() => return Ok(()), () = tokio::time::sleep(AFTER_ERROR) => {} }
    }
}

/// Follows the lease until it cannot be followed. After an error it is taken up afresh, since the
/// manager does not say whether it still holds.
///
/// Replicas that find an expired lease at the same moment may each take it from the other and
/// notice only when they renew. So a win counts only once the lease has settled and still names
/// this replica.
async fn term(
    client: &Client,
    namespace: &str,
    identity: &str,
    leads: &watch::Sender<bool>,
    stop: &CancellationToken,
) -> anyhow::Result<()> {
    let manager: LeaseManager = LeaseManagerBuilder::new(client.clone(), names::LEADER_LEASE)
        .with_namespace(namespace)
        .with_parameters(LeaseParams::new(identity, LEASE_SECONDS, RENEW_BEFORE_END_SECONDS))
        .build()
        .await?;
    let mut settled: Option<Instant> = None;
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            changed = manager.changed() => {
                step(leads, false);
                settled = changed?.then(|| Instant::now() + SETTLING);
            }
            () = sleep_until(settled.unwrap_or_else(Instant::now)), if settled.is_some() => {
                settled = None;
                anyhow::ensure!(is_held_by(client, namespace, identity).await?, "another replica took the lease too");
                step(leads, true);
            }
        }
    }
    if leads.send_replace(false) || settled.is_some() {
        manager.release().await?;
        info!("gave the lease back");
    }
    Ok(())
}

/// Whether the lease names this replica now.
async fn is_held_by(client: &Client, namespace: &str, identity: &str) -> Result<bool, Error> {
    let api: Api<Lease> = Api::namespaced(client.clone(), namespace);
    let lease = call("read the lease", api.get(names::LEADER_LEASE)).await?;
    Ok(lease.spec.and_then(|s| s.holder_identity).as_deref() == Some(identity))
}

fn step(leads: &watch::Sender<bool>, now: bool) {
    if leads.send_replace(now) != now {
        info!(leads = now, "leadership changed");
    }
}
